"""Loop nests: which elements of one flat tensor go to which elements of another. Pure, no I/O.

Loads, proofs and saves all describe what they move as a `Nest`. `plan_copies` makes them of an expression.

[Note: loop nests] A piece of the destination is a loop nest. For each combination of the loop variables `t`, element
`destination + sum(t * stride)` of the destination is flat element `source + sum(t * stride)` of the expression.
Walking down the tree turns elements of a node into elements of its part:
- a strided node has other strides, and cuts loops that run over the end of a row of its shape;
- a concatenation cuts the loops at the borders between its parts, too.

Elements are never visited one by one. If the rows of two shapes do not divide each other, a loop runs over a row end
again and again, but the places repeat after the least common multiple of the two lengths: only one repetition is cut,
and an outer loop is added for the repetitions. So the cost of planning grows with the number of copies, not with the
number of elements.

[Note: loops do not interleave] On the source side, the stride of each loop is larger than the distance that all loops
with smaller strides cover together. This is true of a run, and each rewriting keeps it. So at most one iteration of the
loop with the largest stride lies on both sides of a border, and each loop steps along one dim of a shape.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.expression import (
    Cast,
    Concat,
    Elementwise,
    Expression,
    Instance,
    Leaf,
    Strided,
    row_major_strides,
    strided,
)
from lowmem_load.planning.regions import FlatRange, Grid, Region, flat_ranges

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
        pending = [self]
        while pending:
            part = pending.pop()
            first = getattr(part, side)
            last = first + extent(part.axes, side)
            if start <= first and last <= end:
                yield part.merged()
            elif first < end and start < last:
                pending += reversed(part.cut(start if first < start else end, side, part.axes))

    def cut(self, border: int, side: Side, loops: Sequence[Axis]) -> list[Nest]:
        """Return the nest in parts: the iterations of the widest of some loops before a border, across it, behind it.

        The elements of the nest begin before the border, and end behind it.
        """
        loop, ended, begun = self.iterations_before(border, side, loops)
        return self.cut_before(loop, [ended, begun])

    def iterations_before(self, border: int, side: Side, loops: Sequence[Axis]) -> tuple[int, int, int]:
        """Return the widest of some loops, and how many iterations of it end, and begin, before a border."""
        # `reach` is how far the other loops reach behind the start of an iteration.
        widest = max((axis for axis in loops if axis.size > 1), key=lambda axis: getattr(axis, side))
        stride, first = getattr(widest, side), getattr(self, side)
        reach = extent(loops, side) - stride * (widest.size - 1) - 1
        if reach >= stride:
            raise PlanError(f"loops of a nest interleave on its {side} side: {self.axes}")
        ended = max(0, (border - 1 - reach - first) // stride + 1)
        begun = min(widest.size, -(-(border - first) // stride))
        return self.axes.index(widest), min(ended, begun), begun

    def cut_before(self, loop: int, iterations: Sequence[int]) -> list[Nest]:
        """Return the nest in parts, between which lies the start of an iteration of axis number `loop`."""
        axis, parts = self.axes[loop], []
        for first, last in itertools.pairwise([0, *iterations, axis.size]):
            if last > first:
                axes = (*self.axes[:loop], axis._replace(size=last - first), *self.axes[loop + 1 :])
                source, destination = self.source + first * axis.source, self.destination + first * axis.destination
                parts.append(Nest(source, destination, axes, self.casts))
        return parts


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
        yield from _boxes_of_grid(nest, region, shape)
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


def _boxes_of_grid(nest: Nest, grid: Grid, shape: Sequence[int]) -> Iterator[Nest]:
    """Yield the parts of a nest that copies a full tensor in order: one for each box of a grid, not for each row."""
    strides, new_strides = row_major_strides(grid.sizes), row_major_strides(shape)
    for local, first, sizes in grid.boxes():
        source = sum(map(operator.mul, local, strides))
        destination = nest.destination + sum(map(operator.mul, first, new_strides))
        yield Nest(source, destination, tuple(map(Axis, sizes, strides, new_strides)), nest.casts).merged()


# -- from an expression to copies of its leaves; see [Note: loop nests] ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one leaf that go to the destination; `nest` says which element goes where."""

    leaf: Leaf
    nest: Nest


def plan_copies(expression: Expression, flat_range: FlatRange) -> Iterator[Copy]:
    """Yield the copies that fill a destination with `flat_range` of `expression`. The caller proves the coverage."""
    if flat_range.numel:
        yield from _walk(expression, Nest(flat_range.start, 0, (Axis(flat_range.numel, 1, 1),)))


