"""`lowmem-load inspect`: what a checkpoint holds, from its headers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import print_all, print_json, working
from lowmem_load.quantities import count, duration, size
from lowmem_load.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_load.inspection.checkpoint import Inspection

MAX_ROWS = 12
"""Files, and names of a kind, that are shown; --json has all."""


def inspect(
    name: options.Name,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every stored tensor.")] = False,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    auto_class: options.AutoClass = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint holds and what loading does to it.

    Reads headers only, also of models on the Hub.

    \b
    lowmem-load inspect /models/Llama-3.1-8B
    lowmem-load inspect deepseek-ai/DeepSeek-V3 --json
    """
    with working():
        from lowmem_load.inspection.checkpoint import Asked, inspect_checkpoint
        from lowmem_load.remote.checkpoint import open_checkpoint

        with open_checkpoint(name, subfolder=subfolder, revision=revision) as checkpoint:
            found = inspect_checkpoint(checkpoint, Asked(subfolder, auto_class, trust_remote_code))
    if as_json:
        print_json({**asdict(found), "by_dtype": found.by_dtype})
    else:
        print_all(list(_parts(found, with_tensors=tensors)))


def _parts(found: Inspection, *, with_tensors: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [facts(found.name, _head(found)), ""]
    if found.conversions:
        rows = [
            (
                each.kind,
                f"{each.num_parameters:,}",
                size(each.stored_bytes),
                size(each.read_bytes),
                f"{each.num_reads:,}",
                each.example,
            )
            for each in found.conversions
        ]
        columns = ("what is done on load", "parameters", "held", "read", "reads", "example")
        parts.append(table("Conversions", columns, rows, right=columns[1:5]))
    rows_of_files = [(file.name, size(file.nbytes), f"{file.num_tensors:,}") for file in found.files[:MAX_ROWS]]
    if len(found.files) > MAX_ROWS:
        rows_of_files.append((f"... and {len(found.files) - MAX_ROWS} more", "", ""))
    parts.append(table("Files", ("file", "size", "tensors"), rows_of_files, right=("size", "tensors")))
    if with_tensors:
        listed = [
            (each.name, each.dtype, "x".join(map(str, each.shape)), size(each.nbytes), each.file)
            for each in found.tensors
        ]
        parts.append(table("Tensors", ("name", "dtype", "shape", "size", "file"), listed, right=("size",)))
    return parts


def _head(found: Inspection) -> dict[str, str]:
    stored = ", ".join(f"{dtype}: {number:,} of {size(nbytes)}" for dtype, (number, nbytes) in found.by_dtype.items())
    largest = ", ".join(f"{name} ({count(numel)})" for name, numel in found.largest[:2])
    fetched = ""
    if found.revision is not None:
        fetched = (
            f"{size(found.fetched_bytes)} of weight files in {found.num_requests} requests, at {found.revision[:12]}"
        )
    return {
        "architecture": ", ".join(found.architectures) + (f" ({found.model_type})" if found.model_type else ""),
        "parameters": f"{count(found.num_elements)}; largest: {largest}" if found.num_elements else "",
        "dtype of the config": found.dtype,
        "quantization": found.quantization or "none",
        "adapter of": found.base_of_adapter or "",
        "stored": f"{size(sum(file.nbytes for file in found.files))} in {len(found.files)} files; tensors: {stored}",
        "tied": _some([" = ".join(names) for names in found.tied]),
        "missing": _some(found.missing_keys),
        "unexpected": _some(found.unexpected_keys),
        "of other shape": _some(found.mismatched_keys),
        "values read to describe": ", ".join(f"{reason} {size(nbytes)}" for reason, nbytes in found.read_to_describe),
        "not described": found.not_described or "",
        "fetched": fetched,
        "took": duration(found.seconds),
    }


def _some(names: Any) -> str:
    shown = ", ".join(map(str, list(names)[:3]))
    return f"{len(names)}: {shown}{', ...' if len(names) > 3 else ''}" if names else ""
