"""Tensors that stand for expressions: loading code written for real tensors runs on them and reads nothing.

A `SymbolicTensor` is a `torch.Tensor` whose operations build an expression (`expression.py`) instead of touching data.
Views, concatenations and casts become expression nodes; any other operation becomes a `Computed` node, whose inputs
are read whole when, and only when, its result is needed. Only an operation that must answer now (`torch.equal`,
`item`) reads at once.

[Note: writes] Views share the `Value` of the tensor they were taken from, so a write through one is seen by all.
Writing into a copy that nobody owns is described like any other operation. Writing into a parameter (initialisation,
as a rule) is done at once, because random numbers must be drawn in the order in which an ordinary load draws them:
`Scratch` holds one parameter whole at a time, and of the others the elements that this rank will keep.

Source: torch 2.13 `torch/utils/_python_dispatch.py` and the extending-torch notes on `__torch_dispatch__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from .errors import UnsupportedError
from .expression import (
    Cast,
    Computed,
    Elementwise,
    Expression,
    Held,
    cast,
    concat,
    expand,
    held,
    numel,
    permute,
    reshape,
    slice_dim,
)
from .plan import FlatRange

aten = torch.ops.aten
CPU = torch.device("cpu")

EQUAL_NUMEL = 1 << 21
"""Elements compared at a time by `torch.equal`; bounds its memory to a few tens of MiB."""

UNINITIALISED = "torch.empty"
"""Operation of the `Computed` that stands for a parameter before it is initialised."""

ReadWhole = Callable[[Expression], torch.Tensor]
_Write = tuple[torch.Tensor | None, Callable[[torch.Tensor], object]]


@dataclass(slots=True, eq=False)
class Value:
    """What a tensor and all views of it share. See [Note: writes].

    Attributes:
        expression: the value, row-major under the shape of the tensor that the views were taken from.
        scratch: where writes are done; None when nobody owns the value.
        near: the scratch of the parameter that an unowned value was computed from.
        kept: after writes, the elements that this rank will keep.
        log: the writes, each with the random state before it if it draws random numbers.
        before: the value before the first write.
    """

    expression: Expression
    scratch: Scratch | None = None
    kept: Held | None = None
    log: list[_Write] = field(default_factory=list)
    before: Expression | None = None
    near: Scratch | None = None

    def replace(self, expression: Expression) -> None:
        """Forget what was written and be `expression`."""
        if self.scratch is not None:
            self.scratch.release()
        self.expression, self.kept, self.log, self.before = expression, None, [], None


@dataclass(frozen=True, slots=True)
class _View:
    """One view operation: on expressions, and on real tensors."""

    describe: Callable[[Expression], Expression]
    apply: Callable[[torch.Tensor], torch.Tensor]


class Scratch:
    """Does the writes into parameters that are not read from files, in order, holding one whole at a time.

    Memory: the largest parameter that is written into, plus what `kept_range` selects of each.

    Args:
        kept_range: elements of a parameter of so many elements that this rank will be asked for.
    """

    def __init__(self, read_whole: ReadWhole, kept_range: Callable[[int], FlatRange]) -> None:
        self._read_whole, self._kept_range = read_whole, kept_range
        self._current: Value | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._idle_draws: list[Callable[[], object]] = []
        self._whole = torch.empty(0)

    def uninitialised(self, like: torch.Tensor) -> SymbolicTensor:
        """Return a tensor of the shape and dtype of `like`, as `torch.empty_like` does, that allocates nothing."""
        shape, dtype = tuple(like.shape), like.dtype
        nothing = Computed(UNINITIALISED, lambda _: torch.empty(shape, dtype=dtype), (), shape, dtype)
        return SymbolicTensor(nothing, self._read_whole)

    def own(self, tensor: SymbolicTensor) -> None:
        """From now on writes into `tensor` and its views are done here."""
        tensor.value.scratch = self

    def write(self, value: Value, change: Callable[[torch.Tensor], object], draws: bool) -> None:
        """Apply `change` to the whole of `value`; `draws` says whether it draws random numbers."""
        if self._current is not value:
            self.release()
            self._whole, self._current = self._fetch(value), value
        if value.before is None:
            value.before = value.expression
        if draws:
            for draw in self._idle_draws:
                draw()
            self._idle_draws.clear()
        value.log.append((torch.get_rng_state() if draws else None, change))
        change(self._whole)
        value.expression = _replayed(value.before, value.log, len(value.log))

    def _fetch(self, value: Value) -> torch.Tensor:
        """Return the whole of `value`; one that has none yet gets memory that is used again for the next.

        Fresh memory each time would not do: freed blocks of growing size fragment the heap of glibc.
        """
        if value.log or not self._is_uninitialised(value):
            return self._read_whole(value.expression)
        num_bytes = numel(value.expression) * value.expression.dtype.itemsize
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes].view(value.expression.dtype).view(value.expression.shape)

    @staticmethod
    def _is_uninitialised(value: Value) -> bool:
        return isinstance(value.expression, Computed) and value.expression.operation == UNINITIALISED

    def skip(self, draw: Callable[[], object]) -> None:
        """Put off a draw of random numbers whose result nobody has read, until numbers are drawn that somebody will.

        Initialising a loaded weight through a copy (weight norm, `weight.float()`) changes nothing but the order.
        """
        self._idle_draws.append(draw)

    def release(self) -> None:
        """Keep of the parameter in hand what this rank needs, and free it."""
        if self._current is not None:
            flat = self._whole.reshape(-1)
            span = self._kept_range(flat.numel())
            kept = flat[span.start : span.end].clone()
            self._current.kept = Held(kept, span.start, tuple(self._whole.shape), self._whole.dtype)
        self._current, self._whole = None, torch.empty(0)


def _replayed(before: Expression, log: Sequence[_Write], num_writes: int) -> Expression:
    """Return the value that `before` has after the first writes of `log`: whole, made again from the log."""

    def compute(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        whole, random_state = inputs[0].clone(), torch.get_rng_state()
        try:
            for state, change in log[:num_writes]:
                if state is not None:
                    torch.set_rng_state(state)
                change(whole)
        finally:
            torch.set_rng_state(random_state)
        return whole

    return Computed("initialised", compute, (before,), before.shape, before.dtype)


class SymbolicTensor(torch.Tensor):
    """A tensor whose value is `expression`. Looks like an ordinary tensor on the CPU to code that inspects it.

    Attributes:
        value: shared with all views.
        twin: a meta tensor of the same shape, strides and dtype; answers shape questions.
        read_whole: reads an expression, for operations that need data at once.
    """

    value: Value
    views: tuple[_View, ...]
    twin: torch.Tensor
    read_whole: ReadWhole

    @staticmethod
    def __new__(  # noqa: D102  the class docstring says it
        cls,
        expression: Expression | Value,
        read_whole: ReadWhole,
        twin: torch.Tensor | None = None,
        views: tuple[_View, ...] = (),
    ) -> SymbolicTensor:
        value = expression if isinstance(expression, Value) else Value(expression)
        if twin is None:
            twin = torch.empty(value.expression.shape, dtype=value.expression.dtype, device="meta")
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=CPU, requires_grad=False
        )
        tensor.value, tensor.views, tensor.twin, tensor.read_whole = value, views, twin, read_whole
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
        if operation in _FACTORIES:
            return func(_twin(args[0]), *args[1:], **{**kwargs, "device": CPU})
        try:
            twins = func(*tree_map(_twin, args), **{key: _twin(v) for key, v in kwargs.items() if key != "device"})
        except (RuntimeError, NotImplementedError):  # the result depends on values: item, nonzero, ...
            inputs, run = _on_values(func, args, kwargs)
            return run([_reader_of(args)(part) for part in inputs])
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            return _view(func, args, kwargs, twins)
        expression = _pointwise(func, args, kwargs, twins) or _describe(
            func, expression_of(args[0]) if _is_tensor(args) else None, args, kwargs, twins
        )
        if expression is None:
            return _compute(func, args, kwargs, twins)
        return _made(expression, args, twins)


def expression_of(tensor: torch.Tensor) -> Expression:
    """Return what `tensor` is made of; a real tensor is held in memory."""
    return tensor.expression if isinstance(tensor, SymbolicTensor) else held(tensor)


def kept_of(tensor: SymbolicTensor) -> Held | None:
    """Return what this rank keeps of a parameter that was written into; None for one that is read from files."""
    return tensor.value.kept


def forget(tensor: SymbolicTensor) -> None:
    """Free what is held in memory for `tensor`, whose value has been used.

    Its log refers to it, so that without this it would live until the next garbage collection.
    """
    tensor.value.kept, tensor.value.log, tensor.value.before = None, [], None


def _made(expression: Expression, args: Any, twin: torch.Tensor) -> SymbolicTensor:
    """Return a new value that was computed from `args`."""
    sources = [value for value in tree_flatten(args)[0] if isinstance(value, SymbolicTensor)]
    made = SymbolicTensor(expression, sources[0].read_whole, twin)
    made.value.near = next((near for s in sources if (near := s.value.scratch or s.value.near)), None)
    return made


def _is_tensor(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor)


def _twin(value: Any) -> Any:
    if isinstance(value, SymbolicTensor):
        return value.twin
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _reader_of(args: Any) -> ReadWhole:
    return next(value.read_whole for value in tree_flatten(args)[0] if isinstance(value, SymbolicTensor))


def _describe(func: Any, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Any) -> Any:
    """Return the expression of `func`'s result, or None if only running it gives the result."""
    build = _BUILDERS.get(func.overloadpacket)
    return build(part, args, kwargs, twins) if build else None


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twin: Any) -> Expression | None:
    """Return an operation on each element by itself, such as a dequantizing product, as one on flat ranges."""
    flat, spec = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    # a scalar tensor takes part in type promotion in another way than a flat range of it would
    if not pointwise or func.overloadpacket in _BUILDERS or not isinstance(twin, torch.Tensor):
        return None
    if any(tensor.dim() == 0 for tensor in tensors):
        return None
    shape = tuple(twin.shape)

    def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
        supply = iter(values)
        ranges = [next(supply) if isinstance(value, torch.Tensor) else value for value in flat]
        real_args, real_kwargs = spec.unflatten(ranges)
        result: torch.Tensor = func(*real_args, **real_kwargs)
        return result

    parts = tuple(expand(expression_of(tensor), shape) for tensor in tensors)
    return Elementwise(str(func), compute, parts, shape, twin.dtype)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Any) -> Any:
    """Return the view, or views, of `args[0]` that `func` gives: same value, one more step."""
    base: SymbolicTensor = args[0]
    if func.overloadpacket in (aten.detach, aten.alias):
        return SymbolicTensor(base.value, base.read_whole, twins, base.views)
    base_strides = base.stride()
    several = not isinstance(twins, torch.Tensor)

    def step(position: int, twin: torch.Tensor) -> _View:
        def apply(real: torch.Tensor) -> torch.Tensor:
            result = func(real, *args[1:], **kwargs)
            view: torch.Tensor = result[position] if several else result
            return view

        def describe(part: Expression) -> Expression:
            described = _describe(func, part, (base, *args[1:]), kwargs, twins)
            if described is not None:
                found: Expression = described[position] if several else described
                return found
            shape, dtype = tuple(twin.shape), twin.dtype
            return Computed(str(func), lambda real: apply(_with_strides(real[0], base_strides)), (part,), shape, dtype)

        return _View(describe, apply)

    views = [
        SymbolicTensor(base.value, base.read_whole, twin, (*base.views, step(position, twin)))
        for position, twin in enumerate(twins if several else [twins])
    ]
    return views if several else views[0]


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation. See [Note: writes]."""
    written = args[0]
    inputs, run = _on_values(func, args, kwargs)
    if isinstance(written, torch.Tensor) and not isinstance(written, SymbolicTensor):
        read_whole = _reader_of((args, kwargs))
        return run([read_whole(part) for part in inputs])
    if not isinstance(written, SymbolicTensor) or func._schema.arguments[0].alias_info is None or "out" in kwargs:
        raise UnsupportedError(f"{func} writes into weights in a way that lowmem_load does not know; report its model")
    value, views, others = written.value, written.views, inputs[1:]

    def change(whole: torch.Tensor, other_values: Sequence[torch.Tensor]) -> torch.Tensor:
        target = whole
        for view in views:
            target = view.apply(target)
        run([target, *other_values])
        return whole

    if value.scratch is None:
        before = value.expression
        if value.near is not None and torch.Tag.nondeterministic_seeded in func.tags:
            value.near.skip(lambda: change(torch.empty(before.shape, dtype=before.dtype), ()))
        value.expression = Computed(
            str(func),
            lambda values: change(values[0].clone(), values[1:]),
            (before, *others),
            before.shape,
            before.dtype,
        )
        return written
    read_whole = written.read_whole
    value.scratch.write(
        value,
        lambda whole: change(whole, [read_whole(other) for other in others]),
        torch.Tag.nondeterministic_seeded in func.tags,
    )
    return written


def _on_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Expression, ...], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return what `func` needs, and a function that runs it once that has been read."""
    flat, spec = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, SymbolicTensor)]
    strides = [tensor.stride() for tensor in tensors]
    writes = func._schema.is_mutable

    def run(values: Sequence[torch.Tensor]) -> Any:
        supply = iter(values if writes else map(_with_strides, values, strides))
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

        return _made(Computed(str(func), compute, inputs, tuple(twin.shape), twin.dtype), (args, kwargs), twin)

    return result_spec.unflatten([node(position, twin) for position, twin in enumerate(results)])


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare in pieces; two names for the same bytes of the same file are equal unread."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    a, b = expression_of(left), expression_of(right)
    while isinstance(a, Cast) and isinstance(b, Cast) and a.dtype == b.dtype:
        a, b = a.part, b.part
    if a is b or (isinstance(left, SymbolicTensor) and isinstance(right, SymbolicTensor) and _same_view(left, right)):
        return True
    read_whole = _reader_of((left, right))
    flat_a, flat_b = reshape(a, (numel(a),)), reshape(b, (numel(b),))
    for start in range(0, numel(a), EQUAL_NUMEL):
        size = min(EQUAL_NUMEL, numel(a) - start)
        pieces = (read_whole(slice_dim(flat, 0, start, 1, size)) for flat in (flat_a, flat_b))
        if not torch.equal(*pieces):
            return False
    return True


