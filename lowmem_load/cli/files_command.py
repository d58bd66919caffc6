"""`lowmem-load verify` and `consolidate`: what is in the files of a checkpoint, checked or written anew."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowmem_load.cli.common import NO, Json, Name, Revision, Subfolder, print_all, print_json, working
from lowmem_load.cli.tables import table
from lowmem_load.errors import ConfigError
from lowmem_load.quantities import size

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def verify(
    name: Name,
    subfolder: Subfolder = "",
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Compare the files of a checkpoint with their checksums.

    Nothing is fetched.

    Known are those that the Hub gave with a download, and those of SHA256SUMS or *.sha256 beside the files. Exits with
    1 if there are files of weights of which nothing is known, with 3 if one differs.

    \b
    lowmem-load verify /models/Llama-3.1-8B
    lowmem-load verify meta-llama/Llama-3.1-8B      (what is in the cache of the Hub)
    """
    with working():
        from lowmem_load.pipeline.verify_checkpoint import verify_checkpoint

        checks = verify_checkpoint(name, subfolder=subfolder, revision=revision)
    if as_json:
        print_json([{**asdict(check), "is_proven": check.is_proven} for check in checks])
    else:
        rows = [
            (
                check.path.rpartition("/")[2],
                size(check.nbytes),
                check.algorithm,
                check.found[:16],
                "as expected" if check.is_proven else "nothing to compare with",
                check.origin or "",
            )
            for check in checks
        ]
        columns = ("file", "size", "algorithm", "digest", "result", "known from")
        print_all([table(name, columns, rows, right=("size",))])
    if not all(check.is_proven for check in checks):
        raise typer.Exit(NO)


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that save_checkpoint was given.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to be made.", show_default=False)],
    tag: Annotated[str | None, typer.Option(help="Of the checkpoint; by default the one in its file `latest`.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, bf16, fp16 or fp64.")] = "fp32",
    max_shard_size: Annotated[str, typer.Option(help="Of a file.")] = "5GB",
    processes: Annotated[int, typer.Option(min=1, help="That copy at the same time.")] = 1,
    config: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the model; by default the checkpoint's own config.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint of DeepSpeed's ZeRO.

    Of what DeepSpeed's save_checkpoint wrote; needs no GPU and no ranks.

    \b
    lowmem-load consolidate out/checkpoint-500 out/model --dtype bf16 --config meta-llama/Llama-3.1-8B
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    with working():
        import torch

        from lowmem_load.resume.consolidate import consolidate as make

        report = make(
            *(checkpoint, output),
            tag=tag,
            dtype=getattr(torch, DTYPES[dtype]),
            max_shard_size=max_shard_size,
            processes=processes,
            config=config,
        )
    if as_json:
        print_json(asdict(report))
    else:
        print_all([str(report)])
