"""Tensors that stand for expressions: loading code written for real tensors runs on them and reads nothing.

A `SymbolicTensor` is a `torch.Tensor` whose operations build an expression (`planning/expression.py`) instead of
touching data. Views, concatenations and casts become expression nodes; any other operation becomes a `Computed` node,
whose inputs are read whole when, and only when, its result is needed. Only an operation that must answer now
(`torch.equal`, `item`, a mask) reads at once; tensors that it makes say so.

[Note: writes] Views share the `SharedValue` of the tensor they were taken from, so a write through one is seen by all.
Writing into a copy that nobody owns is described like any other operation. Writing into a parameter (initialisation,
as a rule) is done at once, because random numbers must be drawn in the order in which an ordinary load draws them:
the `Initialiser` holds one parameter whole at a time, and of the others the elements that this rank will keep.

Source: torch 2.13 `torch/utils/_python_dispatch.py` and the extending-torch notes on `__torch_dispatch__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.expression import (
    Cast,
    Computed,
    Elementwise,
    Expression,
    expand,
    held,
    numel,
    reshape,
    slice_dim,
    without_casts,
)
from lowmem_load.symbolic.call_arguments import Template
from lowmem_load.symbolic.initialise import ReadNow, SharedValue, with_random_state
from lowmem_load.symbolic.operations import describe, is_described

aten = torch.ops.aten
CPU = torch.device("cpu")

EQUAL_NUMEL = 1 << 21
"""Elements compared at a time by `torch.equal`; bounds its memory to a few tens of MiB."""

_FACTORIES = {
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided),
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
}
"""Operations that look at the shape of their argument alone."""


@dataclass(frozen=True, slots=True)
class _View:
    """One view operation: on expressions, and on real tensors."""

    describe: Callable[[Expression], Expression]
    apply: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Storage:
    """What savers ask of the memory of a tensor: where it is, and how many bytes it has."""

    address: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.num_bytes


class SymbolicTensor(torch.Tensor):
    """A tensor whose value is `expression`. Looks like an ordinary tensor on the CPU to code that inspects it.

    Attributes:
        value: shared with all views.
        twin: a meta tensor of the same shape, strides and dtype; answers shape questions.
        read_now: reads an expression, for operations that need data at once.
    """

    value: SharedValue
    views: tuple[_View, ...]
    twin: torch.Tensor
    read_now: ReadNow

    @staticmethod
    def __new__(  # noqa: D102  the class docstring says it
        cls,
        expression: Expression | SharedValue,
        read_now: ReadNow,
        twin: torch.Tensor | None = None,
        views: tuple[_View, ...] = (),
    ) -> SymbolicTensor:
        value = expression if isinstance(expression, SharedValue) else SharedValue(expression)
        if twin is None:
            twin = _meta(value.expression.shape, value.expression.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=CPU, requires_grad=False
        )
        tensor.value, tensor.views, tensor.twin, tensor.read_now = value, views, twin, read_now
        return tensor

    @property
    def expression(self) -> Expression:
        """What the value is made of now."""
        expression = self.value.expression
        for view in self.views:
            expression = view.describe(expression)
        return expression

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor: an alias without gradients; assigning to it replaces the value."""
        return self.detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise UnsupportedError(
                f"a weight of shape {tuple(self.shape)} and {self.dtype} that is still being loaded was given data of "
                f"shape {tuple(tensor.shape)} and {tensor.dtype}; load this model without lowmem_load"
            )
        if isinstance(tensor, SymbolicTensor) and not self.views:
            self.value.replace(tensor.expression)
            return
        with torch.no_grad():
            self.detach().copy_(tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SymbolicTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        """Tell ties apart as addresses do: equal for two names of the same value (transformers 5.0 to 5.4 asks)."""
        return id(self.value)

    def untyped_storage(self) -> Any:
        """Tell what shares memory, and how large it is: views of one value do, as views of one tensor would."""
        whole = self.value.expression
        return _Storage(id(self.value), numel(whole) * whole.dtype.itemsize)

    def __deepcopy__(self, memo: dict[int, Any]) -> SymbolicTensor:
        copied = SymbolicTensor(self.expression, self.read_now, self.twin)
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
        if operation is aten.detach or operation is aten.alias:  # of every parameter that is made
            base = args[0]
            return SymbolicTensor(base.value, base.read_now, base.twin, base.views)
        if operation is aten.equal:
            return _equal(args[0], args[1])
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        if operation in _FACTORIES:
            return func(args[0].twin, *args[1:], **{**kwargs, "device": CPU})
        try:
            on_meta = {name: value for name, value in kwargs.items() if name != "device"}
            twins = func(*tree_map(_twin, args), **tree_map(_twin, on_meta))
        except (RuntimeError, NotImplementedError):  # the result depends on values: item, nonzero, ...
            return _run_now(func, args, kwargs)
        args, kwargs = tree_map(_snapshot, (args, kwargs))
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            return _view(func, args, kwargs, twins)
        expression = _pointwise(func, args, kwargs, twins) or describe(operation, tree_map(_expressed, args), twins)
        if expression is None:
            return _compute(func, args, kwargs, twins)
        return _made(expression, args, twins)


@functools.lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous meta tensor, shared by all tensors of this shape: nobody may write into it.

    Not `torch.empty`: inside a zero.Init that makes tensors of another dtype.
    """
    made: torch.Tensor = aten.empty.memory_format(shape, dtype=dtype, device="meta")
    return made


def _twin(value: Any) -> Any:
    """Return a tensor of a call on meta."""
    if isinstance(value, SymbolicTensor):
        return value.twin
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def expression_of(tensor: torch.Tensor) -> Expression:
    """Return what `tensor` is made of; a real tensor is held in memory."""
    return tensor.expression if isinstance(tensor, SymbolicTensor) else held(tensor)


def _made(expression: Expression, args: Any, twin: torch.Tensor) -> SymbolicTensor:
    """Return a new value that was computed from `args`."""
    sources = [value for value in tree_leaves(args) if isinstance(value, SymbolicTensor)]
    made = SymbolicTensor(expression, sources[0].read_now, twin)
    made.value.computed_from = next(
        (found for s in sources if (found := s.value.initialiser or s.value.computed_from)), None
    )
    return made


def _snapshot(value: Any) -> Any:
    """Copy a real tensor that an operation uses later: its owner may write into it meanwhile."""
    real = isinstance(value, torch.Tensor) and not isinstance(value, SymbolicTensor)
    return value.clone() if real and not value.is_meta else value


def _expressed(value: Any) -> Any:
    return expression_of(value) if isinstance(value, torch.Tensor) else value


def _reader_of(args: Any) -> ReadNow:
    return next(value.read_now for value in tree_leaves(args) if isinstance(value, SymbolicTensor))


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twin: Any) -> Expression | None:
    """Return an operation on each element by itself, such as a dequantizing product, as one on flat ranges."""
    is_pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    if not is_pointwise or is_described(func.overloadpacket) or not isinstance(twin, torch.Tensor):
        return None
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    # a scalar tensor takes part in type promotion in another way than a flat range of it would
    if any(tensor.dim() == 0 for tensor in tensors):
        return None
    shape, call = tuple(twin.shape), Template((args, kwargs))
    uncast = [without_casts(expression_of(tensor)) for tensor in tensors]

    def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
        real_args, real_kwargs = call.filled(map(_cast, values, dtypes))
        result: torch.Tensor = func(*real_args, **real_kwargs)
        return result

    dtypes = [casts for _, casts in uncast]
    parts = tuple(expand(part, shape) for part, _ in uncast)
    return Elementwise(str(func), compute, parts, shape, twin.dtype)


def _cast(value: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    for dtype in dtypes:
        value = value.to(dtype)
    return value


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Any) -> Any:
    """Return the view, or views, of `args[0]` that `func` gives: same value, one more step."""
    base: SymbolicTensor = args[0]
    base_strides = base.stride()
    several = not isinstance(twins, torch.Tensor)

    def step(position: int, twin: torch.Tensor) -> _View:
        def apply(real: torch.Tensor) -> torch.Tensor:
            result = func(real, *args[1:], **kwargs)
            view: torch.Tensor = result[position] if several else result
            return view

        def describe_step(part: Expression) -> Expression:
            described = describe(func.overloadpacket, (part, *args[1:]), twins)
            if described is not None:
                found: Expression = described[position] if several else described
                return found
            shape, dtype = tuple(twin.shape), twin.dtype
            return Computed(str(func), lambda real: apply(_with_strides(real[0], base_strides)), (part,), shape, dtype)

        return _View(describe_step, apply)

    views = [
        SymbolicTensor(base.value, base.read_now, twin, (*base.views, step(position, twin)))
        for position, twin in enumerate(twins if several else [twins])
    ]
    return views if several else views[0]


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation. See [Note: writes]."""
    positions = [i for i, argument in enumerate(func._schema.arguments) if argument.is_write]
    named = [kwargs[name] for i in positions if (name := func._schema.arguments[i].name) in kwargs]
    targets = tree_leaves([[args[i] for i in positions if i < len(args)], named])
    if positions and not any(isinstance(target, SymbolicTensor) for target in targets):
        return _run_now(func, args, kwargs)
    if positions != [0] or not isinstance(args[0], SymbolicTensor):
        raise UnsupportedError(f"{func} writes into weights in a way that lowmem_load does not know; report its model")
    written: SymbolicTensor = args[0]
    args, kwargs = tree_map(_snapshot, (args, kwargs))
    inputs, run = _on_values(func, args, kwargs)
    value, views, others = written.value, written.views, inputs[1:]
    draws = torch.Tag.nondeterministic_seeded in func.tags

    def change(whole: torch.Tensor, other_values: Sequence[torch.Tensor]) -> torch.Tensor:
        target = whole
        for view in views:
            target = view.apply(target)
        run([target, *other_values])
        return whole

    if value.initialiser is None:
        before = value.expression
        state = torch.get_rng_state() if draws else None
        if value.computed_from is not None and draws:
            value.computed_from.skip(lambda: change(torch.empty(before.shape, dtype=before.dtype, device=CPU), ()))
        value.expression = Computed(
            str(func),
            lambda values: with_random_state(state, lambda: change(values[0].clone(), values[1:])),
            (before, *others),
            before.shape,
            before.dtype,
        )
        return written
    value.initialiser.write(value, str(func), change, others, draws)
    return written


def _on_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Expression, ...], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return what `func` needs, and a function that runs it once that has been read."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, SymbolicTensor)]
    strides, call = [tensor.stride() for tensor in tensors], Template((args, kwargs), SymbolicTensor)
    writes = func._schema.is_mutable

    def run(values: Sequence[torch.Tensor]) -> Any:
        real_args, real_kwargs = call.filled(values if writes else map(_with_strides, values, strides))
        return func(*real_args, **real_kwargs)

    return tuple(tensor.expression for tensor in tensors), run


