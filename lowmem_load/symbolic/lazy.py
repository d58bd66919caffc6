"""Weights that are read when something uses them: the symbolic tensors of a model whose load has ended.

[Note: never wrong] A lazy tensor stays an expression through views, moves, casts and elementwise operations on lazy
tensors, and through writes of such values. Everything else meets real values:
- An operation that needs values reads them for itself. Its result is an ordinary tensor.
- What needs memory that stays makes the value real first: an address, a write of random or real values, a collective,
  a kernel that is not torch's own. From then on `SharedValue.memory` is the value of the tensor and of all its views.
- What looks below torch (numpy, DLPack, storages, pickles) gets the real memory. C++ code that bypasses torch's
  dispatcher meets an error of torch: the tensor has no storage.

[Note: becoming ordinary] A parameter must stay the same Python object, since optimizers, ties and hooks refer to it,
and must end as an ordinary `nn.Parameter`. `replace_in_place` does it in one of two ways:
- Nobody else refers to its C++ implementation (`_use_count() == 1`, the usual case): class, attributes and
  implementation are exchanged with those of a new parameter, as `torch.utils.swap_tensors` does.
- Something does, such as autograd after `loss = model(x)` without a backward: an exchange would tear the graph from
  its leaf. So it stays a `LazyTensor`, whose `SharedValue.memory` is the other tensor, which operations find there.
With another shape, dtype or device the second way is not possible. One case is common: `model.to(device)` of a
parameter that needs gradients. There only the node of `.to` refers to it, so the exchange is made, and a backward
through that node raises.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowmem_load.errors import UnsupportedError
from lowmem_load.locks import ForkedLock
from lowmem_load.planning.expression import Expression, cast, expand, hold
from lowmem_load.replaced import holding
from lowmem_load.symbolic.initialise import CPU, SharedValue
from lowmem_load.symbolic.tensor import FACTORIES, SymbolicTensor, with_strides, writes_first_alone, written_arguments

aten = torch.ops.aten

_OWN = frozenset({"value", "views", "meta", "read_now", "_is_param", "kind"})
"""Attributes that a lazy parameter has and an ordinary one does not."""

_RESHAPES = frozenset({aten.set_, aten.resize_, aten.resize_as_})

KEEPING = ForkedLock()
"""Held while lazy tensors become ordinary ones, also while they are read: forwards may run in several threads.

