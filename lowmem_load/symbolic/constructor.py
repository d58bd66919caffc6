"""Building a model: no memory for its parameters, real values for all that its constructor computes.

Inside `Constructor.building` the tensors that an ordinary load makes on meta are real, so `item()`, numpy and the like
work. A parameter goes to meta when it is registered. Random numbers and tensors of more than `MAX_NUMEL` elements are
on meta, and so is all that is computed from them. Memory that was allocated and not written is noted. So `is_known`
says what the constructor has computed, and in the end `check` says which buffers and tensor attributes have no value.

What an ordinary load makes in memory (a tensor on a device that is named, `torch.Tensor(3)`) is made as ever: random
numbers for it are drawn, so that those after it are the same.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lowmem_load.errors import UnsupportedError, listed
from lowmem_load.planning.expression import Computed
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.attributes import is_computed_in_forward, replaced_in, tensor_attributes, tensors_in
from lowmem_load.symbolic.initialise import CPU, UNINITIALISED, Initialiser, ReadNow
from lowmem_load.symbolic.operations import written_arguments
from lowmem_load.symbolic.tensor import FACTORIES, SymbolicTensor, make_uninitialised

aten = torch.ops.aten

MAX_NUMEL = 1 << 24
"""Elements of the largest value that is computed: rotary tables of 128 Ki positions and 128 dims, in 64 MiB of fp32."""

META = torch.device("meta")
_DEFAULT = torch.device("meta", 1)
"""The default device of an ordinary load, told apart from a meta device that the model's code names."""

_EMPTY = {aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty, aten.new_empty_strided}
"""Operations that return memory without values."""

_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
"""Functions that make tensors of data, which they would lose on meta."""

_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.index_put_, aten.index_copy_, aten.scatter_, aten.masked_fill_}
"""Operations that give elements values that do not depend on those before."""


