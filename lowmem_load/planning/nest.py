"""Loop nests: which elements of one flat tensor go to which elements of another. Pure, no I/O.

Loads, proofs and saves all describe what they move as a `Nest`. `plan_copies` makes them of an expression.

[Note: loop nests] A piece of the destination is a loop nest. For each combination of the loop variables `t`, element
`start + sum(t * stride)` of the destination is the element of the expression whose index along each dim is
`base + sum(t * coefficient)`. Walking down the tree turns this index into an index of a leaf:
- a slice scales and shifts it, a permutation reorders its dims;
- a concatenation cuts the loops at the borders between its parts;
- a reshape computes the index along the dims of the other shape, and cuts loops that run over the end of a row.

Elements are never visited one by one. If the rows of two shapes do not divide each other, a loop runs over a row end
again and again, but the places repeat after the least common multiple of the two lengths: only one repetition is cut,
and an outer loop is added for the repetitions. So the cost of planning grows with the number of copies, not with the
number of elements.

[Note: loops do not interleave] In the index along one dim, the coefficient of each loop is larger than the distance
that all loops with smaller coefficients cover together. This is true of the loops over a box, and each rewriting keeps
it. So at most one iteration of the loop with the largest coefficient lies on both sides of a border.
"""

from __future__ import annotations

import itertools
import math
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
    Permute,
    Pick,
    Placeholder,
    Reshape,
    Shape,
    Slice,
    reshape,
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


# -- from an expression to copies of its leaves; see [Note: loop nests] ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one leaf that go to the destination; `nest` says which element goes where."""

    leaf: Leaf
    nest: Nest


