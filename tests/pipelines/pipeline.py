"""Runs examples with and without lowmem_load, measured, for `tests/pipelines/test_examples.py`."""

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed

from benchmarks.memory import high_water
from lowmem_load.phases import host_memory

LLAMAFACTORY = "llamafactory_style/train"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES = -3, 64 * 1024  # malloc.h
"""Larger blocks go back to the kernel when they are freed: what malloc keeps of them differs from run to run by more
than what is to be seen."""


@dataclass(slots=True)
class PipelineResult:
    """What one rank saw: losses, and the high-water mark of resident bytes above the start, until all is loaded."""

    rank: int
    load_peak: int
    losses: list[float]


def import_example(script: str) -> Any:
    """Return the module of `examples/<script>.py`, which imports its neighbours by plain name as a script does."""
    path = EXAMPLES / f"{script}.py"
    for folder in (str(EXAMPLES), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(path.stem)


def run_pipeline(script: str, argv: list[str], rank: int) -> PipelineResult:
    """Run `examples/<script>.py` with `argv` in this process, measured. Collective: all ranks."""
    from transformers.models.llama import modeling_llama  # noqa: F401  belongs to the start, as the other imports

    module = import_example(script)
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    start = host_memory()
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
    with _peaks_at_initialize() as peaks:
        losses = module.main(argv)
        peaks.append(high_water())  # of a script that makes no engine
    return PipelineResult(rank, peaks[0] - start.total_bytes, losses)


@contextlib.contextmanager
def _peaks_at_initialize() -> Iterator[list[int]]:
    """Note the high-water mark at each `deepspeed.initialize`."""
    ordinary = deepspeed.initialize
    peaks: list[int] = []

    def initialize(*args: Any, **kwargs: Any) -> Any:
        peaks.append(high_water())
        return ordinary(*args, **kwargs)

    deepspeed.initialize = initialize
    try:
        yield peaks
    finally:
        deepspeed.initialize = ordinary
