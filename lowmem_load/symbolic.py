"""Tensors that stand for expressions: conversion code written for real tensors runs on them and reads nothing.

A `SymbolicTensor` is a `torch.Tensor` whose operations build an expression (`expression.py`) instead of touching data.
Views, concatenations and casts become expression nodes; any other operation becomes a `Computed` node, whose inputs
are read whole when, and only when, its result is needed. Only an operation that must answer now (`torch.equal`,
`item`) reads at once, through the `Reader` that the tensor carries.

Source: torch 2.13 `torch/utils/_python_dispatch.py` and the extending-torch notes on `__torch_dispatch__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from .errors import UnsupportedError
from .expression import (
    Computed,
    Expression,
    cast,
    concat,
    held,
    numel,
    permute,
    reshape,
    slice_dim,
)

aten = torch.ops.aten
CPU = torch.device("cpu")

EQUAL_NUMEL = 1 << 21
"""Elements compared at a time by `torch.equal`; bounds its memory to a few tens of MiB."""

ReadWhole = Callable[[Expression], torch.Tensor]


class SymbolicTensor(torch.Tensor):
    """A tensor whose value is `expression`. Looks like an ordinary tensor on the CPU to code that inspects it.

    Attributes:
        expression: what the value is made of.
        twin: a meta tensor of the same shape, strides and dtype; answers shape questions.
        read_whole: reads an expression, for operations that need data at once.
        is_copy: whether nothing else shares its value, so that an operation may write into it.
    """

    expression: Expression
    twin: torch.Tensor
    read_whole: ReadWhole
    is_copy: bool = False

    @staticmethod
    def __new__(  # noqa: D102  the class docstring says it
        cls, expression: Expression, read_whole: ReadWhole, twin: torch.Tensor | None = None
    ) -> SymbolicTensor:
        if twin is None:
            twin = torch.empty(expression.shape, dtype=expression.dtype, device="meta")
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=CPU, requires_grad=False
        )
        tensor.expression, tensor.twin, tensor.read_whole = expression, twin, read_whole
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SymbolicTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        """Tell ties apart as addresses do: equal for two names of the same value (transformers 5.0 to 5.4 asks)."""
        return id(self.expression)

    def __deepcopy__(self, memo: dict[int, Any]) -> SymbolicTensor:
        copied = SymbolicTensor(self.expression, self.read_whole, self.twin)
        copied.requires_grad_(self.requires_grad)
        return copied

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation is aten.equal:
            return _equal(args[0], args[1])
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        try:
            twins = func(*tree_map(_twin, args), **{key: _twin(v) for key, v in kwargs.items() if key != "device"})
        except (RuntimeError, NotImplementedError):  # the result depends on values: item, nonzero, ...
            inputs, run = _on_values(func, args, kwargs)
            return run([_reader_of(args)(part) for part in inputs])
        build = _BUILDERS.get(operation)
        expressions = build(args, kwargs, twins) if build else None
        if expressions is None:
            return _compute(func, args, kwargs, twins)
        read_whole = _reader_of(args)
        if isinstance(twins, torch.Tensor):
            result = SymbolicTensor(expressions, read_whole, twins)
            if func._schema.returns[0].alias_info is None:
                result.is_copy = True
            else:  # a view: from now on a write into one would have to change the other
                args[0].is_copy = False
            return result
        return [SymbolicTensor(node, read_whole, twin) for node, twin in zip(expressions, twins, strict=True)]


def expression_of(tensor: torch.Tensor) -> Expression:
    """Return what `tensor` is made of; a real tensor is held in memory."""
    return tensor.expression if isinstance(tensor, SymbolicTensor) else held(tensor)


def _twin(value: Any) -> Any:
    if isinstance(value, SymbolicTensor):
        return value.twin
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _reader_of(args: Any) -> ReadWhole:
    return next(value.read_whole for value in tree_flatten(args)[0] if isinstance(value, SymbolicTensor))


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let an in-place operation change a copy, lazily; a weight itself is never changed.

    transformers 5.8 draws random numbers into `weight.float()`, a copy that nobody reads: that must cost nothing.
    """
    written = args[0]
    if not isinstance(written, SymbolicTensor) or not written.is_copy:
        raise UnsupportedError(
            f"{func} writes into a weight that is still being streamed from its file; "
            "load this model without lowmem_load, or report its class"
        )
    inputs, run = _on_values(func, args, kwargs)
    written.expression = Computed(
        str(func), lambda values: run([values[0].clone(), *values[1:]]), inputs, tuple(written.shape), written.dtype
    )
    return written


