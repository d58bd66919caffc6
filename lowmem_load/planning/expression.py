"""What a target parameter is made of: expressions over tensors in files. Pure data, nothing is read or allocated.

An expression is a tree. Its leaves are tensors in shard files (`Source`), values already in memory (`Held`) or the
result of an operation that has no element-wise description (`Computed`); its inner nodes only move elements
(`Concat`, `Slice`, `Pick`, `Permute`, `Reshape`) or cast them (`Cast`). All shapes are logical: row-major, whatever
strides the torch tensor that the expression stands for would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

Shape = tuple[int, ...]

IN_MEMORY = "in memory"
"""Origin of values that the model or the caller had: made by a module's constructor, or given as a state dict."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a shard file. `start` is the first byte of its data, absolute in the file at `path`."""

    path: str
    name: str
    start: int
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Elements that are in memory: `flat[i]` is element `first + i` of the row-major tensor of `shape`.

    `flat` may hold fewer elements than `shape` has: the part that this rank will be asked for. `origin` says where the
    values come from.
    """

    flat: torch.Tensor
    first: int
    shape: Shape
    dtype: torch.dtype
    origin: str = IN_MEMORY


@dataclass(frozen=True, eq=False)
class Computed:
    """The result of an operation that the planner cannot see through; its inputs are needed whole.

    `compute` gets the inputs as whole tensors and returns the whole result.
    """

    operation: str
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    inputs: tuple[Expression, ...]
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """The result of an operation whose element `i` depends on element `i` of each part alone; all have one shape.

    `compute` gets the same flat range of each part and returns that range of the result.
    """

    operation: str
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    parts: tuple[Expression, ...]
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Concat:
    """`parts` one after the other along `dim`."""

    parts: tuple[Expression, ...]
    dim: int
    shape: Shape
    dtype: torch.dtype

    @cached_property
    def ends(self) -> list[int]:
        """Index along `dim` at which each part ends."""
        ends, end = [], 0
        for part in self.parts:
            end += part.shape[self.dim]
            ends.append(end)
        return ends


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Element `i` along dim `d` is element `starts[d] + steps[d] * i` of `part`; a step of 0 repeats one element."""

    part: Expression
    starts: Shape
    steps: Shape
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """The elements of `part` that a loop nest goes through, one dim for each loop.

    Element `t` of the result has the index `bases[d] + sum(t * coefficients[d])` along each dim `d` of `part`.
    """

    part: Expression
    bases: Shape
    coefficients: tuple[Shape, ...]
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Permute:
    """Dim `i` of the result is dim `dims[i]` of `part`."""

    part: Expression
    dims: Shape
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Reshape:
    """The same elements in the same row-major order under another shape."""

    part: Expression
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """`part`, each element converted to `dtype` as `Tensor.to` does."""

    part: Expression
    shape: Shape = field(init=False)
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.part.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Stands in a pattern for what each `Instance` of it has in its place."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """`pattern` with `inputs` in place of its `slots`: one of many expressions that differ in their leaves alone."""

    pattern: Expression
    slots: tuple[Slot, ...]
    inputs: tuple[Expression, ...]

    @property
    def shape(self) -> Shape:
        """Of the pattern."""
        return self.pattern.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the pattern."""
        return self.pattern.dtype

    def expanded(self) -> Expression:
        """Return the expression that this stands for."""
        return _substituted(self.pattern, dict(zip(map(id, self.slots), self.inputs, strict=True)))


def _substituted(node: Expression, places: dict[int, Expression]) -> Expression:
    if isinstance(node, Slot):
        return places[id(node)]
    if isinstance(node, Instance):
        return replace(node, inputs=tuple(_substituted(part, places) for part in node.inputs))
    parts = tuple(_substituted(part, places) for part in children(node))
    if isinstance(node, Computed):
        return replace(node, inputs=parts)
    if isinstance(node, Concat | Elementwise):
        return replace(node, parts=parts)
    return replace(node, part=parts[0]) if parts and not isinstance(node, Source | Held) else node


