"""Turns an expression and a flat range of it into copies: which elements of which leaf go where. Pure, no I/O.

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

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

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
from lowmem_load.planning.nest import Axis, Nest, row_major_strides
from lowmem_load.planning.ranges import FlatRange


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one leaf that go to the destination; `nest` says which element goes where."""

    leaf: Leaf
    nest: Nest


# -- loop nests ------------------------------------------------------------------------------------------------------


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
        for first, last in pairwise([0, *at, self.sizes[loop]]):
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
    elif isinstance(node, Slot):
        raise TypeError(f"{node}: a slot has no elements; only instances of its pattern do")
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