class Constructor:
    """What the constructors of one model have made: which values are known, its buffers and its tensor attributes.

    A buffer of random numbers that an ordinary load does not draw has no right value. None are drawn for it, and the
    random state stays as it is. Only what writes in place gets numbers, from a generator of this object.
    """

    def __init__(self) -> None:
        self._memory = _Memory(set(), {})
        self._depth = 0
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.filled_later: list[nn.Module] = []  # whose tensor attributes get their values after the load
        self._parameters: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}  # by id: those in attributes, and a place

    @property
    def is_building(self) -> bool:
        """Whether a constructor runs."""
        return self._depth > 0

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the constructor has computed the value of a tensor."""
        return tensor.numel() == 0 or not (tensor.is_meta or _storage(tensor) in self._memory.unknown)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, constructors of this thread make values, and parameters without memory."""
        on_meta, thread = WeakTensorKeyDictionary(), threading.get_ident()

        def move(_: nn.Module, __: str, parameter: Any) -> nn.Parameter | None:
            if threading.get_ident() != thread or parameter is None or parameter.is_meta or _is_special(parameter):
                return None
            if parameter not in on_meta:
                if _storage(parameter) not in self._memory.instead_of_meta:
                    return None
                self._memory.forget(_storage(parameter))
                on_meta[parameter] = _without_memory(parameter)
            moved: nn.Parameter = on_meta[parameter]
            return moved

        registering = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
        self._depth += 1
        try:
            with _DefaultDevice(self._memory), _Values(self._memory):
                yield
        finally:
            self._depth -= 1
            registering.remove()

    def note(self, model: nn.Module) -> None:
        """Note the buffers of a model, and the parameters that its attributes hold, before anything is loaded."""
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if not isinstance(buffer, SymbolicTensor)
        ]
        in_attributes = {
            id(tensor) for module, name, _ in tensor_attributes(model) for tensor in tensors_in(vars(module)[name])
        }
        for module in model.modules() if in_attributes else ():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in in_attributes:
                    self._parameters[id(parameter)] = parameter, module, name

    def restore(self, read_now: ReadNow, initialiser: Initialiser) -> None:
        """Give the buffers that no file has the values of the constructor: transformers has replaced them.

        Writes into one that has no value go through `initialiser`, so that it shows whether there are any.
        """
        for module, name, buffer in self._buffers:
            loaded = getattr(module, name, None)
            if loaded is None or isinstance(loaded, SymbolicTensor) or getattr(loaded, "_is_hf_initialized", False):
                continue
            if self.is_known(buffer):
                setattr(module, name, buffer)
            else:
                empty = make_uninitialised(loaded, read_now)
                empty.initialise_in(initialiser, FlatRange(0, loaded.numel()))
                setattr(module, name, empty)
        self._buffers.clear()

    def check(self, name: str, model: nn.Module) -> None:
        """Raise UnsupportedError, which names the buffers and tensor attributes of a described model without values."""
        unfilled = {name_: buffer for name_, buffer in model.named_buffers() if not self._is_filled(buffer)}
        for module, attribute, full_name in tensor_attributes(model):
            for tensor in tensors_in(vars(module)[attribute]) if module not in self.filled_later else ():
                is_loaded = id(tensor) in self._parameters or is_computed_in_forward(module, attribute)
                if not (is_loaded or self._is_filled(tensor)):
                    unfilled[full_name] = tensor
        if unfilled:
            problems = [f"{name_} ({_reason(tensor)})" for name_, tensor in unfilled.items()]
            raise UnsupportedError(
                f"{name}: the constructor of {type(model).__name__} computes no value for buffers or tensor attributes "
                f"that no file has: {listed(problems)}. Set them in _init_weights, save them with the checkpoint, or "
                "load without lowmem_load"
            )

    def _is_filled(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, SymbolicTensor):
            return self.is_known(tensor)
        expression = tensor.expression
        is_empty = isinstance(expression, Computed) and expression.operation == UNINITIALISED
        return tensor.initialised is not None or not is_empty

    def finish(self, model: nn.Module, device: torch.device) -> None:
        """Move the tensor attributes of a loaded model to where its buffers are. Parameters become the loaded ones."""

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self._parameters:
                _, module, name = self._parameters[id(tensor)]
                loaded: torch.Tensor = getattr(module, name)
                return loaded
            return tensor.to(device) if tensor.device.type == "cpu" else tensor

        for module, name, _ in list(tensor_attributes(model)):
            setattr(module, name, replaced_in(vars(module)[name], replace))


class _Memory(NamedTuple):
    """Notes on the memory of tensors."""

    instead_of_meta: set[StorageWeakRef]  # real, where an ordinary load has no memory
    unknown: dict[StorageWeakRef, bool]  # without values; True: random, also where a part was overwritten

    def note(self, tensors: Iterable[torch.Tensor], *, instead_of_meta: bool, is_random: bool | None) -> None:
        """Note what is known of real tensors; `is_random` None means that their values are known."""
        for key in [_storage(tensor) for tensor in tensors if not tensor.is_meta]:
            if instead_of_meta:
                self.instead_of_meta.add(key)
            if is_random is not None:
                self.unknown[key] = is_random

    def forget(self, key: StorageWeakRef) -> None:
        self.instead_of_meta.discard(key)
        self.unknown.pop(key, None)