Leaf = Source | Held | Computed | Elementwise
Expression = Leaf | Concat | Slice | Pick | Permute | Reshape | Cast | Slot | Instance


def held(tensor: torch.Tensor, origin: str = IN_MEMORY) -> Held:
    """Return a whole tensor in memory as an expression; shares its memory when it is contiguous."""
    return Held(tensor.detach().contiguous().view(-1), 0, tuple(tensor.shape), tensor.dtype, origin)


def concat(parts: Sequence[Expression], dim: int) -> Expression:
    """Return `parts` joined along `dim` (0 <= dim). Shapes are the caller's duty: torch has checked them."""
    first = parts[0]
    size = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return Concat(tuple(parts), dim, shape, first.dtype)


def slice_dim(part: Expression, dim: int, start: int, step: int, size: int) -> Expression:
    """Return `size` elements of `part` along `dim`, from `start` on, `step` apart."""
    starts, steps, shape = [0] * len(part.shape), [1] * len(part.shape), list(part.shape)
    starts[dim], steps[dim], shape[dim] = start, step, size
    return Slice(part, tuple(starts), tuple(steps), tuple(shape), part.dtype)


def expand(part: Expression, shape: Sequence[int]) -> Expression:
    """Return `part` repeated to `shape` by torch's rules of broadcasting."""
    padded = (1,) * (len(shape) - len(part.shape)) + part.shape
    if padded == tuple(shape):
        return reshape(part, shape)
    steps = tuple(1 if size == wanted else 0 for size, wanted in zip(padded, shape, strict=True))
    return Slice(reshape(part, padded), (0,) * len(padded), steps, tuple(shape), part.dtype)


def permute(part: Expression, dims: Sequence[int]) -> Expression:
    """Return `part` with its dims in the order `dims` (all 0 <= dim)."""
    if tuple(dims) == tuple(range(len(part.shape))):
        return part
    return Permute(part, tuple(dims), tuple(part.shape[dim] for dim in dims), part.dtype)


def reshape(part: Expression, shape: Sequence[int]) -> Expression:
    """Return `part` under `shape` (fully known sizes)."""
    if tuple(shape) == part.shape:
        return part
    if isinstance(part, Reshape):
        part = part.part
    return Reshape(part, tuple(shape), part.dtype)


def cast(part: Expression, dtype: torch.dtype) -> Expression:
    """Return `part` as `dtype`; a cast to the dtype it has is no cast."""
    return part if part.dtype == dtype else Cast(part, dtype=dtype)


def without_casts(part: Expression) -> tuple[Expression, tuple[torch.dtype, ...]]:
    """Return `part` before it was cast, under its shape, and the dtypes to which it was, in order.

    Whoever casts a few elements at a time holds the others as they were: weights in fp8 are a quarter of those in fp32.
    """
    if isinstance(part, Cast):
        inner, dtypes = without_casts(part.part)
        return inner, (*dtypes, part.dtype)
    if isinstance(part, Reshape):
        inner, dtypes = without_casts(part.part)
        return reshape(inner, part.shape), dtypes
    return part, ()


def numel(expression: Expression) -> int:
    """Return the number of elements."""
    return math.prod(expression.shape)


def leaves(expression: Expression) -> list[Leaf]:
    """Return the distinct leaves in order of first appearance, with those that `Computed` and `Elementwise` need."""
    found: list[Leaf] = []
    seen: set[int] = set()
    stack: list[Expression] = [expression]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Source):  # most of them, and without children
            found.append(node)
            continue
        if isinstance(node, Leaf):
            found.append(node)
        stack.extend(children(node)[::-1])
    return found


def children(expression: Expression) -> tuple[Expression, ...]:
    """Return the expressions that `expression` is directly made of; an `Instance` also of its pattern."""
    if isinstance(expression, Source | Held | Slot):
        return ()
    if isinstance(expression, Computed):
        return expression.inputs
    if isinstance(expression, Concat | Elementwise):
        return expression.parts
    if isinstance(expression, Instance):
        return (*expression.inputs, expression.pattern)
    return (expression.part,)
