"""`lowmem-load inspect` and `consolidate`: questions that files answer."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowmem_load.cli import common
from lowmem_load.cli.common import Json, Name, Revision, Subfolder, answer, facts, table, working
from lowmem_load.errors import ConfigError, listed
from lowmem_load.text import count, size

if TYPE_CHECKING:
    from lowmem_load.api.inspect_checkpoint import Inspection

DTYPES = ("float64", "float32", "float16", "bfloat16")


def inspect(
    name: Name,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: common.AutoClass = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, and what loading does to its tensors.

    It reads headers only, also on the Hub. --json lists all files and stored tensors. For a training checkpoint, it
    shows which program wrote it and what it contains.

    \b
    lowmem-load inspect /models/Llama-3.1-8B
    lowmem-load inspect out/checkpoint-500
    lowmem-load inspect deepseek-ai/DeepSeek-V3 --json
    """
    with working():
        from lowmem_load.api.inspect_checkpoint import inspect_checkpoint, is_of_training, training_contents
        from lowmem_load.hf.remote_names import find_checkpoint

        contents = training_contents(name) if is_of_training(name) else None
        if contents is None:
            common.check_revision(name, revision)
            checkpoint = find_checkpoint(name, subfolder=subfolder, revision=revision)
            inspection = inspect_checkpoint(
                checkpoint, auto_class, subfolder=subfolder, trust_remote_code=trust_remote_code
            )
    if contents is not None:
        answer(as_json, contents, lambda: [facts("", contents)])
        return
    rows = [(way.kind, f"{way.num_parameters:,}", size(way.nbytes), way.example) for way in inspection.conversions]
    columns = ("done on load", "tensors", "size", "example")
    answer(
        as_json,
        {**asdict(inspection), "by_dtype": inspection.by_dtype},
        lambda: [
            facts(inspection.name, _contents(inspection)),
            *([table("", columns, rows, right=columns[1:3])] if rows else []),
        ],
    )


def _contents(inspection: Inspection) -> dict[str, str]:
    stored = ", ".join(
        f"{number:,} {dtype} tensors, {size(nbytes)}" for dtype, (number, nbytes) in inspection.by_dtype.items()
    )
    return {
        "commit": inspection.revision or "",
        "architecture": ", ".join(inspection.architectures)
        + (f" ({inspection.model_type})" if inspection.model_type else ""),
        "parameters": count(inspection.num_elements) if inspection.num_elements else "",
        "dtype of the config": inspection.dtype,
        "quantization": inspection.quantization or "none",
        "adapter of": inspection.base_of_adapter or "",
        "stored": f"{size(sum(inspection.files.values()))} in {len(inspection.files)} "
        f"file{'s' * (len(inspection.files) != 1)}; {stored}",
        "tied": listed([" = ".join(names) for names in inspection.tied], 3),
        "missing": listed(inspection.missing_keys, 3),
        "unexpected": listed(inspection.unexpected_keys, 3),
        "of other shape": listed(inspection.mismatched_keys, 3),
        "not described": inspection.not_described or "",
    }


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