class _DefaultDevice(TorchFunctionMode):
    """Makes meta the default device, but for tensors that are made of data."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if func not in _OF_DATA:
            return func(*args, **{**kwargs, "device": _DEFAULT})
        made = func(*args, **kwargs)
        if not any(isinstance(value, torch.Tensor) for value in args):  # else it may be the same memory
            self._memory.note([made], instead_of_meta=True, is_random=None)
        return made


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the operations of a constructor on real tensors, and notes which memory holds no values."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._generator = memory, torch.Generator()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors(*args, *kwargs.values())
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, tensors, draws)
        returns = func._schema.returns
        if any(map(_is_special, tensors)) or (returns and returns[0].alias_info is not None):  # views share memory
            return func(*args, **kwargs)
        uses_shape_only, device = func.overloadpacket in FACTORIES, kwargs.get("device")
        inputs = [] if uses_shape_only and device is not None else tensors
        is_on_meta = any(map(self._is_on_meta, inputs)) or device == _DEFAULT
        if is_on_meta:
            if draws or any(tensor.is_meta for tensor in inputs):
                return _on_meta(func, args, kwargs)
            metas = _shapes(func, args, kwargs)
            if device == META or any(tensor.numel() > MAX_NUMEL for tensor in _tensors(metas)):
                return metas
            kwargs = {**kwargs, "device": CPU} if device == _DEFAULT else kwargs
        result = func(*args, **kwargs)
        unknown = [] if uses_shape_only else self._unknown(inputs)
        is_random = any(unknown) if unknown or func.overloadpacket in _EMPTY else None
        self._memory.note(_tensors(result), instead_of_meta=is_on_meta, is_random=is_random)
        return result

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any], draws: bool) -> Any:
        if any(map(_is_special, tensors)):
            return func(*args, **kwargs)
        places = written_arguments(func, args, kwargs)
        written = _tensors(*places)
        others = [tensor for tensor in tensors if all(tensor is not target for target in written)]
        if any(tensor.is_meta for tensor in tensors):
            self._memory.note(written, instead_of_meta=False, is_random=True)
            if not all(tensor.is_meta for tensor in written) or draws:  # there is nothing to write or to draw
                return places[0] if len(places) == 1 else tuple(places)
            return _on_meta(func, args, kwargs)
        draws_apart = draws and any(map(self._is_on_meta, written))
        result = func(*args, **kwargs, **({"generator": self._generator} if draws_apart else {}))
        unknown = self._unknown(others)
        if draws_apart or unknown:
            self._memory.note(written, instead_of_meta=False, is_random=draws_apart or any(unknown))
        elif draws or func.overloadpacket in _OVERWRITES:
            for tensor in written:
                # Memory that was allocated is filled part by part. Random numbers must all be overwritten.
                key, nbytes = _storage(tensor), tensor.numel() * tensor.itemsize
                if not self._memory.unknown.get(key) or nbytes == tensor.untyped_storage().nbytes():
                    self._memory.unknown.pop(key, None)
        return result

    def _is_on_meta(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on meta in an ordinary load."""
        return tensor.is_meta or _storage(tensor) in self._memory.instead_of_meta

    def _unknown(self, tensors: Iterable[torch.Tensor]) -> list[bool]:
        keys = [_storage(tensor) for tensor in tensors if not tensor.is_meta]
        return [self._memory.unknown[key] for key in keys if key in self._memory.unknown]


def _tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation, and in lists of them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    lists = [value for value in values if isinstance(value, list | tuple)]
    return tensors + _tensors(*itertools.chain(*lists)) if lists else tensors


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    # While there is a weak reference, no other memory gets the same one.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_special(tensor: torch.Tensor) -> bool:
    """Return whether a tensor runs operations by itself or has no memory of its own: it is symbolic, lazy or sparse."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not is_plain or nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if _tensors(*args, *kwargs.values()):
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), (args, kwargs))
    for name, value in (("device", META), ("generator", None)):
        if name in kwargs:
            kwargs = {**kwargs, name: value}
    return func(*args, **kwargs)


def _shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operation on meta; None if they depend on values, as those of item and nonzero."""
    try:
        return _on_meta(func, args, kwargs)
    except (RuntimeError, NotImplementedError):
        return None


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=META)
    if type(parameter) is nn.Parameter:
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:  # as transformers 4 does it
        keywords: dict[str, Any] = {**vars(parameter), "requires_grad": parameter.requires_grad}
        made = type(parameter)(data, **keywords)
    vars(made).update(vars(parameter))
    return made


def _reason(tensor: torch.Tensor) -> str:
    if tensor.numel() > MAX_NUMEL:
        return f"{tensor.numel()} elements, of which at most {MAX_NUMEL} are computed"
    return "made of random numbers, or of memory that nothing was written to"
