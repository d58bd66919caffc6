"""Calls of aten operations: the expression that each gives, and their arguments without the tensors.

A dispatched call has its arguments in the order of the schema (torch 2.13 `native_functions.yaml`), without defaults at
the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lowmem_load.planning.expression import (
    Cast,
    Expression,
    Held,
    cast,
    concat,
    expand,
    numel,
    permute,
    reshape,
    slice_dim,
)
from lowmem_load.symbolic.initialise import ReadNow

aten = torch.ops.aten
Args = tuple[Any, ...]

EQUAL_NUMEL = 1 << 21  # elements that `equal` compares at a time: they take a few tens of MiB
FEW_INDEXES = 64  # each is a node of the expression
_PLACE = object()  # stands for a tensor in a `Template`


class Template:
    """The arguments of a call with places for the tensors of a class, which may be large and are not kept."""

    def __init__(self, tree: Any, kind: type = torch.Tensor) -> None:
        leaves, self._spec = tree_flatten(tree)
        self._leaves = [_PLACE if isinstance(leaf, kind) else leaf for leaf in leaves]

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the arguments with these tensors in the places, in order."""
        supply = iter(tensors)
        return tree_unflatten([next(supply) if leaf is _PLACE else leaf for leaf in self._leaves], self._spec)


def writes_first_alone(func: Any) -> bool:
    """Return whether an operation writes into its first argument, and into no other, such as `out`."""
    first, *others = func._schema.arguments
    return first.is_write and not any(argument.is_write for argument in others)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that it writes into, None for those that are left out."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.is_write
    ]


def describe(operation: Any, args: Args, metas: Any) -> Any:
    """Return the expression or expressions that `operation` gives; None if it has to run to give its result."""
    build = BUILDERS.get(operation)
    return build(args, metas) if build else None


def equal(a: Expression, b: Expression, read_now: ReadNow) -> bool:
    """Return what `torch.equal` returns, comparing in pieces. Nothing is read of one value under two names."""
    if a.shape != b.shape:
        return False
    part_a, part_b = a, b
    while isinstance(part_a, Cast) and isinstance(part_b, Cast) and part_a.dtype == part_b.dtype:
        part_a, part_b = part_a.part, part_b.part
    if part_a is part_b:
        return True
    flat_a, flat_b = reshape(a, (numel(a),)), reshape(b, (numel(b),))
    for start in range(0, numel(a), EQUAL_NUMEL):
        size = min(EQUAL_NUMEL, numel(a) - start)
        pieces = (read_now(slice_dim(flat, 0, start, 1, size), "aten.equal") for flat in (flat_a, flat_b))
        if not torch.equal(*pieces):
            return False
    return True


def _reshaped(args: Args, meta: torch.Tensor) -> Expression | None:
    if meta.dtype != args[0].dtype:  # view(dtype) reinterprets bytes
        return None
    return reshape(args[0], tuple(meta.shape))


def _transposed(args: Args, meta: torch.Tensor) -> Expression | None:
    dims = list(range(len(args[0].shape)))
    if dims:
        a, b = args[1] % len(dims), args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
    return permute(args[0], dims)


def _sliced(args: Args, meta: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % len(args[0].shape)
    start = args[2] if len(args) > 2 else None
    step = args[4] if len(args) > 4 else 1
    size = args[0].shape[dim]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    return slice_dim(args[0], dim, start, step, meta.shape[dim])


def _selected(args: Args, meta: torch.Tensor) -> Expression | None:
    dim = args[1] % len(args[0].shape)
    row = slice_dim(args[0], dim, args[2] % args[0].shape[dim], 1, 1)
    return reshape(row, tuple(meta.shape))


def _indexed(args: Args, meta: torch.Tensor) -> Expression | None:
    """Describe `tensor[..., [0, 3], ...]`: one list of indexes."""
    (dim, index), *others = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    if others or not isinstance(index, Held) or index.flat.is_meta or index.dtype != torch.int64:
        return None
    if len(index.shape) != 1 or not 0 < index.shape[0] <= FEW_INDEXES:
        return None
    return concat([slice_dim(args[0], dim, at % args[0].shape[dim], 1, 1) for at in index.flat.tolist()], dim)


def _parts(args: Args, metas: Sequence[torch.Tensor]) -> list[Expression] | None:
    dim = (args[2] if len(args) > 2 else 0) % len(args[0].shape)
    sizes = [meta.shape[dim] for meta in metas]
    starts = itertools.accumulate(sizes, initial=0)
    return [slice_dim(args[0], dim, start, 1, size) for start, size in zip(starts, sizes, strict=False)]


def _unbound(args: Args, metas: Sequence[torch.Tensor]) -> list[Expression] | None:
    dim = (args[1] if len(args) > 1 else 0) % len(args[0].shape)
    return [reshape(slice_dim(args[0], dim, i, 1, 1), tuple(meta.shape)) for i, meta in enumerate(metas)]


def _joined(args: Args, meta: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % meta.dim()
    parts = [cast(part, meta.dtype) for part in args[0] if len(part.shape) == meta.dim()]
    return concat(parts, dim)


def _stacked(args: Args, meta: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % meta.dim()
    if dim == 0 and meta.dim() > 1:  # one node for all: there may be hundreds of parts
        return reshape(concat([cast(part, meta.dtype) for part in args[0]], 0), tuple(meta.shape))
    shape = (*meta.shape[:dim], 1, *meta.shape[dim + 1 :])
    return concat([reshape(cast(part, meta.dtype), shape) for part in args[0]], dim)


BUILDERS: dict[Any, Callable[[Args, Any], Any]] = {
    **dict.fromkeys(
        (aten.detach, aten.alias, aten.clone, aten.lift_fresh, aten._to_copy),
        lambda args, meta: cast(args[0], meta.dtype),
    ),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten._reshape_alias, aten.unsqueeze, aten.squeeze), _reshaped),
    aten.constant_pad_nd: lambda args, _: args[0] if not any(args[1]) else None,
    aten.expand: lambda args, meta: expand(args[0], tuple(meta.shape)),
    aten.transpose: _transposed,
    aten.t: lambda args, _: permute(args[0], list(range(len(args[0].shape)))[::-1]),
    aten.permute: lambda args, _: permute(args[0], [dim % len(args[0].shape) for dim in args[1]]),
    aten.slice: _sliced,
    aten.select: _selected,
    aten.index: _indexed,
    **dict.fromkeys((aten.split, aten.split_with_sizes), _parts),
    aten.unbind: _unbound,
    aten.cat: _joined,
    aten.stack: _stacked,
}
