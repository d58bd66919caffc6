"""Tensors that stand for expressions: loading code written for real tensors runs on them and reads nothing.

Most operations become nodes of an expression. One that has to answer now (`torch.equal`, `item`, a mask) reads at once.
A write into a parameter is done at once too: random numbers must be drawn in the order of an ordinary load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.expression import (
    Cast,
    Computed,
    Elementwise,
    Expression,
    Held,
    are_nested,
    cast,
    concat,
    expand,
    hold,
    numel,
    permute,
    reshape,
    slice_dim,
    strided,
    without_casts,
)
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.initialise import CPU, UNINITIALISED, Initialiser, ReadNow, SharedValue, with_random_state

aten = torch.ops.aten
Args = tuple[Any, ...]

EQUAL_NUMEL = 1 << 21  # elements that `equal` compares at a time: they take a few tens of MiB
FEW_INDEXES = 64  # each is a node of the expression
_PLACE = object()  # stands for a tensor in a `Template`

FACTORIES = {
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided),
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.rand_like, aten.randn_like, aten.randint_like),
}
"""Operations that only look at the shape, dtype and device of their argument."""


class _View(NamedTuple):
    """One of the results of a view operation. `meta` lies in the memory of the value that all its views share."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int
    meta: torch.Tensor

    def apply(self, real: torch.Tensor) -> torch.Tensor:
        """Return the view of a real tensor."""
        if self.func.overloadpacket is aten.as_strided:
            offset = self.meta.storage_offset() + real.storage_offset()
            return real.as_strided(self.meta.shape, self.meta.stride(), offset)
        views: list[torch.Tensor] = tree_leaves(self.func(real, *self.args, **self.kwargs))
        return views[self.position]