class _Index(NamedTuple):
    """An index along one dim: `base + sum(t[i] * coefficients[i])`. No term is negative."""

    base: int
    coefficients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Loops:
    """A loop nest over the current expression; see [Note: loop nests]."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of each loop, in elements of the destination
    start: int  # first element of the destination
    index: tuple[_Index, ...]  # of the expression, along each of its dims
    casts: tuple[torch.dtype, ...]  # to which the elements are converted, in order

    def span(self, index: _Index) -> int:
        return sum(c * (size - 1) for c, size in zip(index.coefficients, self.sizes, strict=True))

    def split(self, loop: int, at: Sequence[int]) -> Iterator[_Loops]:
        for first, last in itertools.pairwise([0, *at, self.sizes[loop]]):
            if last > first:
                index = tuple(_Index(i.base + first * i.coefficients[loop], i.coefficients) for i in self.index)
                start = self.start + first * self.strides[loop]
                yield replace(self, sizes=_set(self.sizes, loop, last - first), start=start, index=index)

    def tile(self, loop: int, inner: int) -> _Loops:
        """Return this nest with `loop` as two; the inner one has `inner` iterations, which divide those of `loop`."""
        return replace(
            self,
            sizes=(*_set(self.sizes, loop, self.sizes[loop] // inner), inner),
            strides=(*_set(self.strides, loop, self.strides[loop] * inner), self.strides[loop]),
            index=tuple(
                _Index(i.base, (*_set(i.coefficients, loop, i.coefficients[loop] * inner), i.coefficients[loop]))
                for i in self.index
            ),
        )


def _set(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    # A box has `(first, end)` for each dim.
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start, end),) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows; what is before and behind them are boxes of their own
    if first > last:  # inside one row
        for box in _boxes(shape[1:], start - last * row, end - last * row):
            yield ((last, last + 1), *box)
        return
    if start < first * row:
        for box in _boxes(shape[1:], start - (first - 1) * row, row):
            yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if last * row < end:
        for box in _boxes(shape[1:], 0, end - last * row):
            yield ((last, last + 1), *box)


def plan_copies(expression: Expression, flat_range: FlatRange) -> Iterator[Copy]:
    """Yield the copies that fill a destination with `flat_range` of `expression`. The caller proves the coverage."""
    casts: tuple[torch.dtype, ...] = ()
    while isinstance(expression, Reshape | Cast | Instance):  # these keep the flat order
        if isinstance(expression, Instance):
            expression = expression.expanded()
            continue
        if isinstance(expression, Cast):
            casts = (expression.dtype, *casts)  # the innermost cast comes first
        expression = expression.part
    if flat_range.numel == 0:
        return
    if isinstance(expression, Leaf):  # one run, where boxes would be several
        yield Copy(expression, Nest(flat_range.start, 0, (Axis(flat_range.numel, 1, 1),), casts))
        return
    start = 0
    for box in _boxes(expression.shape, flat_range.start, flat_range.end):
        sizes = tuple(last - first for first, last in box)
        index = tuple(_Index(first, _set((0,) * len(box), dim, 1)) for dim, (first, _) in enumerate(box))
        yield from _walk(expression, _Loops(sizes, row_major_strides(sizes), start, index, casts))
        start += math.prod(sizes)


def _walk(node: Expression, nest: _Loops) -> Iterator[Copy]:
    if isinstance(node, Leaf):
        yield _copy_of_leaf(node, node.shape, nest)
    elif isinstance(node, Cast):
        yield from _walk(node.part, replace(nest, casts=(node.dtype, *nest.casts)))
    elif isinstance(node, Slice):
        index = tuple(
            _Index(start + step * i.base, tuple(step * c for c in i.coefficients))
            for i, start, step in zip(nest.index, node.starts, node.steps, strict=True)
        )
        yield from _walk(node.part, replace(nest, index=index))
    elif isinstance(node, Pick):
        index = tuple(
            _combined(base, coefficients, nest.index, nest)
            for base, coefficients in zip(node.bases, node.coefficients, strict=True)
        )
        yield from _walk(node.part, replace(nest, index=index))
    elif isinstance(node, Permute):
        order = sorted(range(len(node.dims)), key=lambda dim: node.dims[dim])
        yield from _walk(node.part, replace(nest, index=tuple(nest.index[dim] for dim in order)))
    elif isinstance(node, Concat):
        yield from _walk_concat(node, nest)
    elif isinstance(node, Instance):
        yield from _walk(node.expanded(), nest)
    elif isinstance(node, Placeholder):
        raise TypeError(f"{node}: a placeholder has no elements; only instances of its pattern do")
    elif isinstance(node.part, Leaf):  # only the flat order of a leaf matters, so its own shape needs no cuts
        yield _copy_of_leaf(node.part, node.shape, nest)
    else:
        for piece in _regroup(nest, node.shape, node.part.shape):
            yield from _walk(node.part, piece)


def _combined(base: int, coefficients: Sequence[int], index: Sequence[_Index], nest: _Loops) -> _Index:
    terms = [(c, i) for c, i in zip(coefficients, index, strict=True) if c]
    return _Index(
        base + sum(c * i.base for c, i in terms),
        tuple(sum(c * i.coefficients[loop] for c, i in terms) for loop in range(len(nest.sizes))),
    )


def _copy_of_leaf(leaf: Leaf, shape: Shape, nest: _Loops) -> Copy:
    # The nest's index is one of `leaf` under `shape`.
    flat = _combined(0, row_major_strides(shape), nest.index, nest)
    axes = tuple(map(Axis, nest.sizes, flat.coefficients, nest.strides))
    moved = Nest(flat.base, nest.start, axes, nest.casts).merged()
    is_scattered = [axis.source for axis in moved.axes] != [1]
    if isinstance(leaf, Elementwise) and leaf.part_group == 1 and is_scattered:
        return _copy_of_picked(leaf, shape, nest, flat.coefficients)
    return Copy(leaf, moved)


def _copy_of_picked(leaf: Elementwise, shape: Shape, nest: _Loops, leaf_strides: Sequence[int]) -> Copy:
    # Computes only what `nest` visits, in the order of the leaf, so that files are read front to back.
    order = sorted((loop for loop, stride in enumerate(leaf_strides) if stride), key=lambda loop: -leaf_strides[loop])
    sizes = tuple(nest.sizes[loop] for loop in order)
    bases = tuple(i.base for i in nest.index)
    coefficients = tuple(tuple(i.coefficients[loop] for loop in order) for i in nest.index)
    parts = tuple(Pick(reshape(part, shape), bases, coefficients, sizes, part.dtype) for part in leaf.parts)
    strides = dict(zip(order, row_major_strides(sizes), strict=True))
    axes = tuple(Axis(size, strides.get(loop, 0), nest.strides[loop]) for loop, size in enumerate(nest.sizes))
    return Copy(replace(leaf, parts=parts, shape=sizes), Nest(0, nest.start, axes, nest.casts).merged())


def _walk_concat(node: Concat, nest: _Loops) -> Iterator[Copy]:
    # Cuts the widest loop at the borders of the parts until each piece lies in one part.
    pending = [nest]
    while pending:
        current = pending.pop()
        index = current.index[node.dim]
        part = bisect_right(node.ends, index.base)
        if index.base + current.span(index) >= node.ends[part]:
            loop = _widest(current, index)  # between the two parts comes the one iteration that crosses the border
            cuts = _iterations_before(current, index, loop, node.ends[part])
            pending.extend(reversed(list(current.split(loop, cuts))))
            continue
        moved = _Index(index.base - node.ends[part] + node.parts[part].shape[node.dim], index.coefficients)
        within = (*current.index[: node.dim], moved, *current.index[node.dim + 1 :])
        yield from _walk(node.parts[part], replace(current, index=within))


def _widest(nest: _Loops, index: _Index) -> int:
    return max((c, loop) for loop, c in enumerate(index.coefficients) if nest.sizes[loop] > 1)[1]


def _iterations_before(nest: _Loops, index: _Index, loop: int, border: int) -> tuple[int, int]:
    # Those that end before `border` and those that begin before it; see [Note: loops do not interleave].
    # `rest` is how far the other loops reach behind the start of an iteration.
    step = index.coefficients[loop]
    rest = nest.span(index) - step * (nest.sizes[loop] - 1)
    assert rest < step, (index, nest.sizes)
    ended = max(0, (border - 1 - rest - index.base) // step + 1)
    begun = min(nest.sizes[loop], -(-(border - index.base) // step))
    return min(ended, begun), begun


def _regroup(nest: _Loops, shape: tuple[int, ...], part_shape: tuple[int, ...]) -> Iterator[_Loops]:
    # Both shapes have the same flat order.
    groups = _groups(shape, part_shape)
    pending = [nest]  # a stack, as a piece may have to be cut again
    while pending:
        current = pending.pop()
        index: list[_Index] = []
        for dims, part_dims in groups:
            strides = row_major_strides([shape[dim] for dim in dims])
            linear = _combined(0, strides, [current.index[dim] for dim in dims], current)
            outcome = _delinearize(current, linear, [part_shape[dim] for dim in part_dims])
            if not isinstance(outcome, tuple):
                pending.extend(reversed(list(outcome)))
                break
            index.extend(outcome)
        else:
            yield replace(current, index=tuple(index))


def _groups(shape: tuple[int, ...], part_shape: tuple[int, ...]) -> list[tuple[range, range]]:
    # The smallest runs of neighbouring dims with the same number of elements.
    groups, i, j = [], 0, 0
    while i < len(shape) or j < len(part_shape):
        first_i, first_j, left, right = i, j, 1, 1
        if i < len(shape):
            left, i = shape[i], i + 1
        if j < len(part_shape):
            right, j = part_shape[j], j + 1
        while left != right:
            if left < right:
                left, i = left * shape[i], i + 1
            else:
                right, j = right * part_shape[j], j + 1
        groups.append((range(first_i, i), range(first_j, j)))
    return groups


def _delinearize(nest: _Loops, linear: _Index, shape: list[int]) -> tuple[_Index, ...] | Iterator[_Loops]:
    # Returns pieces of the nest to try if a loop runs over the end of a row.
    index: list[_Index] = []
    for dim in range(len(shape)):
        # Loops that step by whole rows of this dim move its index; what is left must stay within one row.
        inner = math.prod(shape[dim + 1 :])
        carries = [c // inner if c % inner == 0 else 0 for c in linear.coefficients]
        remainder = _Index(linear.base % inner, tuple(0 if c % inner == 0 else c for c in linear.coefficients))
        if remainder.base + nest.span(remainder) >= inner:
            return _unwrap(nest, remainder, inner)
        index.append(_Index(linear.base // inner, tuple(carries)))
        linear = remainder
    return tuple(index)


def _unwrap(nest: _Loops, remainder: _Index, inner: int) -> Iterator[_Loops]:
    loop = _widest(nest, remainder)
    size, step = nest.sizes[loop], remainder.coefficients[loop]
    period = inner // math.gcd(inner, step)  # after so many iterations the next one starts at the same place of a row
    head = _iterations_before(nest, remainder, loop, inner)[0] % period
    whole = (size - head) // period * period
    if whole > period:  # the start up to a row border, all repetitions as one nest, and what is left
        for piece in nest.split(loop, [head, head + whole]):
            yield piece.tile(loop, period) if piece.sizes[loop] == whole else piece
        return
    cuts: list[int] = []
    iteration = 0
    while iteration < size:  # once for each row in which an iteration starts
        row = (remainder.base + iteration * step) // inner
        ended, iteration = _iterations_before(nest, remainder, loop, (row + 1) * inner)
        cuts += ended, iteration
    yield from nest.split(loop, cuts)
