"""Loop nests: which elements of one flat tensor go to which elements of another. Pure, no I/O.

Loads, proofs, shared reads and saves all describe their moves as a `Nest`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from lowmem_load.errors import PlanError

Side = Literal["source", "destination"]


class Axis(NamedTuple):
    """`size` iterations, each `source` and `destination` elements further on."""

    size: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Nest:
    """Elements that go from a flat source to a flat destination.

    For every combination of `t[i]` below `axes[i].size`, element `source + sum(t[i] * axes[i].source)` goes to element
    `destination + sum(t[i] * axes[i].destination)`, cast through `casts` in order. All counts are in elements.
    """

    source: int
    destination: int
    axes: tuple[Axis, ...]
    casts: tuple[torch.dtype, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the destination."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def source_numel(self) -> int:
        """Elements of the source: one that goes to several places counts once."""
        return math.prod(axis.size for axis in self.axes if axis.source)

    @property
    def is_run(self) -> bool:
        """Whether the elements lie next to each other on both sides."""
        return all(axis.size == 1 for axis in self.axes) or self.merged().axes == (Axis(self.numel, 1, 1),)

    def shifted(self, *, source: int = 0, destination: int = 0) -> Nest:
        """Return the same nest, so many elements further on."""
        return replace(self, source=self.source + source, destination=self.destination + destination)

    def merged(self) -> Nest:
        """Return the same nest with its axes in the order of the destination, and as few of them as possible."""
        merged: list[Axis] = []
        for axis in sorted((axis for axis in self.axes if axis.size > 1), key=lambda axis: -axis.destination):
            size, source, destination = axis
            if merged and merged[-1][1:] == (size * source, size * destination):
                merged[-1] = Axis(merged[-1].size * size, source, destination)
            else:
                merged.append(axis)
        return replace(self, axes=tuple(merged) or (Axis(1, 1, 1),))

    def gathered(self) -> Nest:
        """Return the nest that applies when its source elements have been copied into a row-major tensor."""
        axes, stride = [], self.numel
        for size, _, destination in self.axes:
            stride //= size
            axes.append(Axis(size, stride, destination))
        return replace(self, source=0, axes=tuple(axes))

    def split(self, max_numel: int) -> Iterator[Nest]:
        """Yield nests of at most `max_numel` elements each that are together this one."""
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
            else:  # one iteration is too much
                yield from replace(part, axes=inner).split(max_numel)

    def clipped(self, start: int, end: int, side: Side) -> Iterator[Nest]:
        """Yield nests, at most two per axis and one besides, that are together the elements in `[start, end)`.

        The range ends before `end`; it is one of the source or of the destination, as `side` says.

        Raises:
            PlanError: axes run into each other on that side, as those of a planned nest never do.
        """
        if side == "source":
            axes = sorted(self.axes, key=lambda axis: -axis.source)
        else:
            axes = sorted(self.axes, key=lambda axis: -axis.destination)
        for part in _clipped(replace(self, axes=tuple(axes)), start, end, side):
            yield part.merged()


def _clipped(nest: Nest, start: int, end: int, side: Side) -> Iterator[Nest]:
    """Do what `Nest.clipped` says for a nest whose axes have descending strides."""
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
        raise PlanError(f"axes of a nest run into each other: {nest.axes}")
    begin = min(axis.size, max(0, -(-(start - first) // stride)))
    stop = min(axis.size, max(begin, (end - reach - first) // stride + 1))

    def iterations(number: int, axes: tuple[Axis, ...]) -> Nest:
        part = nest.shifted(source=number * axis.source, destination=number * axis.destination)
        return replace(part, axes=axes)

    if begin > 0:  # the range may begin inside this iteration
        yield from _clipped(iterations(begin - 1, inner), start, end, side)
    if begin < stop:
        yield iterations(begin, (axis._replace(size=stop - begin), *inner))
    if stop < axis.size:  # and end inside this one
        yield from _clipped(iterations(stop, inner), start, end, side)


def extent(axes: Sequence[Axis], side: Side) -> int:
    """Return how many elements lie between the first and the end of the last that `axes` reach on one side."""
    strides = (axis.source if side == "source" else axis.destination for axis in axes)
    return 1 + sum((axis.size - 1) * stride for axis, stride in zip(axes, strides, strict=True))


def offsets(axes: Sequence[Axis]) -> Iterator[tuple[int, int]]:
    """Yield the source and destination offset of every combination of `axes`, the last of them running fastest."""
    for iterations in itertools.product(*(range(axis.size) for axis in axes)):
        pairs = list(zip(iterations, axes, strict=True))
        yield sum(t * axis.source for t, axis in pairs), sum(t * axis.destination for t, axis in pairs)
