"""`lowmem-load consolidate`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowmem_load.cli.common import Json, answer, working
from lowmem_load.errors import ConfigError

DTYPES = ("float64", "float32", "float16", "bfloat16")


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that the trainer saved to.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    tag: Annotated[
        str | None, typer.Option(help="Tag of a DeepSpeed checkpoint. Default: the one in its file `latest`.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="Part of the state dict to convert, e.g. ema. Default: the model.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the weights, e.g. bfloat16. Default: as saved (float32 for ZeRO checkpoints)."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "5GB",
    config: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the model, or none to keep the names. Default: the checkpoint's config.json."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a training checkpoint to a Hugging Face folder.

    It accepts checkpoints of DeepSpeed's ZeRO, of torch DCP (accelerate, Trainer, TRL, axolotl, LLaMA-Factory,
    torchtitan) and of verl. It does not need a GPU. Processes that torchrun starts share the work.

    \b
    lowmem-load consolidate out/checkpoint-500 out/model --dtype bfloat16 --config meta-llama/Llama-3.1-8B
    torchrun --nproc-per-node 8 -m lowmem_load consolidate out/checkpoint-500 out/model
    """
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if not overwrite and output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output}: is not empty; name another folder, or pass --overwrite")
    with working():
        import torch

        from lowmem_load.distributed.process_group import DistributedInterface
        from lowmem_load.resume.consolidate import consolidate

        report = consolidate(
            checkpoint,
            output,
            tag=tag,
            part=part,
            dtype=None if dtype is None else getattr(torch, dtype),
            max_shard_size=max_shard_size,
            config=False if config == "none" else config,
            # Not by WORLD_SIZE, which pods export without ranks.
            ranks=DistributedInterface() if "TORCHELASTIC_RUN_ID" in os.environ else None,
        )
    if report.rank:
        return
    has_config = (output / "config.json").is_file()
    note = "" if has_config else "No config.json was written: --config names the model whose config.json to take."
    answer(as_json, asdict(report), lambda: [str(report), *([note] if note else [])])