class SymbolicTensor(torch.Tensor):
    """A tensor whose value is `expression`. Code that inspects it sees an ordinary tensor on the CPU.

    `views` are the steps from `value`, which all views share. `meta` has the same shape, strides and dtype.
    """

    value: SharedValue
    views: tuple[_View, ...]
    meta: torch.Tensor
    read_now: ReadNow
    family: type[SymbolicTensor]
    """Class of the tensors that operations on this one give."""

    @staticmethod
    def __new__(  # noqa: D102  the class docstring says it
        cls,
        expression: Expression | SharedValue,
        read_now: ReadNow,
        meta: torch.Tensor | None = None,
        views: tuple[_View, ...] = (),
    ) -> SymbolicTensor:
        value = expression if isinstance(expression, SharedValue) else SharedValue(expression)
        if meta is None:
            meta = _meta(value.expression.shape, value.expression.dtype)
        elif not views and not (meta.is_contiguous() and meta.storage_offset() == 0):
            meta = aten.empty_like(meta)  # the strides of a copy, without gaps
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=value.device,
            requires_grad=False,
        )
        tensor.value, tensor.views, tensor.meta, tensor.read_now = value, views, meta, read_now
        if not views and not value.strides:
            value.strides = meta.stride()
        return tensor

    @property
    def expression(self) -> Expression:
        """The value of this tensor, as it is now."""
        return _viewed(self.value, self.views) if self.views else self.value.expression

    @property
    def initialised(self) -> Held | None:
        """What this rank keeps of a parameter that was written into; None for one that is read from files."""
        return None if self.views else self.value.initialised

    def initialise_in(self, initialiser: Initialiser, keep: FlatRange) -> None:
        """Have `initialiser` do all writes into this parameter and its views from now on, and keep these elements."""
        self.value.initialiser, self.value.keep = initialiser, keep

    @property
    def data(self) -> torch.Tensor:
        """An alias without gradients, as of any tensor. Assigning to it replaces the value."""
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
        """Return a number that is equal for two names of one value, which are tied."""
        return id(self.value)

    def untyped_storage(self) -> Any:
        """Return what has the address and size of the memory, for savers. All views of one value have the same ones."""
        base = self.value.expression
        address, nbytes = id(self.value), numel(base) * base.dtype.itemsize
        return SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: nbytes, size=lambda: nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> SymbolicTensor:
        copied = SymbolicTensor(self.expression, self.read_now, self.meta)
        copied.requires_grad_(self.requires_grad)
        return copied

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation is aten.detach or operation is aten.alias:  # nn.Parameter calls it
            base = args[0]
            return base.family(base.value, base.read_now, base.meta, base.views)
        if operation is aten.equal:
            left, right = args
            return left.dtype == right.dtype and equal(
                expression_of(left), expression_of(right), _symbolic(left, right)[0].read_now
            )
        if func._schema.is_mutable:  # before views and casts: a write changes the value that they share
            return _write(func, args, kwargs)
        if operation in (aten.stack, aten.cat) and not kwargs and (joined := _join(operation, *args)) is not None:
            return joined
        if operation in FACTORIES:
            return func(args[0].meta, *args[1:], **{**kwargs, "device": CPU})
        try:  # the shape of the result, from meta tensors
            on_meta = {name: value for name, value in kwargs.items() if name != "device"}
            metas = func(*tree_map_only(torch.Tensor, _meta_of, args), **tree_map_only(torch.Tensor, _meta_of, on_meta))
        except (RuntimeError, NotImplementedError):  # the result depends on values: item, nonzero, ...
            return cls.run_now(func, args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _snapshot, (args, kwargs))
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            return _view(func, args, kwargs, metas)
        if operation in BUILDERS:
            expression = BUILDERS[operation](tree_map_only(torch.Tensor, expression_of, args), metas)
        else:
            expression = _pointwise(func, args, kwargs, metas)
        if expression is None:
            return cls.compute(func, args, kwargs, metas)
        return _make_result(expression, args, metas)

    @classmethod
    def run_now(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that cannot wait."""
        read_now = _symbolic(args, kwargs)[0].read_now
        inputs, run = _on_values(func, args, kwargs)
        result = run([read_now(part, str(func)) for part in inputs])
        if func._schema.is_mutable:  # it has written into memory of the caller
            return result
        origin = f"the result of {func}, which ran while the model was described"

        def marked(value: torch.Tensor) -> SymbolicTensor:
            return SymbolicTensor(hold(value, origin), read_now, value.to("meta"))

        return tree_map_only(torch.Tensor, marked, result)

    @classmethod
    def compute(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], metas: Any) -> Any:
        """Return the result of an operation that needs full tensors: another symbolic tensor, where that can wait."""
        results = tree_leaves(metas)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws or not all(isinstance(result, torch.Tensor) for result in results):
            return cls.run_now(func, args, kwargs)
        inputs, run = _on_values(func, args, kwargs)

        def node(position: int, meta: torch.Tensor) -> SymbolicTensor:
            def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
                result: torch.Tensor = tree_leaves(run(values))[position]
                return result

            expression = Computed(str(func), compute, inputs, tuple(meta.shape), meta.dtype)
            return _make_result(expression, (args, kwargs), meta)

        return Template(metas).fill([node(position, meta) for position, meta in enumerate(results)])


SymbolicTensor.family = SymbolicTensor


@functools.lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous meta tensor. Inside a zero.Init `torch.empty` would make one of another dtype."""
    made: torch.Tensor = aten.empty.memory_format(shape, dtype=dtype, device="meta")
    return made


def _meta_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.meta if isinstance(tensor, SymbolicTensor) else tensor.to("meta")


def make_uninitialised(like: torch.Tensor, read_now: ReadNow) -> SymbolicTensor:
    """Return a tensor of the shape and dtype of `like`, without values and without memory, to be initialised."""
    shape, dtype = tuple(like.shape), like.dtype
    zeros = Computed(UNINITIALISED, lambda _: torch.zeros(shape, dtype=dtype, device=CPU), (), shape, dtype)
    return SymbolicTensor(zeros, read_now)


def expression_of(tensor: torch.Tensor) -> Expression:
    """Return the value of a tensor; that of a real one is `Held`."""
    return tensor.expression if isinstance(tensor, SymbolicTensor) else hold(tensor)


def _make_result(expression: Expression, args: Any, meta: torch.Tensor) -> SymbolicTensor:
    source = _symbolic(args)[0]
    return source.family(expression, source.read_now, meta)


def _join(operation: Any, tensors: Sequence[Any], dim: int = 0) -> SymbolicTensor | None:
    """Return the stack or concatenation of contiguous symbolic tensors of one shape and dtype; None for others.

    To find the shape of the result torch runs several operations on each tensor, and a layer may have hundreds.
    """
    metas = [tensor.meta for tensor in tensors if isinstance(tensor, SymbolicTensor)]
    if not metas or len(metas) != len(tensors) or not all(_is_like(meta, metas[0]) for meta in metas):
        return None
    shape = list(metas[0].shape)
    num_dims = len(shape) + (operation is aten.stack)
    if not -num_dims <= dim < num_dims:
        return None  # torch says what is wrong
    dim %= num_dims
    if operation is aten.stack:
        shape.insert(dim, 1)
    shape[dim] *= len(tensors)
    meta = _meta(tuple(shape), metas[0].dtype)
    build = _stacked if operation is aten.stack else _joined
    return _make_result(build(([tensor.expression for tensor in tensors], dim), meta), tensors[0], meta)


def _is_like(meta: torch.Tensor, other: torch.Tensor) -> bool:
    return meta.shape == other.shape and meta.dtype == other.dtype and meta.is_contiguous()


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a real tensor that an operation uses later: its owner may write into it before then."""
    return tensor if isinstance(tensor, SymbolicTensor) or tensor.is_meta else tensor.clone()


def _symbolic(*args: Any) -> list[SymbolicTensor]:
    return [value for value in tree_leaves(args) if isinstance(value, SymbolicTensor)]


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any) -> Expression | None:
    is_pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    if not is_pointwise or not isinstance(meta, torch.Tensor):
        return None
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    # Type promotion treats a scalar tensor unlike a flat range of it.
    if any(tensor.dim() == 0 for tensor in tensors):
        return None
    shape, call = tuple(meta.shape), Template((args, kwargs))
    uncast = [without_casts(expression_of(tensor)) for tensor in tensors]

    def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(values, uncast, strict=True)
        real_args, real_kwargs = call.fill(
            functools.reduce(torch.Tensor.to, casts, value) for value, (_, casts) in pairs
        )
        result: torch.Tensor = func(*real_args, **real_kwargs)
        return result

    parts = tuple(expand(part, shape) for part, _ in uncast)
    return Elementwise(str(func), compute, parts, shape, meta.dtype)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], metas: Any) -> Any:
    base: SymbolicTensor = args[0]
    # An as_strided is one of the memory of the value, whatever views are between.
    before = () if func.overloadpacket is aten.as_strided else base.views
    views = (_View(func, args[1:], kwargs, position, meta) for position, meta in enumerate(tree_leaves(metas)))
    return Template(metas).fill(base.family(base.value, base.read_now, view.meta, (*before, view)) for view in views)


def _viewed(value: SharedValue, views: Sequence[_View]) -> Expression:
    """Return the expression of the last of some views, each of the one before it. The first is of a value."""
    expression, strides, meta = value.expression, value.strides, views[-1].meta
    if all(view.meta.dtype == expression.dtype and not (view.meta.is_conj() or view.meta.is_neg()) for view in views):
        # The dims of the value in the order in which they lie in memory.
        in_memory = permute(expression, sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        if are_nested(meta.shape, meta.stride()):
            return strided(in_memory, int(meta.storage_offset()), meta.stride(), meta.shape)

    def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
        real = with_strides(values[0], strides)
        for view in views:
            real = view.apply(real)
        return real

    return Computed(str(views[-1].func), compute, (expression,), tuple(meta.shape), meta.dtype)


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = written_arguments(func, args, kwargs)
    if targets and not _symbolic(targets):
        return SymbolicTensor.run_now(func, args, kwargs)
    if not writes_first_alone(func) or not isinstance(args[0], SymbolicTensor):
        raise UnsupportedError(
            f"{func} writes into weights that are still being loaded, in a way that lowmem_load does not know; load "
            "this model without lowmem_load, and report it"
        )
    written: SymbolicTensor = args[0]
    args, kwargs = tree_map_only(torch.Tensor, _snapshot, (args, kwargs))
    inputs, run = _on_values(func, args, kwargs)
    value, views, others = written.value, written.views, inputs[1:]
    draws = torch.Tag.nondeterministic_seeded in func.tags

    def change(full: torch.Tensor, other_values: Sequence[torch.Tensor]) -> torch.Tensor:
        target = full
        for view in views:
            target = view.apply(target)
        run([target, *other_values])
        return full

    if value.initialiser is None:  # not a parameter: the write waits, with the random numbers that it draws
        before, strides = value.expression, value.strides
        state = torch.get_rng_state() if draws else None
        if draws:  # those after it must be the ones of an ordinary load, even if nobody reads the result
            now = [written.read_now(part, str(func)) for part in others]
            change(torch.empty(before.shape, dtype=before.dtype, device=CPU), now)
        value.expression = Computed(
            str(func),
            lambda values: with_random_state(
                state, lambda: change(with_strides(values[0].clone(), strides), values[1:])
            ),
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
    tensors = _symbolic(args, kwargs)
    strides, call = [tensor.stride() for tensor in tensors], Template((args, kwargs), SymbolicTensor)
    writes = func._schema.is_mutable

    def run(values: Sequence[torch.Tensor]) -> Any:
        real_args, real_kwargs = call.fill(values if writes else map(with_strides, values, strides))
        return func(*real_args, **real_kwargs)

    return tuple(tensor.expression for tensor in tensors), run


def with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `value` with the strides that the caller saw, on which as_strided and its like depend."""
    if value.stride() == strides:
        return value
    # Along a stride of 0 all elements are one.
    distinct = value[tuple(slice(None) if stride else slice(1) for stride in strides)]
    made = torch.empty_strided(distinct.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(distinct).expand(value.shape)


# -- calls of aten operations: the expression that each gives, and their arguments without the tensors -----------------

# A dispatched call has its arguments in the order of the schema (torch 2.13 `native_functions.yaml`), without defaults
# at the end.


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


def _indexed(args: Args, meta: torch.Tensor) -> Expression | None:
    """Describe `tensor[..., [0, 3], ...]`: one list of indexes."""
    (dim, index), *others = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    if others or not isinstance(index, Held) or index.flat.is_meta or index.dtype != torch.int64:
        return None
    if len(index.shape) != 1 or not 0 < index.shape[0] <= FEW_INDEXES:
        return None
    size, indexes = args[0].shape[dim], index.flat.tolist()
    if not all(-size <= at < size for at in indexes):
        return None  # torch says what is wrong
    return concat([slice_dim(args[0], dim, at % size, 1, 1) for at in indexes], dim)


def _joined(args: Args, meta: torch.Tensor) -> Expression:
    dim = (args[1] if len(args) > 1 else 0) % meta.dim()
    parts = [cast(part, meta.dtype) for part in args[0] if len(part.shape) == meta.dim()]
    return concat(parts, dim)


def _stacked(args: Args, meta: torch.Tensor) -> Expression:
    dim = (args[1] if len(args) > 1 else 0) % meta.dim()
    parts = [cast(part, meta.dtype) for part in args[0]]
    if dim == meta.dim() - 1:
        parts = [reshape(part, (*part.shape, 1)) for part in parts]
    return reshape(concat(parts, dim), tuple(meta.shape))  # one node for all: there may be hundreds of parts


BUILDERS: dict[Any, Callable[[Args, Any], Expression | None]] = {
    **dict.fromkeys((aten.clone, aten._to_copy), lambda args, meta: cast(args[0], meta.dtype)),
    aten._unsafe_view: lambda args, meta: reshape(args[0], tuple(meta.shape)),
    aten.constant_pad_nd: lambda args, _: args[0] if not any(args[1]) else None,
    aten.index: _indexed,
    aten.cat: _joined,
    aten.stack: _stacked,
}
"""The expressions of operations that only move or cast elements, and are not views; None if they have to run."""