def _walk(node: Expression, nest: Nest) -> Iterator[Copy]:
    if isinstance(node, Leaf):
        yield _copy_of_leaf(node, nest.merged())
    elif isinstance(node, Cast):
        yield from _walk(node.part, replace(nest, casts=(node.dtype, *nest.casts)))  # the innermost cast comes first
    elif isinstance(node, Strided):
        yield from _walk_strided(node, nest)
    elif isinstance(node, Concat):
        yield from _walk_concat(node, nest)
    elif isinstance(node, Instance):
        yield from _walk(node.expanded(), nest)
    else:
        raise TypeError(f"{node}: a placeholder has no elements; only instances of its pattern do")


def _copy_of_leaf(leaf: Leaf, nest: Nest) -> Copy:
    if not isinstance(leaf, Elementwise) or leaf.part_group > 1 or [axis.source for axis in nest.axes] == [1]:
        return Copy(leaf, nest)
    # Computes only what the nest visits, in the order of the leaf, so that files are read front to back.
    picked = sorted((axis for axis in nest.axes if axis.source), key=lambda axis: -axis.source)
    sizes, strides = [axis.size for axis in picked], [axis.source for axis in picked]
    parts = tuple(strided(part, nest.source, strides, sizes) for part in leaf.parts)
    new_strides = dict(zip(strides, row_major_strides(sizes), strict=True))
    axes = tuple(axis._replace(source=new_strides.get(axis.source, 0)) for axis in nest.axes)
    return Copy(replace(leaf, parts=parts, shape=tuple(sizes)), Nest(0, nest.destination, axes, nest.casts).merged())


def _walk_strided(node: Strided, nest: Nest) -> Iterator[Copy]:
    rows = row_major_strides([size for size, _ in node.dims])

    def in_part(element: int) -> int:
        place = 0
        for row, (_, stride) in zip(rows, node.dims, strict=True):
            index, element = divmod(element, row)
            place += index * stride
        return place

    for piece in _within_rows(nest, rows[:-1]):
        axes = tuple(Axis(size, in_part(source), destination) for size, source, destination in piece.axes)
        yield from _walk(node.part, Nest(node.start + in_part(piece.source), piece.destination, axes, piece.casts))


def _walk_concat(node: Concat, nest: Nest) -> Iterator[Copy]:
    below = math.prod(node.shape[node.dim + 1 :])  # elements of one index along the dim
    row = node.shape[node.dim] * below
    pending = list(_within_rows(nest, [row]))[::-1]
    while pending:
        piece = pending.pop()
        before, position = divmod(piece.source, row)
        number = bisect_right(node.ends, position // below)
        part, end = node.parts[number], node.ends[number] * below
        loops = _inside(piece, row)
        if position + extent(loops, "source") > end:
            pending += reversed(piece.cut(before * row + end, "source", loops))
            continue
        part_row = part.shape[node.dim] * below
        source = before * part_row + position - (end - part_row)
        axes = tuple(Axis(size, step // row * part_row + step % row, there) for size, step, there in piece.axes)
        yield from _walk(part, Nest(source, piece.destination, axes, piece.casts))


def _within_rows(nest: Nest, rows: Sequence[int]) -> Iterator[Nest]:
    """Yield nests that are together one, so that each loop steps by whole rows of the source, or stays in one row.

    `rows` are lengths of rows, each a multiple of the next one.
    """
    pending = [nest]  # a stack, as a piece may have to be cut again
    while pending:
        piece = pending.pop()
        crossed = (row for row in rows if piece.source % row + extent(_inside(piece, row), "source") > row)
        if row := next(crossed, 0):
            pending += reversed(_cut_at_row_end(piece, row))
        else:
            yield piece


def _inside(nest: Nest, row: int) -> list[Axis]:
    """Return the loops that do not step by whole rows."""
    return [axis for axis in nest.axes if axis.source % row]


def _cut_at_row_end(nest: Nest, row: int) -> list[Nest]:
    border = nest.source - nest.source % row + row
    loop, ended, begun = nest.iterations_before(border, "source", _inside(nest, row))
    size, source, destination = nest.axes[loop]
    period = row // math.gcd(row, source)  # after so many iterations the next one starts at the same place of a row
    head = ended % period
    repeated = (size - head) // period * period
    if repeated <= period:
        return nest.cut_before(loop, [ended, begun])
    # The start up to a row end, all repetitions as one nest, and the rest.
    parts = nest.cut_before(loop, [head, head + repeated])
    tiled = Axis(repeated // period, source * period, destination * period), Axis(period, source, destination)
    axes = (*nest.axes[:loop], *tiled, *nest.axes[loop + 1 :])
    return [replace(part, axes=axes) if part.axes[loop].size == repeated else part for part in parts]
