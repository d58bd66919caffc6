"""Expressions: what a target parameter is made of. Pure data; nothing is read or allocated.

An expression is a tree. Its leaves are tensors in shard files (`Source`), tensors in memory (`Held`), and results of
operations (`Elementwise`, and `Computed` for those that need their parts in full). Its inner nodes only move elements
(`Concat`, `Strided`) or cast them (`Cast`). Shapes are logical: elements count in row-major
order, whatever strides the torch tensor that an expression stands for would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

Shape = tuple[int, ...]

IN_MEMORY = "in memory"
"""Origin of tensors that a module's constructor made, or that the caller gave."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a shard file. `start` is the byte of the file at `path` where its data starts.

    `files` reads the file as it was when the tensor was found; None leaves that to who carries out the plan.
    """

    path: str
    name: str
    start: int
    shape: Shape
    dtype: torch.dtype
    files: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Element `i` of `flat` is element `first + i` of a row-major tensor in memory; `flat` may be a part of it."""

    flat: torch.Tensor
    first: int
    shape: Shape
    dtype: torch.dtype
    origin: str = IN_MEMORY


@dataclass(frozen=True, eq=False)
class Computed:
    """The result of an operation on full tensors: `compute` gets all parts in full and returns all of the result."""

    operation: str
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    parts: tuple[Expression, ...]
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """The result of an operation whose element `i` depends only on element `i` of each part. All have one shape.

    `compute` gets the same flat range of each part, and returns that range of the result. With groups, `group` elements
    of the result come of `part_group` elements of each part, as with weights that are packed in blocks. The last group
    may be smaller.
    """

    operation: str
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    parts: tuple[Expression, ...]
    shape: Shape
    dtype: torch.dtype
    group: int = 1
    part_group: int = 1


@dataclass(frozen=True, eq=False)
class Concat:
    """`parts` one after the other along `dim`."""

    parts: tuple[Expression, ...]
    dim: int
    shape: Shape
    dtype: torch.dtype

    @cached_property
    def ends(self) -> list[int]:
        """The index along `dim` at which each part ends."""
        ends, end = [], 0
        for part in self.parts:
            end += part.shape[self.dim]
            ends.append(end)
        return ends


