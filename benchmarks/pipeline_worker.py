"""One rank of one pipeline: runs an example as it is and measures the process around it."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lowmem_load.bench.memory import MemorySampler, Rss, read_rss

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES = -3, 64 * 1024  # malloc.h
"""Larger blocks go back to the kernel when they are freed: what malloc keeps of them differs from run to run by more
than what is to be seen."""

PLOT_SAMPLES = 2000
"""Samples of memory kept for plots, evenly picked."""


@dataclass(slots=True)
class PipelineResult:
    """What one rank saw. Bytes are above the start: after imports, before the script.

    Attributes:
        load: high-water mark, and largest anon and file, up to the first `deepspeed.initialize`, when all is loaded.
        whole: the same of the whole script: training and saving included.
        losses: of each step, as the script returns them.
        samples: (seconds, anon, file) over time.
        load_s: when the first `deepspeed.initialize` began.
    """

    rank: int
    load: Rss
    whole: Rss
    load_s: float
    losses: list[float]
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> PipelineResult:
        """Return the result that `to_json` wrote."""
        fields = json.loads(text)
        fields["load"], fields["whole"] = Rss(*fields["load"]), Rss(*fields["whole"])
        return cls(**fields)

    def to_json(self) -> str:
        """Return this result as JSON."""
        return json.dumps(asdict(self))


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

    main = import_example(script).main
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    sampler = MemorySampler()
    with _mark_initialize() as marks, sampler:
        losses = main(argv)
    use = sampler.use()
    load_high_water, initialize_s = marks[0] if marks else (use.peak + use.start_rss, float("inf"))
    start_s = sampler.start_s
    loading = [sample for sample in use.samples if sample[0] <= initialize_s - start_s]
    return PipelineResult(
        rank=rank,
        load=Rss(
            max(anon for _, anon, _ in loading), max(file for _, _, file in loading), load_high_water - use.start_rss
        ),
        whole=Rss(use.peak_anon, use.peak_file, use.peak),
        load_s=round(initialize_s - start_s, 3),
        losses=losses,
        samples=use.samples[:: max(1, len(use.samples) // PLOT_SAMPLES)],
    )


@contextmanager
def _mark_initialize() -> Iterator[list[tuple[int, float]]]:
    """Note the high-water mark and the time at each `deepspeed.initialize`."""
    import time

    import deepspeed

    ordinary = deepspeed.initialize
    marks: list[tuple[int, float]] = []

    def initialize(*args: Any, **kwargs: Any) -> Any:
        marks.append((read_rss()[0].high_water, time.perf_counter()))
        return ordinary(*args, **kwargs)

    deepspeed.initialize = initialize
    try:
        yield marks
    finally:
        deepspeed.initialize = ordinary


def main() -> None:
    """Read the spec named on the command line, run it, write this rank's result."""
    import os

    import torch.distributed as dist

    spec_path = Path(sys.argv[1])
    spec = json.loads(spec_path.read_text())
    result = run_pipeline(spec["script"], spec["argv"], int(os.environ["RANK"]))
    (spec_path.parent / f"rank{result.rank}.json").write_text(result.to_json())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