A finalizer, which may run in the thread that is waited for, must not take it."""

_SWAPPING = threading.RLock()
"""Held for the moment in which a tensor is neither lazy nor ordinary. No fork comes between."""

os.register_at_fork(before=_SWAPPING.acquire, after_in_parent=_SWAPPING.release, after_in_child=_SWAPPING.release)

_assigning: list[object] = []  # blocks of `assigned_data_is_real`
_ASSIGNING = ForkedLock()  # held for a moment: finalizers take it
_ONLY_COMPARED: ContextVar[bool] = ContextVar("lowmem_load_addresses_are_only_compared", default=False)


@contextlib.contextmanager
def addresses_are_only_compared() -> Iterator[None]:
    """Inside, `data_ptr` of a lazy tensor reads nothing. Its number is the same for all names of one value."""
    with holding(_ONLY_COMPARED, True):
        yield


@contextlib.contextmanager
def assigned_data_is_real() -> Iterator[None]:
    """Inside, `parameter.data = symbolic` gives ordinary parameters real memory: torch would take the other's, none.

    For all threads. Blocks may end in any order.
    """
    ordinary, block = torch.Tensor.data, object()

    def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
        if isinstance(value, SymbolicTensor) and not isinstance(value, LazyTensor):
            value = value.read_now(value.expression, "assigning to data")
        ordinary.__set__(parameter, keep(value))  # type: ignore[attr-defined]

    with _ASSIGNING:
        _assigning.append(block)
        if len(_assigning) == 1:
            nn.Parameter.data = property(ordinary.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        with _ASSIGNING:
            _assigning.remove(block)
            if not _assigning and "data" in vars(nn.Parameter):  # a finalizer may have come in between
                del nn.Parameter.data


class LazyTensor(SymbolicTensor):
    """A tensor that is read when something uses it. See [Note: never wrong]."""

    # torch's own gives real results this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  as of a symbolic tensor
        if isinstance(args[0], torch.Tensor):  # accelerate makes another parameter of the class of this one
            return nn.Parameter(args[0], **kwargs)
        tensor: Any = SymbolicTensor.__new__(cls, *args)
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, operation = kwargs or {}, func.overloadpacket
        if operation is aten.detach or operation is aten.alias:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if operation is aten._has_compatible_shallow_copy_type:  # for `Module.to`: whether to assign to `data`
            return not any(tensor.is_meta for tensor in args)
        if func.namespace == "c10d":  # its schemas do not say what they write to
            tree_map_only(LazyTensor, keep, (args, kwargs))
        args, kwargs = tree_map_only(LazyTensor, _in_memory, (args, kwargs))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        lazy = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
        if not lazy:
            return func(*args, **kwargs)
        is_alone = len(lazy) == len(tensors) and func.namespace in ("aten", "prims")
        if func._schema.is_mutable:
            is_alone = is_alone and all(tensor.device == CPU for tensor in lazy)
            return _write(func, types, args, kwargs, is_alone=is_alone)
        if operation in FACTORIES:
            return func(args[0].meta, *args[1:], **{"device": args[0].device, **kwargs})
        if operation is aten._to_copy and not kwargs.get("pin_memory"):
            return _cast_or_moved(func, args[0], kwargs)
        # A device may compute with other roundings than the host, so there only views stay lazy.
        is_view = bool(func._schema.returns) and func._schema.returns[0].alias_info is not None
        can_wait = is_alone and (is_view or all(tensor.device == CPU for tensor in lazy))
        if can_wait or operation is aten.equal:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return cls.run_now(func, args, kwargs)

    @classmethod
    def run_now(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on real values, which are not kept: a backward reads them again."""
        args, kwargs = tree_map_only(LazyTensor, values_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def compute(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Any:
        """See `SymbolicTensor`. Only what elements of files are moved, cast or computed one by one for can wait."""
        return cls.run_now(func, args, kwargs)

    @property
    def expression(self) -> Expression:
        """The value of this tensor, as it is now."""
        return super().expression if self.value.memory is None else hold(keep(self))

    @property
    def data(self) -> torch.Tensor:
        """An alias without gradients, as of any tensor. What is assigned to it takes the place of the value."""
        return self.detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        replace_in_place(self, tensor)

    def data_ptr(self) -> int:
        """Return the address of the real values, which stay in memory from now on."""
        return self.untyped_storage().data_ptr() if _ONLY_COMPARED.get() else keep(self).data_ptr()

    def untyped_storage(self) -> Any:
        """Return what tells which tensors share memory. Anything else that is asked of it makes the values real."""
        if self.value.memory is not None:
            return keep(self).untyped_storage()
        return _Storage(tensor=self, **vars(super().untyped_storage()))

    def storage(self) -> Any:  # noqa: D102  torch's
        return keep(self).storage()

    def _typed_storage(self) -> Any:
        return keep(self)._typed_storage()

    def numpy(self, *, force: bool = False) -> Any:  # noqa: D102  torch's
        return keep(self).detach().requires_grad_(self.requires_grad).numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return keep(self).__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return keep(self).__dlpack__(*args, **kwargs)

    def set_(self, source: Any, *args: Any) -> LazyTensor:
        """Become an alias of another tensor, or of the whole of a storage."""
        replace_in_place(self, source if isinstance(source, torch.Tensor) else keep(self).detach().set_(source, *args))
        return self

    def share_memory_(self) -> LazyTensor:  # noqa: D102  torch's
        keep(self).share_memory_()
        return self

    def tolist(self) -> Any:  # noqa: D102  torch's
        return values_of(self).tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(values_of(self), spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.value.memory is not None:
            return _like(self, keep(self).clone())
        value = SharedValue(self.expression, device=self.device)
        return _like(self, LazyTensor(value, self.read_now, self.meta))

    def hand_on(self, made: torch.Tensor, attributes: Mapping[str, Any]) -> None:
        """Give a tensor that was made in place of this one the attributes that code has put on it."""
        vars(made).update(attributes)

    def __copy__(self) -> Any:
        return _like(self, self.detach())  # of the same memory, as of any tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, in memory that stays: tied weights are one in the file, too."""
        return _like(self, keep(self)).__reduce_ex__(protocol)


LazyTensor.family = LazyTensor


class _Storage(SimpleNamespace):
    """The storage of a value that is not in memory: an address and a size, which tell ties."""

    tensor: LazyTensor

    def __getattr__(self, name: str) -> Any:
        return getattr(keep(self.tensor).untyped_storage(), name)


def is_unread(tensor: torch.Tensor) -> bool:
    """Return whether nothing of a tensor is in memory."""
    return isinstance(tensor, LazyTensor) and tensor.value.memory is None


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Inside, new tensors can be trained later, though the caller may be in inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a lazy tensor as an ordinary tensor, which nothing keeps."""
    if not isinstance(tensor, LazyTensor) or tensor.value.memory is not None:
        return _in_memory(tensor)
    values = tensor.read_now(tensor.expression, "its values")
    return with_strides(values, tensor.stride()).to(tensor.device)


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """Make the value of a lazy tensor real, for all its names and views; return the ordinary tensor."""
    if isinstance(tensor, LazyTensor):
        value = tensor.value
        with KEEPING, normal_tensors():
            if value.memory is None:
                settle(value, with_strides(tensor.read_now(value.expression, "its memory"), value.strides))
    return _in_memory(tensor)


def settle(value: SharedValue, memory: torch.Tensor) -> None:
    """Let real values be a value from now on."""
    value.memory = memory.to(value.device)
    value.initialiser = None
    value.forget()


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the ordinary tensor for a lazy one whose value is in memory; any other tensor as it is."""
    if not isinstance(tensor, LazyTensor) or tensor.value.memory is None:
        return tensor
    real = tensor.value.memory
    for view in tensor.views:
        real = view.apply(real)
    return real


def replace_in_place(tensor: LazyTensor, other: torch.Tensor) -> None:
    """Let a lazy tensor be an alias of another tensor, in the same Python object. See [Note: becoming ordinary].

    Raises UnsupportedError if it would have to, and the other one has another shape, dtype or device.
    Source: torch 2.13 `utils/__init__.py`, `swap_tensors`.
    """
    other, gradient = _in_memory(other.detach()), tensor.grad
    made = _like(tensor, other)
    is_alike = (other.shape, other.dtype, other.device) == (tensor.shape, tensor.dtype, tensor.device)
    if tensor._use_count() == 1 or (not is_alike and _only_a_graph_refers_to(tensor)):
        # As `torch.utils.swap_tensors`, which refuses weak references: those to this object go on to mean it.
        with _SWAPPING:
            tensor.__class__, made.__class__ = type(made), type(tensor)  # type: ignore[assignment]
            tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
            torch._C._swap_tensor_impl(tensor, made)
            tensor.grad = gradient
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # torch keeps them, but calls them no more
            setattr(tensor, hooks, getattr(tensor, hooks))
    elif not is_alike:
        raise UnsupportedError(
            f"a lazy weight of shape {tuple(tensor.shape)} and {tensor.dtype}, which autograd or C++ code refers to, "
            f"was given data of shape {tuple(other.shape)} and {other.dtype}; change it before it is used"
        )
    elif isinstance(other, LazyTensor):
        tensor.value, tensor.views, tensor.meta = other.value, other.views, other.meta
    else:
        tensor.value, tensor.views = SharedValue(hold(other), device=other.device, memory=other), ()


def _only_a_graph_refers_to(tensor: torch.Tensor) -> bool:
    """Return whether all that refers to a leaf's implementation is the graph of an operation, as of `leaf.to(device)`.

    A backward through that graph, which would miss the leaf from now on, is an error.
    """
    if tensor._use_count() != 2 or not tensor.is_leaf or not tensor.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    if tensor._use_count() != 2:  # there was no such node before
        return False

    def refuse(_: Any) -> NoReturn:
        raise UnsupportedError("a lazy weight was given other data after the forward; do so before it")

    node.register_prehook(refuse)
    return True


def _like(tensor: LazyTensor, values: torch.Tensor) -> torch.Tensor:
    """Return a parameter if `tensor` is one, with other values and with the attributes that code has put on it."""
    is_parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(values, tensor.requires_grad) if is_parameter else values.requires_grad_(tensor.requires_grad)
    tensor.hand_on(made, {name: value for name, value in vars(tensor).items() if name not in _OWN})
    return made


def _cast_or_moved(func: Any, tensor: LazyTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    dtype, device = kwargs.get("dtype") or tensor.dtype, torch.device(kwargs.get("device") or tensor.device)
    meta: torch.Tensor = func(
        tensor.meta, **{name: kwargs[name] for name in kwargs if name in ("dtype", "memory_format")}
    )
    if device.type == "meta":
        return meta
    if device.type == "cpu":
        device = torch.device("cpu")  # torch drops the index that accelerate gives it
    elif device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return LazyTensor(SharedValue(cast(tensor.expression, dtype), device=device), tensor.read_now, meta)


def _write(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_alone: bool) -> Any:
    target, written = args[0], written_arguments(func, args, kwargs)
    if func.overloadpacket in _RESHAPES or torch.Tag.inplace_view in func.tags:
        raise UnsupportedError(f"{func} would change the shape of a lazy weight in place; assign to its data instead")
    if func.overloadpacket is aten.copy_ and isinstance(target, LazyTensor) and not target.views:
        return _copy(target, args[1])
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if is_alone and writes_first_alone(func) and isinstance(target, LazyTensor) and not draws:
        return SymbolicTensor.__torch_dispatch__(func, types, args, kwargs)
    tree_map_only(LazyTensor, keep, written)
    args, kwargs = tree_map_only(LazyTensor, values_of, (args, kwargs))
    result = func(*args, **kwargs)
    if len(written) != len(func._schema.returns):  # `_foreach_mul_` returns nothing
        return result
    return written[0] if len(written) == 1 else tuple(written)  # torch returns what it has written into


def _copy(target: LazyTensor, source: torch.Tensor) -> LazyTensor:
    if isinstance(source, LazyTensor) and source.device == target.device:
        target.value.replace(cast(expand(source.expression, target.shape), target.dtype))
        target.value.initialiser = None
    else:
        memory = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
        settle(target.value, memory.copy_(values_of(source)))
    return target
