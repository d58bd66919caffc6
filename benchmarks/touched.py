"""What the reads of a plan touch: their sizes, and pages and blocks of the files. Of plans of earlier versions, too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PAGE_BYTES, BLOCK_BYTES = 1 << 12, 1 << 20


class Span(NamedTuple):
    """Bytes of a file that one read fetches."""

    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Touched:
    """What some reads touch; bytes.

    Attributes:
        num_reads: of them.
        median_bytes: of a read.
        page_bytes, block_bytes: of all pages of 4 KiB, and blocks of 1 MiB, that hold a byte that is read.
    """

    num_reads: int
    median_bytes: int
    page_bytes: int
    block_bytes: int


def touched_by(plan: Any) -> Touched:
    """Return what executing a `LoadPlan` touches; inputs of operations on whole tensors are left out."""
    spans = list(_spans_of_plan(plan))
    pages, blocks = (count_units(spans, unit) * unit for unit in (PAGE_BYTES, BLOCK_BYTES))
    return Touched(len(spans), int(statistics.median_low([span.nbytes for span in spans] or [0])), pages, blocks)


def count_units(spans: Sequence[Span], unit: int) -> int:
    """Return how many aligned units of `unit` bytes the spans touch; a unit counts once in each file."""
    by_path: dict[str, list[tuple[int, int]]] = {}
    for path, start, nbytes in spans:
        if nbytes:
            by_path.setdefault(path, []).append((start // unit, (start + nbytes - 1) // unit + 1))
    total = 0
    for found in by_path.values():
        ordered = np.array(sorted(found), dtype=np.int64)
        ends = np.maximum.accumulate(ordered[:, 1])
        before = np.concatenate([[0], ends[:-1]])
        total += int(np.maximum(ordered[:, 1] - np.maximum(ordered[:, 0], before), 0).sum())
    return total


def _spans_of_plan(plan: Any) -> Iterator[Span]:
    for target in plan.targets:
        for fill in target.fills:
            yield from _spans(fill.steps)
    for buffer in plan.buffers:
        if buffer.fill is not None:
            yield from _spans(buffer.fill.steps)


def _spans(steps: Iterable[Any]) -> Iterator[Span]:
    for step in steps:
        if hasattr(step, "tensor"):
            itemsize = step.tensor.dtype.itemsize
            for first, _ in step.each():
                yield Span(step.tensor.path, step.tensor.start + first * itemsize, step.numel * itemsize)
        elif hasattr(step, "pieces"):
            for piece in step.pieces:
                for fill in piece.inputs:
                    yield from _spans(fill.steps)