def _run_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on what its arguments hold; reads them whole. Tensors that it makes say where they come from."""
    read_now = _reader_of((args, kwargs))
    inputs, run = _on_values(func, args, kwargs)
    result = run([read_now(part, str(func)) for part in inputs])
    if func._schema.is_mutable:  # into memory of the caller's
        return result
    origin = f"the result of {func}, which ran while the model was described"

    def marked(value: Any) -> Any:
        return (
            SymbolicTensor(held(value, origin), read_now, value.to("meta"))
            if isinstance(value, torch.Tensor)
            else value
        )

    return tree_map(marked, result)


def _with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Give `value` the strides that the caller saw: as_strided and its like depend on them."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Any) -> Any:
    """Defer `func` to one `Computed` node per tensor it returns.

    Run it now when it returns something else, or draws random numbers, which come in order.
    """
    results = tree_leaves(twins)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if draws or not all(isinstance(result, torch.Tensor) for result in results):
        return _run_now(func, args, kwargs)
    inputs, run = _on_values(func, args, kwargs)

    def node(position: int, twin: torch.Tensor) -> SymbolicTensor:
        def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
            result: torch.Tensor = tree_leaves(run(values))[position]
            return result

        return _made(Computed(str(func), compute, inputs, tuple(twin.shape), twin.dtype), (args, kwargs), twin)

    return Template(twins).filled([node(position, twin) for position, twin in enumerate(results)])


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare in pieces; two names for the same bytes of the same file are equal unread."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    a, b = expression_of(left), expression_of(right)
    while isinstance(a, Cast) and isinstance(b, Cast) and a.dtype == b.dtype:
        a, b = a.part, b.part
    if a is b or (isinstance(left, SymbolicTensor) and isinstance(right, SymbolicTensor) and _same_view(left, right)):
        return True
    read_now = _reader_of((left, right))
    flat_a, flat_b = reshape(a, (numel(a),)), reshape(b, (numel(b),))
    for start in range(0, numel(a), EQUAL_NUMEL):
        size = min(EQUAL_NUMEL, numel(a) - start)
        pieces = (read_now(slice_dim(flat, 0, start, 1, size), "aten.equal") for flat in (flat_a, flat_b))
        if not torch.equal(*pieces):
            return False
    return True


def _same_view(left: SymbolicTensor, right: SymbolicTensor) -> bool:
    return left.value is right.value and not left.views and not right.views
