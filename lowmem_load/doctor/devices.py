"""Accelerators, memory that is pinned for them, and the ops that DeepSpeed compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding
from lowmem_load.ds.extensions import ops
from lowmem_load.quantities import size

PINNED_BYTES = 1 << 20
"""Of the block that is pinned to see whether that works."""


def check_devices() -> Iterator[Finding]:
    """Yield what is to be said of accelerators, with DeepSpeed or without it."""
    try:
        import torch
    except ImportError:
        return  # said where versions are
    if not torch.accelerator.is_available():
        yield Finding("devices", NOTE, "torch sees no accelerator", "ranks would run on the CPU (DS_ACCELERATOR=cpu)")
    else:
        device = torch.accelerator.current_accelerator()
        number = torch.accelerator.device_count()
        yield Finding("devices", OK, f"{number} devices of type {device}")
        yield from _pinning()
    yield from _ops()


def _pinning() -> Iterator[Finding]:
    import torch

    try:
        torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        yield Finding(
            "devices", PROBLEM, f"memory cannot be pinned: {first}", "raise ulimit -l, or the container's limit"
        )
        return
    yield Finding("devices", OK, f"memory can be pinned ({size(PINNED_BYTES)} tried)")


def _ops() -> Iterator[Finding]:
    try:
        found = ops()
    except ImportError as error:
        yield Finding("DeepSpeed's ops", PROBLEM, f"DeepSpeed cannot be imported: {error}", "install a tested release")
        return
    for op in found:
        if op.is_built:
            yield Finding("DeepSpeed's ops", OK, f"{op.name} is compiled, {op.use}")
        elif op.is_compatible:
            advice = "nothing: it is compiled at its first use, a minute or two; TORCH_EXTENSIONS_DIR keeps it"
            yield Finding("DeepSpeed's ops", NOTE, f"{op.name} is not compiled yet, {op.use}", advice)
        else:
            advice = "install what `ds_report` says it lacks, if you want that"
            yield Finding("DeepSpeed's ops", NOTE, f"{op.name} cannot be compiled here, {op.use}", advice)
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        yield Finding(
            "DeepSpeed's ops",
            NOTE,
            "TORCH_EXTENSIONS_DIR is not set, so they are kept in ~/.cache/torch_extensions",
            "name a folder that persists, and is each machine's own",
        )
