"""Which expression an aten operation on expressions gives; one builder for each group of operations.

Source: torch 2.13 `native_functions.yaml`. A dispatched call has its arguments in the order of the schema, with
defaults at the end left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowmem_load.planning.expression import Expression, cast, concat, expand, permute, reshape, slice_dim

aten = torch.ops.aten
Args = tuple[Any, ...]


def describe(operation: Any, args: Args, twins: Any) -> Any:
    """Return the expression, or list of expressions, that `operation` gives; None if only running it gives the result.

    `twins` is what the call returns on meta tensors.
    """
    build = _BUILDERS.get(operation)
    return build(args, twins) if build else None


def is_described(operation: Any) -> bool:
    """Return whether `describe` knows the operation."""
    return operation in _BUILDERS


def _same(args: Args, twin: torch.Tensor) -> Expression | None:
    return cast(args[0], twin.dtype)


def _reshaped(args: Args, twin: torch.Tensor) -> Expression | None:
    if twin.dtype != args[0].dtype:  # view(dtype) reinterprets bytes
        return None
    return reshape(args[0], tuple(twin.shape))


def _padded(args: Args, twin: torch.Tensor) -> Expression | None:
    return args[0] if not any(args[1]) else None


def _expanded(args: Args, twin: torch.Tensor) -> Expression | None:
    return expand(args[0], tuple(twin.shape))


def _transposed(args: Args, twin: torch.Tensor) -> Expression | None:
    dims = list(range(len(args[0].shape)))
    if dims:
        a, b = args[1] % len(dims), args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
    return permute(args[0], dims)


def _reversed_dims(args: Args, twin: torch.Tensor) -> Expression | None:
    return permute(args[0], list(range(len(args[0].shape)))[::-1])


def _permuted(args: Args, twin: torch.Tensor) -> Expression | None:
    return permute(args[0], [dim % len(args[0].shape) for dim in args[1]])


def _sliced(args: Args, twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % len(args[0].shape)
    start = args[2] if len(args) > 2 else None
    step = args[4] if len(args) > 4 else 1
    size = args[0].shape[dim]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    return slice_dim(args[0], dim, start, step, twin.shape[dim])


def _narrowed(args: Args, twin: torch.Tensor) -> Expression | None:
    dim = args[1] % len(args[0].shape)
    return slice_dim(args[0], dim, args[2] % max(args[0].shape[dim], 1), 1, twin.shape[dim])


def _selected(args: Args, twin: torch.Tensor) -> Expression | None:
    dim = args[1] % len(args[0].shape)
    row = slice_dim(args[0], dim, args[2] % args[0].shape[dim], 1, 1)
    return reshape(row, tuple(twin.shape))


def _parts(args: Args, twins: Sequence[torch.Tensor]) -> list[Expression] | None:
    dim = (args[2] if len(args) > 2 else 0) % len(args[0].shape)
    parts: list[Expression] = []
    start = 0
    for twin in twins:
        parts.append(slice_dim(args[0], dim, start, 1, twin.shape[dim]))
        start += twin.shape[dim]
    return parts


def _unbound(args: Args, twins: Sequence[torch.Tensor]) -> list[Expression] | None:
    dim = (args[1] if len(args) > 1 else 0) % len(args[0].shape)
    return [reshape(slice_dim(args[0], dim, i, 1, 1), tuple(twin.shape)) for i, twin in enumerate(twins)]


def _joined(args: Args, twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % twin.dim()
    parts = [cast(part, twin.dtype) for part in args[0] if len(part.shape) == twin.dim()]
    return concat(parts, dim)


def _stacked(args: Args, twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % twin.dim()
    if dim == 0 and twin.dim() > 1:  # one node for all: there may be hundreds of parts
        return reshape(concat([cast(part, twin.dtype) for part in args[0]], 0), tuple(twin.shape))
    shape = (*twin.shape[:dim], 1, *twin.shape[dim + 1 :])
    return concat([reshape(cast(part, twin.dtype), shape) for part in args[0]], dim)


_BUILDERS: dict[Any, Callable[[Args, Any], Any]] = {
    **dict.fromkeys((aten.detach, aten.alias, aten.clone, aten.lift_fresh, aten.contiguous, aten._to_copy), _same),
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.unsqueeze, aten.squeeze), _reshaped
    ),
    aten.constant_pad_nd: _padded,
    aten.expand: _expanded,
    aten.transpose: _transposed,
    aten.t: _reversed_dims,
    aten.permute: _permuted,
    aten.slice: _sliced,
    aten.narrow: _narrowed,
    aten.select: _selected,
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.chunk), _parts),
    aten.unbind: _unbound,
    aten.cat: _joined,
    aten.stack: _stacked,
}
