"""Building a model: no memory for its parameters, real values for all that its constructor computes.

Inside `Constructor.building` tensors are real, so `item()`, numpy and the like work. A parameter goes to the meta
device when it is registered. Random numbers and tensors of more than `MAX_NUMEL` elements are on meta, and so is all
that is computed from them. Memory that was allocated and not written is noted. So `is_known` says what the constructor
has computed, and in the end `check` says which buffers and tensor attributes have no value.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lowmem_load.errors import UnsupportedError, listed
from lowmem_load.planning.expression import Computed
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.initialise import UNINITIALISED, Initialiser, ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor, uninitialised

aten = torch.ops.aten

MAX_NUMEL = 1 << 24
"""Elements of the largest value that is computed: rotary tables of 128 Ki positions and 128 dims, in 64 MiB of fp32."""

META = torch.device("meta")

_EMPTY = {aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty, aten.new_empty_strided}
"""Operations that return memory without values."""

_LIKE = {
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
}
"""Operations that use only the shape, dtype and device of their argument."""

_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.index_put_, aten.index_copy_, aten.scatter_, aten.masked_fill_}
"""Operations that give elements values that do not depend on those before."""

_OWN_STATE = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""


class Constructor:
    """What the constructors of one model have made: which values are known, its buffers and its tensor attributes.

    A buffer of random numbers has no right value: each rank would draw its own. So none are drawn, and the random state
    stays as it is. Only what writes in place gets numbers, from a generator of this object.
    """

    def __init__(self) -> None:
        self._unknown: dict[StorageWeakRef, bool] = {}  # memory without values; True: also where part was overwritten
        self._generator = torch.Generator()
        self._depth = 0
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._parameters: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}  # by id: those in attributes, and a place

    @property
    def is_building(self) -> bool:
        """Whether a constructor runs."""
        return self._depth > 0

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the constructor has computed the value of a tensor."""
        return tensor.numel() == 0 or not (tensor.is_meta or _storage(tensor) in self._unknown)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, constructors of this thread make values, and parameters without memory."""
        on_meta, thread = WeakTensorKeyDictionary(), threading.get_ident()

        def move(_: nn.Module, __: str, parameter: Any) -> nn.Parameter | None:
            if threading.get_ident() != thread or parameter is None or parameter.is_meta or _is_special(parameter):
                return None
            if parameter not in on_meta:
                self._unknown.pop(_storage(parameter), None)
                on_meta[parameter] = _without_memory(parameter)
            moved: nn.Parameter = on_meta[parameter]
            return moved

        registering = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
        self._depth += 1
        try:
            with _Values(self._unknown, self._generator):
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
        held = {id(tensor) for module, name, _ in _attributes(model) for tensor in _tensors_in(vars(module)[name])}
        for module in model.modules() if held else ():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in held:
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
                empty = uninitialised(loaded, read_now)
                empty.initialise_in(initialiser, FlatRange(0, loaded.numel()))
                setattr(module, name, empty)
        self._buffers.clear()

    def check(self, name: str, model: nn.Module) -> None:
        """Raise UnsupportedError, which names the buffers and tensor attributes of a described model without values."""
        unfilled = {each: buffer for each, buffer in model.named_buffers() if not self._is_filled(buffer)}
        for module, attribute, full_name in _attributes(model):
            for tensor in _tensors_in(vars(module)[attribute]):
                is_loaded = id(tensor) in self._parameters or _is_computed_in_forward(module, attribute)
                if not (is_loaded or self._is_filled(tensor)):
                    unfilled[full_name] = tensor
        if unfilled:
            problems = [f"{each} ({_reason(tensor)})" for each, tensor in unfilled.items()]
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

        for module, name, _ in list(_attributes(model)):
            setattr(module, name, _replaced_in(vars(module)[name], replace))


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the operations of a constructor, and notes which memory holds no values."""

    def __init__(self, unknown: dict[StorageWeakRef, bool], generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unknown, self._generator = unknown, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors(*args, *kwargs.values())
        device = kwargs.get("device")
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if all(tensor.is_meta for tensor in tensors) and (device == META or (tensors and device is None)):
            if draws and func._schema.is_mutable:  # there is nothing to draw, and torch takes long for it
                return args[0]
            return func(*args, **kwargs)
        if any(map(_is_special, tensors)):  # it has an implementation of its own
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, tensors, draws)
        if func._schema.returns and func._schema.returns[0].alias_info is not None:  # views share their memory
            return func(*args, **kwargs)
        operation = func.overloadpacket
        inputs = [] if operation in _LIKE else tensors
        if draws or any(tensor.is_meta for tensor in inputs):
            return _on_meta(func, args, kwargs)
        try:
            metas = _on_meta(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # the result depends on values: item, nonzero
            metas = None
        if any(leaf.numel() > MAX_NUMEL for leaf in _tensors(metas)):
            return metas
        result = func(*args, **kwargs)
        if operation in _EMPTY or any(_storage(tensor) in self._unknown for tensor in inputs):
            self._mark(_tensors(result), is_random=any(self._unknown.get(_storage(tensor)) for tensor in inputs))
        return result

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any], draws: bool) -> Any:
        arguments = enumerate(func._schema.arguments)
        places = [args[i] if i < len(args) else kwargs.get(each.name) for i, each in arguments if each.is_write]
        written = _tensors(*places)
        others = [tensor for tensor in tensors if all(tensor is not target for target in written)]
        if any(tensor.is_meta for tensor in tensors):
            self._mark(written, is_random=True)
            if all(tensor.is_meta for tensor in written):
                return _on_meta(func, args, kwargs)
            return places[0] if len(places) == 1 else tuple(places)
        result = func(*args, **kwargs, **({"generator": self._generator} if draws else {}))
        unknown = [self._unknown[key] for tensor in others if (key := _storage(tensor)) in self._unknown]
        if draws or unknown:
            self._mark(written, is_random=draws or any(unknown))
        elif func.overloadpacket in _OVERWRITES:
            for tensor in written:
                # Memory that was allocated is filled part by part. Random numbers must all be overwritten.
                key, nbytes = _storage(tensor), tensor.numel() * tensor.itemsize
                if not self._unknown.get(key) or nbytes == tensor.untyped_storage().nbytes():
                    self._unknown.pop(key, None)
        return result

    def _mark(self, tensors: Iterable[torch.Tensor], *, is_random: bool) -> None:
        for tensor in tensors:
            if not tensor.is_meta:
                self._unknown[_storage(tensor)] = is_random


