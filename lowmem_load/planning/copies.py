"""From an expression and a flat range to a list of copies. Pure, no I/O.

[Note: loop nests] A piece of a destination is written as a loop nest: for every combination of the loop variables
`t`, destination element `destination_start + sum(t * destination_stride)` takes the element of the expression whose
index along each dim is `base + sum(t * coefficient)`. Walking down the tree rewrites the index until it is that of a
leaf. A slice scales and shifts it, a permutation reorders it, a concatenation splits the loops at the borders of its
parts, a reshape regroups them. Loops are cut where the leaf changes, or the step between its elements; elements are
never counted one by one. Where the rows of two shapes do not divide each other, the step changes at the end of each
row, but the pattern repeats after the least common multiple of the two: it is cut for one repetition, however many
there are. So the cost of planning depends on the number of copies, and not on the number of elements that they move.

[Note: loops do not meet] In the index along a dim, the coefficient of each loop is larger than all that the loops of
smaller coefficients add up to. It holds for the loops over a box, and every rewriting keeps it. So at most one
iteration of the loop of the largest coefficient lies across a border.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lowmem_load.planning.expression import (
    Cast,
    Concat,
    Elementwise,
    Expression,
    Instance,
    Leaf,
    Permute,
    Pick,
    Reshape,
    Shape,
    Slice,
    Slot,
    reshape,
)
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.ranges import FlatRange


@dataclass(frozen=True, slots=True)
class Copy:
    """One move of elements from a leaf into a destination; `nest` says which go where."""

    leaf: Leaf
    nest: Nest


# -- loop nests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Index:
    """Index along one dim: `base + sum(t[i] * coefficients[i])`, all terms >= 0."""

    base: int
    coefficients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Loops over the current expression, and its index along each dim. See [Note: loop nests]."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    index: tuple[_Index, ...]
    casts: tuple[torch.dtype, ...]

    def span(self, index: _Index) -> int:
        """Largest value of `index` minus its base."""
        return sum(c * (size - 1) for c, size in zip(index.coefficients, self.sizes, strict=True))

    def split(self, loop: int, at: Sequence[int]) -> Iterator[_Indexed]:
        """Yield the nests of `loop` cut at the given iterations; empty pieces are left out."""
        cuts = [0, *at, self.sizes[loop]]
        for first, last in pairwise(cuts):
            if last > first:
                yield self._window(loop, first, last - first)

    def _window(self, loop: int, first: int, size: int) -> _Indexed:
        index = tuple(_Index(i.base + first * i.coefficients[loop], i.coefficients) for i in self.index)
        start = self.start + first * self.strides[loop]
        return replace(self, sizes=_set(self.sizes, loop, size), start=start, index=index)

    def tile(self, loop: int, inner: int) -> _Indexed:
        """Return the same nest with `loop` (a multiple of `inner` iterations) as an outer and an inner loop."""
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


def _row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the boxes, in order, whose elements are `[start, end)` of a row-major tensor; per dim [first, last)."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start, end),) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
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
    """Yield the copies that fill a destination with `flat_range` of `expression`; what is made of them is proved."""
    casts: tuple[torch.dtype, ...] = ()
    while isinstance(expression, Reshape | Cast | Instance):  # none changes the flat order
        if isinstance(expression, Instance):
            expression = expression.expanded()
            continue
        if isinstance(expression, Cast):
            casts = (expression.dtype, *casts)
        expression = expression.part
    if flat_range.numel == 0:
        return
    if isinstance(expression, Leaf):
        yield Copy(expression, Nest(flat_range.start, 0, (Axis(flat_range.numel, 1, 1),), casts))
        return
    start = 0
    for box in _boxes(expression.shape, flat_range.start, flat_range.end):
        sizes = tuple(last - first for first, last in box)
        index = tuple(_Index(first, _set((0,) * len(box), dim, 1)) for dim, (first, _) in enumerate(box))
        yield from _walk(expression, _Indexed(sizes, _row_major_strides(sizes), start, index, casts))
        start += math.prod(sizes)


def _walk(node: Expression, nest: _Indexed) -> Iterator[Copy]:
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
    elif isinstance(node, Slot):
        raise TypeError(f"{node} is no part of a pattern")
    elif isinstance(node.part, Leaf):  # whose own rows need not be told apart
        yield _copy_of_leaf(node.part, node.shape, nest)
    else:
        for piece in _regroup(nest, node.shape, node.part.shape):
            yield from _walk(node.part, piece)


def _combined(base: int, coefficients: Sequence[int], index: Sequence[_Index], nest: _Indexed) -> _Index:
    """Return the index `base + sum(coefficient * index)`."""
    terms = [(c, i) for c, i in zip(coefficients, index, strict=True) if c]
    return _Index(
        base + sum(c * i.base for c, i in terms),
        tuple(sum(c * i.coefficients[loop] for c, i in terms) for loop in range(len(nest.sizes))),
    )


def _copy_of_leaf(leaf: Leaf, shape: Shape, nest: _Indexed) -> Copy:
    """Return the copy of the elements of `leaf`, seen as of `shape`, that `nest` goes through."""
    whole = _combined(0, _row_major_strides(shape), nest.index, nest)
    axes = tuple(map(Axis, nest.sizes, whole.coefficients, nest.strides))
    moved = Nest(whole.base, nest.start, axes, nest.casts).merged()
    if isinstance(leaf, Elementwise) and [axis.source for axis in moved.axes] != [1]:
        return _copy_of_picked(leaf, shape, nest, whole.coefficients)
    return Copy(leaf, moved)


def _copy_of_picked(leaf: Elementwise, shape: Shape, nest: _Indexed, leaf_strides: Sequence[int]) -> Copy:
    """Return the copy of an operation, seen as of `shape`, that is done on the elements that `nest` goes through alone.

    The picked elements are in the order of the leaf, so that what they are made of is read front to back.
    """
    order = sorted((loop for loop, stride in enumerate(leaf_strides) if stride), key=lambda loop: -leaf_strides[loop])
    sizes = tuple(nest.sizes[loop] for loop in order)
    bases = tuple(i.base for i in nest.index)
    coefficients = tuple(tuple(i.coefficients[loop] for loop in order) for i in nest.index)
    parts = tuple(Pick(reshape(part, shape), bases, coefficients, sizes, part.dtype) for part in leaf.parts)
    strides = dict(zip(order, _row_major_strides(sizes), strict=True))
    axes = tuple(Axis(size, strides.get(loop, 0), nest.strides[loop]) for loop, size in enumerate(nest.sizes))
    return Copy(replace(leaf, parts=parts, shape=sizes), Nest(0, nest.start, axes, nest.casts).merged())


def _walk_concat(node: Concat, nest: _Indexed) -> Iterator[Copy]:
    """Send each piece of the nest to the part that holds it, cutting the widest loop at the borders."""
    pending = [nest]
    while pending:
        current = pending.pop()
        index = current.index[node.dim]
        part = bisect_right(node.ends, index.base)
        if index.base + current.span(index) >= node.ends[part]:
            pending.extend(reversed(list(_cut(current, index, node.ends[part]))))
            continue
        moved = _Index(index.base - node.ends[part] + node.parts[part].shape[node.dim], index.coefficients)
        within = (*current.index[: node.dim], moved, *current.index[node.dim + 1 :])
        yield from _walk(node.parts[part], replace(current, index=within))


def _cut(nest: _Indexed, index: _Index, border: int) -> Iterator[_Indexed]:
    """Yield the pieces of `nest` below `border` and from it on; between them the iteration that lies across, if any."""
    loop = _widest(nest, index)
    yield from nest.split(loop, _iterations_before(nest, index, loop, border))


def _widest(nest: _Indexed, index: _Index) -> int:
    return max((c, loop) for loop, c in enumerate(index.coefficients) if nest.sizes[loop] > 1)[1]


def _iterations_before(nest: _Indexed, index: _Index, loop: int, border: int) -> tuple[int, int]:
    """Return how many iterations of the widest loop end before `border`, and how many begin before it.

    They differ by one at most. See [Note: loops do not meet].
    """
    step = index.coefficients[loop]
    rest = nest.span(index) - step * (nest.sizes[loop] - 1)
    assert rest < step, (index, nest.sizes)
    ended = max(0, (border - 1 - rest - index.base) // step + 1)
    begun = min(nest.sizes[loop], -(-(border - index.base) // step))
    return min(ended, begun), begun


def _regroup(nest: _Indexed, shape: tuple[int, ...], part_shape: tuple[int, ...]) -> Iterator[_Indexed]:
    """Yield nests over `part_shape` that together are `nest` over `shape`; both have the same elements in order."""
    groups = _groups(shape, part_shape)
    pending = [nest]
    while pending:
        current = pending.pop()
        index: list[_Index] = []
        for dims, part_dims in groups:
            strides = _row_major_strides([shape[dim] for dim in dims])
            linear = _combined(0, strides, [current.index[dim] for dim in dims], current)
            outcome = _delinearize(current, linear, [part_shape[dim] for dim in part_dims])
            if not isinstance(outcome, tuple):
                pending.extend(reversed(list(outcome)))
                break
            index.extend(outcome)
        else:
            yield replace(current, index=tuple(index))


def _groups(shape: tuple[int, ...], part_shape: tuple[int, ...]) -> list[tuple[range, range]]:
    """Return the smallest runs of dims of both shapes that hold the same number of elements."""
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


def _delinearize(nest: _Indexed, linear: _Index, shape: list[int]) -> tuple[_Index, ...] | Iterator[_Indexed]:
    """Return the index along each dim of `shape`, or finer nests to try instead when a loop wraps around a dim."""
    index: list[_Index] = []
    for dim in range(len(shape)):
        inner = math.prod(shape[dim + 1 :])
        carries = [c // inner if c % inner == 0 else 0 for c in linear.coefficients]
        remainder = _Index(linear.base % inner, tuple(0 if c % inner == 0 else c for c in linear.coefficients))
        if remainder.base + nest.span(remainder) >= inner:
            return _unwrap(nest, remainder, inner)
        index.append(_Index(linear.base // inner, tuple(carries)))
        linear = remainder
    return tuple(index)


def _unwrap(nest: _Indexed, remainder: _Index, inner: int) -> Iterator[_Indexed]:
    """Cut the widest loop of `remainder`, which runs over the end of a row of `inner` elements."""
    loop = _widest(nest, remainder)
    size, step = nest.sizes[loop], remainder.coefficients[loop]
    period = inner // math.gcd(inner, step)  # iterations after which one begins at the same place of a row again
    head = _iterations_before(nest, remainder, loop, inner)[0] % period
    whole = (size - head) // period * period
    if whole > period:
        for piece in nest.split(loop, [head, head + whole]):
            yield piece.tile(loop, period) if piece.sizes[loop] == whole else piece
        return
    cuts: list[int] = []
    iteration = 0
    while iteration < size:  # once per row in which an iteration begins
        row = (remainder.base + iteration * step) // inner
        ended, iteration = _iterations_before(nest, remainder, loop, (row + 1) * inner)
        cuts += ended, iteration
    yield from nest.split(loop, cuts)