def _same_view(left: SymbolicTensor, right: SymbolicTensor) -> bool:
    return left.value is right.value and not left.views and not right.views


# -- builders: one per group of aten operations; None means that the arguments need `Computed` -----------------------


def _same(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return cast(part, twin.dtype)


def _reshaped(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    if twin.dtype != part.dtype:  # view(dtype) reinterprets bytes
        return None
    return reshape(part, tuple(twin.shape))


def _padded(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return part if not any(args[1]) else None


def _expanded(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return expand(part, tuple(twin.shape))


def _transposed(
    part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor
) -> Expression | None:
    dims = list(range(args[0].dim()))
    if dims:
        a, b = args[1] % len(dims), args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
    return permute(part, dims)


def _reversed_dims(
    part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor
) -> Expression | None:
    return permute(part, list(range(args[0].dim()))[::-1])


def _permuted(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    return permute(part, [dim % args[0].dim() for dim in args[1]])


def _sliced(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else 0) % args[0].dim()
    start = args[2] if len(args) > 2 else None
    step = args[4] if len(args) > 4 else 1
    size = args[0].shape[dim]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    return slice_dim(part, dim, start, step, twin.shape[dim])


def _narrowed(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = args[1] % args[0].dim()
    return slice_dim(part, dim, args[2] % max(args[0].shape[dim], 1), 1, twin.shape[dim])


def _selected(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = args[1] % args[0].dim()
    row = slice_dim(part, dim, args[2] % args[0].shape[dim], 1, 1)
    return reshape(row, tuple(twin.shape))


def _parts(
    part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Sequence[torch.Tensor]
) -> list[Expression] | None:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()
    parts: list[Expression] = []
    start = 0
    for twin in twins:
        parts.append(slice_dim(part, dim, start, 1, twin.shape[dim]))
        start += twin.shape[dim]
    return parts


def _unbound(
    part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twins: Sequence[torch.Tensor]
) -> list[Expression] | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].dim()
    return [reshape(slice_dim(part, dim, i, 1, 1), tuple(twin.shape)) for i, twin in enumerate(twins)]


def _joined(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % twin.dim()
    parts = [cast(expression_of(tensor), twin.dtype) for tensor in args[0] if tensor.dim() == twin.dim()]
    return concat(parts, dim)


def _stacked(part: Expression, args: tuple[Any, ...], kwargs: dict[str, Any], twin: torch.Tensor) -> Expression | None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % twin.dim()
    shape = (*twin.shape[:dim], 1, *twin.shape[dim + 1 :])
    return concat([reshape(cast(expression_of(tensor), twin.dtype), shape) for tensor in args[0]], dim)


_FACTORIES = {
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided),
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
}
"""Operations that look at the shape of their argument alone."""

_BUILDERS: dict[Any, Callable[[Expression, tuple[Any, ...], dict[str, Any], Any], Any]] = {
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