def _tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation, and in lists of them."""
    found = [value for value in values if isinstance(value, torch.Tensor)]
    lists = [value for value in values if isinstance(value, list | tuple)]
    return found + _tensors(*itertools.chain(*lists)) if lists else found


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


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=META)
    if type(parameter) is nn.Parameter:
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:  # as transformers 4 does it
        keywords: dict[str, Any] = {**vars(parameter), "requires_grad": parameter.requires_grad}
        made = type(parameter)(data, **keywords)
    vars(made).update(vars(parameter))
    return made


def _is_computed_in_forward(module: nn.Module, attribute: str) -> bool:
    # Source: torch 2.13 `nn/utils/weight_norm.py`, `nn/utils/spectral_norm.py`.
    return any(getattr(hook, "name", None) == attribute for hook in module._forward_pre_hooks.values())


def _reason(tensor: torch.Tensor) -> str:
    if tensor.numel() > MAX_NUMEL:
        return f"{tensor.numel()} elements, of which at most {MAX_NUMEL} are computed"
    return "made of random numbers, or of memory that nothing was written to"


# -- tensors that are plain attributes ---------------------------------------------------------------------------------


def hand_over_attributes(loaded: nn.Module, modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Give modules, by their names in a loaded model, its tensor attributes where their own are on meta."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    for module, name, full_name in _attributes(loaded):
        own = modules.get(full_name.rpartition(".")[0])
        if own is not None and any(tensor.is_meta for tensor in _tensors_in(vars(own).get(name))):
            setattr(own, name, _replaced_in(vars(module)[name], move))
    lost = [
        f"{prefix}.{name}"
        for prefix, module in modules.items()
        for name in _own_attributes(module)
        if not _is_computed_in_forward(module, name)
        if any(tensor.is_meta for tensor in _tensors_in(vars(module)[name]))
    ]
    if lost:
        raise UnsupportedError(
            f"{type(loaded).__name__}: has no value for {listed(lost)}, tensor attributes of the model on the meta "
            "device; build the model from the configuration of the checkpoint, or set them before the load"
        )


def _attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield the attributes that are tensors, or lists, tuples or dicts of them: the module, the attribute, its name."""
    for prefix, module in model.named_modules():
        for name in _own_attributes(module):
            yield module, name, f"{prefix}.{name}" if prefix else name


def _own_attributes(module: nn.Module) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if name not in _OWN_STATE and next(_tensors_in(value), None) is not None
    ]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def _replaced_in(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an attribute with each of its tensors replaced. Lists and dicts stay the same objects."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, dict):
        value.update({key: _replaced_in(part, replace) for key, part in value.items()})
    elif isinstance(value, list):
        value[:] = [_replaced_in(part, replace) for part in value]
    elif isinstance(value, tuple):
        parts = [_replaced_in(part, replace) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
