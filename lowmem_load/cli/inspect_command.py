"""`lowmem-load inspect`: what a checkpoint holds, from its headers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lowmem_load.cli.common import (
    AutoClass,
    Json,
    Name,
    Revision,
    Subfolder,
    TrustRemoteCode,
    print_all,
    print_json,
    working,
)
from lowmem_load.cli.tables import facts, table
from lowmem_load.quantities import count, size

if TYPE_CHECKING:
    from lowmem_load.cli.checkpoint_contents import Inspection


def inspect(
    name: Name,
    subfolder: Subfolder = "",
    revision: Revision = None,
    auto_class: AutoClass = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds and what loading does to it.

    Reads headers only, also of models on the Hub. --json lists all files and stored tensors.

    \b
    lowmem-load inspect /models/Llama-3.1-8B
    lowmem-load inspect deepseek-ai/DeepSeek-V3 --json
    """
    with working():
        from lowmem_load.cli.checkpoint_contents import inspect_checkpoint
        from lowmem_load.io.hub_checkpoint import open_checkpoint

        with open_checkpoint(name, subfolder=subfolder, revision=revision) as checkpoint:
            found = inspect_checkpoint(checkpoint, subfolder, auto_class, trust_remote_code=trust_remote_code)
    if as_json:
        print_json({**asdict(found), "by_dtype": found.by_dtype})
    else:
        rows = [(each.kind, f"{each.num_parameters:,}", size(each.nbytes), each.example) for each in found.conversions]
        columns = ("done on load", "parameters", "size", "example")
        ways = [table("", columns, rows, right=columns[1:3])] if rows else []
        print_all([facts(found.name, _head(found)), *ways])


def _head(found: Inspection) -> dict[str, str]:
    stored = ", ".join(f"{dtype}: {number:,} of {size(nbytes)}" for dtype, (number, nbytes) in found.by_dtype.items())
    return {
        "commit": found.revision or "",
        "architecture": ", ".join(found.architectures) + (f" ({found.model_type})" if found.model_type else ""),
        "parameters": count(found.num_elements) if found.num_elements else "",
        "dtype of the config": found.dtype,
        "quantization": found.quantization or "none",
        "adapter of": found.base_of_adapter or "",
        "stored": f"{size(sum(found.files.values()))} in {len(found.files)} files; tensors: {stored}",
        "tied": _some([" = ".join(names) for names in found.tied]),
        "missing": _some(found.missing_keys),
        "unexpected": _some(found.unexpected_keys),
        "of other shape": _some(found.mismatched_keys),
        "values read to describe": ", ".join(f"{reason} {size(nbytes)}" for reason, nbytes in found.read_to_describe),
        "not described": found.not_described or "",
    }


def _some(names: Any) -> str:
    shown = ", ".join(map(str, list(names)[:3]))
    return f"{len(names)}: {shown}{', ...' if len(names) > 3 else ''}" if names else ""