@dataclass(frozen=True, eq=False)
class Strided:
    """Elements of `part` under strides, as `as_strided` makes them of a row-major tensor.

    The element with the indices `i` is flat element `start + sum(i * strides)` of `part`. Slices, permutations,
    repetitions (a stride of 0) and other shapes are made so. Several of them are one node, unless a reshape is between.
    """

    part: Expression
    start: int
    strides: Shape
    shape: Shape
    dtype: torch.dtype

    @cached_property
    def dims(self) -> list[tuple[int, int]]:
        """Size and stride of each dim, where neighbors that are one dim of the part count as one."""
        return merged_dims(self.shape, self.strides)


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """`part`, each element converted to `dtype` as `Tensor.to` does."""

    part: Expression
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Placeholder:
    """A place in a pattern, where each `Instance` of the pattern has a part."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """`pattern` with `parts` in place of its placeholders. Expressions that differ only in leaves share a pattern."""

    pattern: Expression
    placeholders: tuple[Placeholder, ...]
    parts: tuple[Expression, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the pattern."""
        return self.pattern.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the pattern."""
        return self.pattern.dtype

    def expanded(self) -> Expression:
        """Return the expression that this stands for."""
        return substituted(self.pattern, dict(zip(map(id, self.placeholders), self.parts, strict=True)))


def substituted(node: Expression, places: dict[int, Expression]) -> Expression:
    """Return an expression with others in the place of some of its nodes, by `id`. `places` gets its other nodes."""
    if id(node) not in places:
        made = node
        if isinstance(node, Strided | Cast):
            made = replace(node, part=substituted(node.part, places))
        elif not isinstance(node, Source | Held | Placeholder):  # a pattern has no sources
            made = replace(node, parts=tuple(substituted(part, places) for part in node.parts))
        places[id(node)] = made
    return places[id(node)]


Leaf = Source | Held | Computed | Elementwise
Expression = Leaf | Concat | Strided | Cast | Placeholder | Instance


def hold(tensor: torch.Tensor, origin: str = IN_MEMORY) -> Held:
    """Return a tensor in memory as an expression, which shares its memory if it is contiguous."""
    return Held(tensor.detach().contiguous().view(-1), 0, tuple(tensor.shape), tensor.dtype, origin)


def concat(parts: Sequence[Expression], dim: int) -> Expression:
    """Return `parts` joined along `dim` (0 <= dim). The caller makes sure that the shapes fit."""
    first = parts[0]
    size = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return Concat(tuple(parts), dim, shape, first.dtype)


def row_major_strides(shape: Sequence[int]) -> Shape:
    """Return how many elements apart neighbors along each dim are in a row-major tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def merged_dims(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return size and stride of the dims that remain if dims that are one dim are joined; none for a single element."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size != 1:
            dims.append((size, stride))
    return dims


def are_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether dims do not run into each other, unless they repeat. See [Note: loops do not interleave]."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def strided(part: Expression, start: int, strides: Sequence[int], shape: Sequence[int]) -> Expression:
    """Return elements of `part` under strides: itself, if these are all in order. See `Strided`."""
    if isinstance(part, Strided) and part.dims in ([], [(numel(part), 1)]):
        start += part.start
        part = part.part
    if start == 0 and tuple(shape) == part.shape and tuple(strides) == row_major_strides(shape):
        return part
    return Strided(part, start, tuple(strides), tuple(shape), part.dtype)


def _as_strided(part: Expression) -> tuple[Expression, int, list[int]]:
    if isinstance(part, Strided):
        return part.part, part.start, list(part.strides)
    return part, 0, list(row_major_strides(part.shape))


def slice_dim(part: Expression, dim: int, start: int, step: int, size: int) -> Expression:
    """Return `size` elements of `part` along `dim`, from `start` on, `step` apart."""
    base, first, strides = _as_strided(part)
    first += start * strides[dim]
    strides[dim] *= step
    return strided(base, first, strides, (*part.shape[:dim], size, *part.shape[dim + 1 :]))


def expand(part: Expression, shape: Sequence[int]) -> Expression:
    """Return `part` broadcast to `shape` by torch's rules."""
    base, first, strides = _as_strided(part)
    num_new = len(shape) - len(part.shape)
    sizes = zip(part.shape, shape[num_new:], strides, strict=True)
    kept = [stride if size == wanted else 0 for size, wanted, stride in sizes]
    return strided(base, first, [0] * num_new + kept, shape)


def permute(part: Expression, dims: Sequence[int]) -> Expression:
    """Return `part` with its dims in the order `dims` (all 0 <= dim)."""
    base, first, strides = _as_strided(part)
    return strided(base, first, [strides[dim] for dim in dims], [part.shape[dim] for dim in dims])


def reshape(part: Expression, shape: Sequence[int]) -> Expression:
    """Return `part` under `shape`, which has no -1."""
    return strided(part, 0, row_major_strides(shape), shape)


def cast(part: Expression, dtype: torch.dtype) -> Expression:
    """Return `part` as `dtype`: itself if it has that dtype."""
    return part if part.dtype == dtype else Cast(part, part.shape, dtype)


def without_casts(part: Expression) -> tuple[Expression, tuple[torch.dtype, ...]]:
    """Return `part` before its casts, and the dtypes to which it was cast. To cast block by block saves memory."""
    if isinstance(part, Cast):
        inner, dtypes = without_casts(part.part)
        return inner, (*dtypes, part.dtype)
    if isinstance(part, Strided):
        inner, dtypes = without_casts(part.part)
        return strided(inner, part.start, part.strides, part.shape), dtypes
    return part, ()


def numel(expression: Expression) -> int:
    """Return the number of elements."""
    return math.prod(expression.shape)


def leaves(expression: Expression) -> list[Leaf]:
    """Return the distinct leaves in order of first appearance, those inside `Computed` and `Elementwise` included."""
    distinct: list[Leaf] = []
    seen: set[int] = set()
    stack: list[Expression] = [expression]  # no recursion: conversions of many layers are deep
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Leaf):
            distinct.append(node)
        stack.extend(children(node)[::-1])
    return distinct


def children(expression: Expression) -> tuple[Expression, ...]:
    """Return the direct parts of an expression; of an `Instance`, also its pattern."""
    if isinstance(expression, Source | Held | Placeholder):
        return ()
    if isinstance(expression, Strided | Cast):
        return (expression.part,)
    if isinstance(expression, Instance):
        return (*expression.parts, expression.pattern)
    return expression.parts