def _on_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Expression, ...], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return what `func` needs, and a function that runs it once that has been read."""
    flat, spec = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, SymbolicTensor)]
    strides = [tensor.stride() for tensor in tensors]

    def run(values: Sequence[torch.Tensor]) -> Any:
        supply = iter(map(_with_strides, values, strides))
        real_args, real_kwargs = spec.unflatten(
            [next(supply) if isinstance(value, SymbolicTensor) else value for value in flat]
        )
        return func(*real_args, **real_kwargs)

    return tuple(tensor.expression for tensor in tensors), run


def _with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Give `value` the strides that the caller saw: as_strided and its like depend on them."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Any) -> Any:
    """Defer `func` to one `Computed` node per tensor it returns; run it now when it returns something else."""
    inputs, run = _on_values(func, args, kwargs)
    read_whole = _reader_of((args, kwargs))
    results, result_spec = tree_flatten(twins)
    if not all(isinstance(result, torch.Tensor) for result in results):
        return run([read_whole(part) for part in inputs])

    def node(position: int, twin: torch.Tensor) -> SymbolicTensor:
        def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
            result: torch.Tensor = tree_flatten(run(values))[0][position]
            return result

        return SymbolicTensor(Computed(str(func), compute, inputs, tuple(twin.shape), twin.dtype), read_whole, twin)

    return result_spec.unflatten([node(position, twin) for position, twin in enumerate(results)])


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare in pieces; two names for the same bytes of the same file are equal unread."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    a, b = expression_of(left), expression_of(right)
    if a is b:
        return True
    read_whole = _reader_of((left, right))
    flat_a, flat_b = reshape(a, (numel(a),)), reshape(b, (numel(b),))
    for start in range(0, numel(a), EQUAL_NUMEL):
        size = min(EQUAL_NUMEL, numel(a) - start)
        pieces = (read_whole(slice_dim(flat, 0, start, 1, size)) for flat in (flat_a, flat_b))
        if not torch.equal(*pieces):
            return False
    return True


# -- builders: one per group of aten operations; None means that the arguments need `Computed` -----------------------


def _same(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return cast(args[0].expression, twin.dtype)


def _reshaped(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    if twin.dtype != args[0].dtype:  # view(dtype) reinterprets bytes
        return None
    return reshape(args[0].expression, tuple(twin.shape))


def _transposed(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dims = list(range(args[0].dim()))
    if dims:
        a, b = args[1] % len(dims), args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
    return permute(args[0].expression, dims)


def _reversed_dims(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return permute(args[0].expression, list(range(args[0].dim()))[::-1])


def _permuted(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return permute(args[0].expression, [dim % args[0].dim() for dim in args[1]])


def _sliced(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % args[0].dim()
    start = args[2] if len(args) > 2 else None
    step = args[4] if len(args) > 4 else 1
    size = args[0].shape[dim]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    return slice_dim(args[0].expression, dim, start, step, twin.shape[dim])


def _narrowed(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = args[1] % args[0].dim()
    return slice_dim(args[0].expression, dim, args[2] % max(args[0].shape[dim], 1), 1, twin.shape[dim])


def _selected(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = args[1] % args[0].dim()
    row = slice_dim(args[0].expression, dim, args[2] % args[0].shape[dim], 1, 1)
    return reshape(row, tuple(twin.shape))


def _parts(args: tuple[Any, ...], kwargs: dict[str, Any], twins: Sequence[torch.Tensor]) -> list[Expression] | None:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()
    parts: list[Expression] = []
    start = 0
    for twin in twins:
        parts.append(slice_dim(args[0].expression, dim, start, 1, twin.shape[dim]))
        start += twin.shape[dim]
    return parts


def _unbound(args: tuple[Any, ...], kwargs: dict[str, Any], twins: Sequence[torch.Tensor]) -> list[Expression] | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].dim()
    return [reshape(slice_dim(args[0].expression, dim, i, 1, 1), tuple(twin.shape)) for i, twin in enumerate(twins)]


def _joined(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % twin.dim()
    parts = [cast(expression_of(tensor), twin.dtype) for tensor in args[0] if tensor.dim() == twin.dim()]
    return concat(parts, dim)


def _stacked(args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % twin.dim()
    shape = (*twin.shape[:dim], 1, *twin.shape[dim + 1 :])
    return concat([reshape(cast(expression_of(tensor), twin.dtype), shape) for tensor in args[0]], dim)


_BUILDERS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any], Any], Any]] = {
    **dict.fromkeys((aten.detach, aten.alias, aten.clone, aten.lift_fresh, aten.contiguous, aten._to_copy), _same),
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.unsqueeze, aten.squeeze), _reshaped
    ),
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
