"""Proves that a list of copies covers a destination exactly once: nothing left out, nothing written twice. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from lowmem_load.errors import PlanError

PROOF_CELLS = 1 << 24
"""Cells (one byte each) of the bitmap that proves strided copies disjoint; larger ones are proved by counting."""


class Written(Protocol):
    """The destination side of a `plan.Copy`."""

    @property
    def destination_start(self) -> int: ...  # noqa: D102

    @property
    def sizes(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def destination_strides(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def numel(self) -> int: ...  # noqa: D102

    @property
    def is_contiguous(self) -> bool: ...  # noqa: D102


def prove_coverage(name: str, copies: Sequence[Written], numel: int) -> None:
    """Check that the copies write each of the elements `[0, numel)` of a destination exactly once.

    Runs are proved by sorting. Strided copies are proved on a bitmap of their common granule; when that would need
    more than `PROOF_CELLS` cells they are proved by bounds, injectivity and count alone.

    Raises:
        PlanError: elements are left out, written twice, or lie outside; the message names the first.
    """
    if all(copy.is_contiguous for copy in copies):
        position = 0
        for start, size in sorted((copy.destination_start, copy.numel) for copy in copies):
            if start != position:
                problem = "are not covered" if start > position else "are covered twice"
                raise PlanError(f"{name}: elements [{min(start, position)}, {max(start, position)}) {problem}")
            position += size
        if position != numel:
            raise PlanError(f"{name}: {position} elements are covered, the destination has {numel}")
        return
    _prove_strided(name, copies, numel)


def _prove_strided(name: str, copies: Sequence[Written], numel: int) -> None:
    covered = sum(copy.numel for copy in copies)
    if covered != numel:
        raise PlanError(f"{name}: {covered} elements are covered, the destination has {numel}")
    for copy in copies:
        reach = 0
        for size, stride in sorted(zip(copy.sizes, copy.destination_strides, strict=True), key=lambda loop: loop[1]):
            if size > 1 and stride <= reach:
                raise PlanError(f"{name}: a copy writes elements twice: {copy.sizes} by {copy.destination_strides}")
            reach += (size - 1) * stride
        if copy.destination_start < 0 or copy.destination_start + reach >= numel:
            raise PlanError(f"{name}: a copy leaves the destination of {numel} elements")
    granule = math.gcd(numel, *(part for copy in copies for part in _granule_parts(copy)))
    if numel // granule > PROOF_CELLS:
        return
    seen = np.zeros(numel // granule, dtype=np.bool_)
    for copy in copies:
        loops = [loop for loop in zip(copy.sizes, copy.destination_strides, strict=True) if loop[1] != 1]
        run = [
            size // granule for size, stride in zip(copy.sizes, copy.destination_strides, strict=True) if stride == 1
        ]
        sizes = (*(size for size, _ in loops), *run)
        strides = (*(stride // granule for _, stride in loops), *(1 for _ in run))
        cells = np.lib.stride_tricks.as_strided(seen[copy.destination_start // granule :], sizes, strides)
        if cells.any():
            raise PlanError(f"{name}: elements are covered twice by the copy at element {copy.destination_start}")
        cells[...] = True


def _granule_parts(copy: Written) -> Iterator[int]:
    """Yield the numbers that a common granule of destination elements must divide."""
    yield copy.destination_start
    has_run = False
    for size, stride in zip(copy.sizes, copy.destination_strides, strict=True):
        has_run = has_run or stride == 1
        yield size if stride == 1 else stride
    if not has_run:
        yield 1
