"""Loop nests: which elements of one flat tensor go to which elements of another. Pure, no I/O.

Loads, proofs and saves all describe what they move as a `Nest`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.ranges import FlatRange, Grid, Region, flat_ranges

Side = Literal["source", "destination"]


class Axis(NamedTuple):
    """One loop of `size` iterations, which are `source` elements apart on one side and `destination` on the other."""

    size: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Nest:
    """Elements that go from a flat source to a flat destination.

    For each combination of loop variables `t[i] < axes[i].size`, element `source + sum(t[i] * axes[i].source)` goes to
    element `destination + sum(t[i] * axes[i].destination)`, converted to each dtype of `casts` in order. All numbers
    are elements.
    """

    source: int
    destination: int
    axes: tuple[Axis, ...]
    casts: tuple[torch.dtype, ...] = ()

    @property
    def numel(self) -> int:
        """Elements that are written."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def source_numel(self) -> int:
        """Elements that are read. An element that goes to several places counts once."""
        return math.prod(axis.size for axis in self.axes if axis.source)

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous and in the same order on both sides."""
        return self.merged().axes == (Axis(self.numel, 1, 1),)

    def shifted(self, *, source: int = 0, destination: int = 0) -> Nest:
        """Return the nest moved by so many elements on either side."""
        return replace(self, source=self.source + source, destination=self.destination + destination)

    def merged(self) -> Nest:
        """Return the same nest with as few axes as possible, those with larger destination strides first."""
        merged: list[Axis] = []
        for axis in sorted((axis for axis in self.axes if axis.size > 1), key=lambda axis: -axis.destination):
            size, source, destination = axis
            if merged and merged[-1][1:] == (size * source, size * destination):
                merged[-1] = Axis(merged[-1].size * size, source, destination)
            else:
                merged.append(axis)
        return replace(self, axes=tuple(merged) or (Axis(1, 1, 1),))

    def gathered(self) -> Nest:
        """Return the nest to use once the source elements were copied, in the order of the axes, side by side."""
        axes, stride = [], self.numel  # destination strides stay; source strides become those of a row-major tensor
        for size, _, destination in self.axes:
            stride //= size
            axes.append(Axis(size, stride, destination))
        return replace(self, source=0, axes=tuple(axes))

    def split(self, max_numel: int) -> Iterator[Nest]:
        """Yield nests of at most `max_numel` elements each that are together this nest."""
        if not self.axes:
            yield self
            return
        (size, source, destination), inner = self.axes[0], self.axes[1:]
        numel = math.prod(axis.size for axis in inner)
        step = max(1, max_numel // numel)
        for first in range(0, size, step):
            part = self.shifted(source=first * source, destination=first * destination)
            num = min(step, size - first)
            if num * numel <= max_numel:
                yield replace(part, axes=(Axis(num, source, destination), *inner))
            else:  # a single iteration is too large
                yield from replace(part, axes=inner).split(max_numel)

    def clipped(self, start: int, end: int, side: Side) -> Iterator[Nest]:
        """Yield nests that are together the elements whose position on one side lies in `[start, end)`.

        Raises PlanError if loops interleave on that side. Those of a planned nest do not.
        """
        axes = sorted(self.axes, key=lambda axis: -getattr(axis, side))
        for part in _clipped(replace(self, axes=tuple(axes)), start, end, side):
            yield part.merged()


def _clipped(nest: Nest, start: int, end: int, side: Side) -> Iterator[Nest]:
    # The axes have descending strides on that side.
    first = getattr(nest, side)
    last = first + extent(nest.axes, side)
    if last <= start or first >= end:
        return
    if first >= start and last <= end:
        yield nest
        return
    axis, inner = nest.axes[0], nest.axes[1:]
    stride, reach = getattr(axis, side), extent(inner, side)
    if stride < reach:
        raise PlanError(f"loops of a nest interleave on its {side} side: {nest.axes}")
    # Iterations that lie inside as a whole are `[begin, stop)`.
    begin = min(axis.size, max(0, -(-(start - first) // stride)))
    stop = min(axis.size, max(begin, (end - reach - first) // stride + 1))

    def iterations(number: int, axes: tuple[Axis, ...]) -> Nest:
        part = nest.shifted(source=number * axis.source, destination=number * axis.destination)
        return replace(part, axes=axes)

    if begin > 0:  # the range may start inside this iteration
        yield from _clipped(iterations(begin - 1, inner), start, end, side)
    if begin < stop:
        yield iterations(begin, (axis._replace(size=stop - begin), *inner))
    if stop < axis.size:  # the range may end inside this iteration
        yield from _clipped(iterations(stop, inner), start, end, side)


def extent(axes: Sequence[Axis], side: Side) -> int:
    """Return the elements from the first to the last one that `axes` reach on one side, both included."""
    strides = (axis.source if side == "source" else axis.destination for axis in axes)
    return 1 + sum((axis.size - 1) * stride for axis, stride in zip(axes, strides, strict=True))


def offsets(axes: Sequence[Axis]) -> Iterator[tuple[int, int]]:
    """Yield the source and destination offset of each combination of iterations. The last axis runs fastest."""
    for iterations in itertools.product(*(range(axis.size) for axis in axes)):
        pairs = list(zip(iterations, axes, strict=True))
        yield sum(t * axis.source for t, axis in pairs), sum(t * axis.destination for t, axis in pairs)


def nests_within(nest: Nest, region: Region, shape: Sequence[int]) -> Iterator[Nest]:
    """Yield the parts of a nest whose source elements lie in a region of a tensor of `shape`.

    Their source counts in the memory of the region.
    """
    if not region.numel:
        return
    is_run = nest.axes == (Axis(nest.numel, 1, 1),)
    if isinstance(region, Grid) and is_run and nest.numel == math.prod(shape):
        yield from _boxes(nest, region, shape)
        return
    first = 0  # of the range, in the memory of the region
    for span in (region,) if isinstance(region, FlatRange) else flat_ranges(region, tuple(shape)):
        if is_run:  # most tensors are: many times faster than `clipped`
            start, end = max(span.start, nest.source), min(span.end, nest.source + nest.numel)
            if start < end:
                there = nest.destination + start - nest.source
                yield Nest(first + start - span.start, there, (Axis(end - start, 1, 1),), nest.casts)
        else:
            for part in nest.clipped(span.start, span.end, "source"):
                yield part.shifted(source=first - span.start)
        first += span.numel


def _boxes(nest: Nest, grid: Grid, shape: Sequence[int]) -> Iterator[Nest]:
    """Yield the parts of a nest that copies a whole tensor in order: one for each box of a grid, not for each row."""
    local, whole = row_major_strides(grid.sizes), row_major_strides(shape)
    dims: list[list[tuple[int, int, int]]] = []  # of each run of each dim: first index here, there, and length
    for runs in grid.runs:
        starts = itertools.accumulate((end - start for start, end in runs), initial=0)
        dims.append([(here, start, end - start) for here, (start, end) in zip(starts, runs, strict=False)])
    for box in itertools.product(*dims):
        axes = tuple(Axis(size, here, there) for (_, _, size), here, there in zip(box, local, whole, strict=True))
        source = sum(first * stride for (first, _, _), stride in zip(box, local, strict=True))
        destination = sum(first * stride for (_, first, _), stride in zip(box, whole, strict=True))
        yield Nest(source, nest.destination + destination, axes, nest.casts).merged()


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return how many elements apart neighbours along each dim are in a row-major tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
