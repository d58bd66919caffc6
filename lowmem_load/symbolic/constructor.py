"""Building a model: no memory for its parameters, real values for all that its constructor computes.

Inside `Constructor.building` the tensors that an ordinary load makes on meta are real, so `item()`, numpy and the like
work. A parameter loses its memory when it is registered; the object stays the same, so it is also what lists of the
constructor's own have. Random numbers and tensors of more than `MAX_NUMEL` elements are on meta, and so is all that is
computed from them. For other memory see [Note: known elements]. So `is_known` says what the constructor has computed,
and in the end `check` says which buffers and tensor attributes have no value.

What an ordinary load makes in memory (a tensor on a device that is named, `torch.Tensor(3)`) is made as ever: random
numbers for it are drawn, so that those after it are the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowmem_load.errors import UnsupportedError, listed
from lowmem_load.files.format import CheckpointFile, CheckpointFormat
from lowmem_load.files.memory import map_memory
from lowmem_load.files.remote_file import NUM_THREADS, Check, map_in_threads
from lowmem_load.files.source import ByteSource
from lowmem_load.phases import no_callback
from lowmem_load.planning.expression import Computed
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.attributes import is_computed_in_forward, replaced_in, tensor_attributes, tensors_in
from lowmem_load.symbolic.initialise import CPU, UNINITIALISED, Initialiser, ReadNow
from lowmem_load.symbolic.tensor import FACTORIES, SymbolicTensor, make_uninitialised, written_arguments
from lowmem_load.text import fingerprint

aten = torch.ops.aten

MAX_NUMEL = 1 << 24
"""Elements of the largest value that is computed: rotary tables of 128 Ki positions and 128 dims, in 64 MiB of fp32."""

META = torch.device("meta")
_DEFAULT = torch.device("meta", 1)
"""The default device of an ordinary load, told apart from a meta device that the model's code names."""

_EMPTY = {aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty, aten.new_empty_strided}
"""Operations that return memory without values."""

_ZERO = {aten.zeros, aten.zeros_like, aten.new_zeros}

APART_BYTES = 1 << 20
"""From this size on, memory without values and zeros do not come from the heap: no page of them is made before it is
written, and all go back to the system with the tensor. In the heap, small objects would settle in what parameters leave
behind: of DeepSeek-V3, whose 58 routers begin as zeros, 400 MiB."""

_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
"""Functions that make tensors of data, which they would lose on meta."""

_FILLS = {aten.copy_, aten.fill_, aten.zero_}
"""Operations that give all elements values that do not depend on those before."""


class Constructor:
    """What the constructors of one model have made: which values are known, its buffers and its tensor attributes.

    A buffer of random numbers that an ordinary load does not draw has no right value. None are drawn for it, and the
    random state stays as it is. Only what writes in place gets numbers, from a generator of this object.
    """

    def __init__(self) -> None:
        self._memory = _Memory()
        self._depth = 0
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.frozen: set[str] = set()  # names of parameters
        self._parameters: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}  # by id: those in attributes, and a place
        self.values: dict[str, str] = {}  # digests by name, for other ranks

    @property
    def is_building(self) -> bool:
        """Whether a constructor runs."""
        return self._depth > 0

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the constructor has computed the value of a tensor."""
        return tensor.numel() == 0 or not (tensor.is_meta or self._memory.has_unknown([tensor]))

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, constructors of this thread make values, and parameters without memory."""
        thread = threading.get_ident()

        def move(_: nn.Module, __: str, parameter: Any) -> None:
            if threading.get_ident() != thread or parameter is None or parameter.is_meta or _is_special(parameter):
                return
            if self._memory.is_on_meta(parameter):
                shape, stride, dtype = parameter.shape, parameter.stride(), parameter.dtype
                empty = torch.empty_strided(shape, stride, dtype=dtype, device=META)
                # `swap_tensors`, which would also refuse what autograd refers to. Without its memory it is of no use.
                torch._C._swap_tensor_impl(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))

        registering = register_module_parameter_registration_hook(move)
        self._depth += 1
        try:
            with _DefaultDevice(self._memory), _Values(self._memory):
                yield
        finally:
            self._depth -= 1
            registering.remove()

    def note(self, model: nn.Module) -> None:
        """Note a model's buffers, frozen parameters, and those that attributes have, before anything is loaded."""
        self.frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if not isinstance(buffer, SymbolicTensor)
        ]
        in_attributes = {id(tensor) for *_, tensors in tensor_attributes(model) for tensor in tensors}
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
        for module, attribute, full_name, tensors in tensor_attributes(model):
            for tensor in tensors:
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

    def note_values(self, model: nn.Module) -> None:
        """Note digests of the values that a built model has of the constructor: buffers and tensor attributes."""

        def is_computed(tensor: torch.Tensor) -> bool:
            return not _is_special(tensor) and id(tensor) not in self._parameters and self.is_known(tensor)

        named = {name: [buffer] for name, buffer in model.named_buffers()}
        named |= {name: tensors for _, _, name, tensors in tensor_attributes(model)}
        self.values = {
            name: fingerprint(_digest(tensor) for tensor in tensors if is_computed(tensor))
            for name, tensors in named.items()
        }

    def note_parameters(self, model: nn.Module) -> None:
        """Note digests of parameters that are in memory: each rank keeps a part of its own."""
        named = model.named_parameters()
        self.values |= {name: _digest(own) for name, own in named if not _is_special(own) and self.is_known(own)}

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

        for module, name, *_ in list(tensor_attributes(model)):
            setattr(module, name, replaced_in(vars(module)[name], replace))


class _Memory:
    """Notes on the memory of tensors: whether an ordinary load has it, and which of its elements have values.

    [Note: known elements] Memory that was allocated or drawn into has a mask, which says which elements were given
    known values since. Memory without a mask is known.

        table = torch.empty(3)        # mask 0 0 0
        table[0] = 5                  # mask 1 0 0
        table[1:] = torch.ones(2)     # mask 1 1 1: as good as none
        table[2] = torch.rand(1)      # mask 1 1 0
        twice = table * 2             # mask 0 0 0: what is computed from unknown elements is unknown as a whole
    """

    def __init__(self) -> None:
        self._instead_of_meta: set[StorageWeakRef] = set()  # real, where an ordinary load has no memory
        self._masks: dict[StorageWeakRef, torch.Tensor | None] = {}  # of bytes; None: nothing is known

    def note_instead_of_meta(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note real tensors that an ordinary load has on meta."""
        self._instead_of_meta.update(_storage(part) for part in _strided(tensors))

    def is_on_meta(self, tensor: torch.Tensor) -> bool:
        """Return whether an ordinary load has a tensor on meta."""
        return tensor.is_meta or any(_storage(part) in self._instead_of_meta for part in _strided([tensor]))

    def note(self, tensors: Iterable[torch.Tensor], *, known: bool) -> None:
        """Note that known or unknown values were written to all elements of tensors."""
        for part in _strided(tensors):
            key = _storage(part)
            is_whole = part.numel() * part.itemsize == part.untyped_storage().nbytes()
            if known and is_whole:
                self._masks.pop(key, None)
            elif is_whole:
                self._masks[key] = None
            elif not known or key in self._masks:
                self._mask_of(part).fill_(known)

    def has_unknown(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether elements of real tensors are unknown."""
        masked = [part for part in _strided(tensors) if _storage(part) in self._masks]
        return any(self._masks[_storage(part)] is None or not self._mask_of(part).all() for part in masked)

    def _mask_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the mask for a tensor: its shape, with a last dim for the bytes of an element."""
        key, nbytes, size = _storage(tensor), tensor.untyped_storage().nbytes(), tensor.itemsize
        mask = self._masks[key] if key in self._masks else torch.ones(nbytes, dtype=torch.bool, device=CPU)
        if mask is None or mask.numel() != nbytes:  # an operation may enlarge its out=
            mask = torch.zeros(nbytes, dtype=torch.bool, device=CPU)
        self._masks[key] = mask
        strides = (*(stride * size for stride in tensor.stride()), 1)
        return mask.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)


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
            self._memory.note_instead_of_meta([made])
        return made


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the operations of a constructor on real tensors, and notes which memory does not have values."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._generator = memory, torch.Generator()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, tensors, draws)
        returns = func._schema.returns
        if any(map(_is_special, tensors)) or (returns and returns[0].alias_info is not None):  # views share memory
            return func(*args, **kwargs)
        uses_shape_only, device = func.overloadpacket in FACTORIES, kwargs.get("device")
        inputs = [] if uses_shape_only and device is not None else tensors
        is_on_meta = any(map(self._memory.is_on_meta, inputs)) or device == _DEFAULT
        if is_on_meta:
            if draws or any(tensor.is_meta for tensor in inputs):
                return _on_meta(func, args, kwargs)
            metas = _shapes(func, args, kwargs)
            if device == META or any(tensor.numel() > MAX_NUMEL for tensor in tensors_in(metas)):
                return metas
            kwargs = {**kwargs, "device": CPU} if device == _DEFAULT else kwargs
        is_apart = is_on_meta and func.overloadpacket in _EMPTY | _ZERO and metas.nbytes >= APART_BYTES
        if is_apart:
            flat = map_memory(metas.untyped_storage().nbytes())
            result = flat.view(metas.dtype).as_strided(metas.shape, metas.stride())
        else:
            result = func(*args, **kwargs)
        made = list(tensors_in(result))
        if is_on_meta:
            self._memory.note_instead_of_meta(made)
        if func.overloadpacket in _EMPTY or (not uses_shape_only and self._memory.has_unknown(inputs)):
            self._memory.note(made, known=False)
        return result

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any], draws: bool) -> Any:
        if any(map(_is_special, tensors)):
            return func(*args, **kwargs)
        places = written_arguments(func, args, kwargs)
        written = list(tensors_in(places))
        others = [tensor for tensor in tensors if all(tensor is not target for target in written)]
        if any(tensor.is_meta for tensor in tensors):
            self._memory.note(written, known=False)
            if not all(tensor.is_meta for tensor in written) or draws:  # there is nothing to write or to draw
                return places[0] if len(places) == 1 else tuple(places)
            return _on_meta(func, args, kwargs)
        draws_apart = draws and any(map(self._memory.is_on_meta, written))
        result = func(*args, **kwargs, **({"generator": self._generator} if draws_apart else {}))
        is_out = any(argument.is_write and argument.kwarg_only for argument in func._schema.arguments)
        if draws_apart or self._memory.has_unknown(others) or func.overloadpacket in (aten.resize_, aten.resize_as_):
            self._memory.note(written, known=False)
        elif draws or is_out or func.overloadpacket in _FILLS:
            self._memory.note(written, known=True)
        elif torch.Tag.pointwise not in func.tags and self._memory.has_unknown(written):
            self._memory.note(written, known=False)  # it may spread what is unknown
        return result


def _strided(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield those tensors that have memory; of sparse ones, their values."""
    for tensor in tensors:
        is_compressed = tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
        part = tensor._values() if tensor.is_sparse else tensor.values() if is_compressed else tensor
        if not part.is_meta and part.layout is torch.strided:
            yield part


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    # While there is a weak reference, no other memory gets the same one.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_special(tensor: torch.Tensor) -> bool:
    """Return whether a tensor runs operations by itself or has no memory yet: it is symbolic or lazy."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not is_plain or nn.parameter.is_lazy(tensor)


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if next(tensors_in((args, kwargs)), None) is not None:  # many operations have none
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


def _digest(tensor: torch.Tensor) -> str:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = dense.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return f"{tuple(tensor.shape)} {tensor.dtype} {sha256(flat.view(torch.uint8).numpy().data).hexdigest()}"


def _reason(tensor: torch.Tensor) -> str:
    if tensor.numel() > MAX_NUMEL:
        return f"{tensor.numel()} elements, of which at most {MAX_NUMEL} are computed"
    return "made of random numbers, or of memory that was not written in full"


# -- what describing a model needs -------------------------------------------------------------------------------------

Keeps = Callable[[torch.Tensor], FlatRange]
"""Returns the elements of a parameter that this rank will be asked for."""


@dataclass(slots=True)
class Context:
    """What describing one model needs.

    Attributes:
        read_now: reads an expression for code that needs its value at once.
        initialiser: writes into the parameters that are not in the files.
        keeps_of: called with the model once it has its parameters; returns what this rank keeps of each.
        check_built: called with the model as soon as it is built; raises for one that cannot be described.
        opened: returns the open file of the checkpoint at a path, which stays open.
        check: called while files are described; raises if that is to end.
        constructor: the values that the model's constructor computes.
        is_partitioned: whether the load is one of ZeRO-3, or of shards.
        weights: take the place of those in the files.
        compares_values: whether other ranks describe the model, too, and must get equal values of the constructor.
        is_quiet: whether a loader of others says errors alone: its report of a load is the same on all ranks.
    """

    read_now: ReadNow
    initialiser: Initialiser
    keeps_of: Callable[[nn.Module], Keeps]
    check_built: Callable[[nn.Module], None]
    opened: Callable[[str], ByteSource]
    check: Check = no_callback
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    constructor: Constructor = field(default_factory=Constructor)
    is_partitioned: bool = True
    weights: Mapping[str, torch.Tensor] | None = None
    is_quiet: bool = False
    compares_values: bool = False
    _failed: dict[str, Exception] = field(default_factory=dict, init=False)  # by path, until `file` raises it

    def note_values(self, model: nn.Module) -> None:
        """Note what ranks compare of a model that a library has built, and not the caller."""
        if self.compares_values:
            self.constructor.note_values(model)

    def read_ahead(self, formats: Mapping[str, CheckpointFormat]) -> None:
        """Describe files, by their paths, at the same time: on slow storage each header takes some round trips.

        `file` raises what fails. So the first of several errors is that of the first file on all ranks.
        """
        paths, found = [path for path in formats if path not in self.files], dict[str, CheckpointFile]()

        def describe(number: int) -> None:
            for path in paths[number::NUM_THREADS]:  # a future for each would take as long as a header in the cache
                try:
                    found[path] = formats[path].describe(self.opened(path))
                except Exception as error:  # noqa: BLE001
                    self._failed[path] = error

        if len(paths) > 1:  # a thread maps 72 MiB
            map_in_threads(describe, range(min(NUM_THREADS, len(paths))), self.check)
        self.files |= {path: found[path] for path in paths if path in found}

    def file(self, path: str, checkpoint_format: CheckpointFormat) -> CheckpointFile:
        """Return the description of a file, which is read once."""
        if (error := self._failed.pop(path, None)) is not None:  # a store would be waited for again
            raise error
        if path not in self.files:
            self.files[path] = checkpoint_format.describe(self.opened(path))
        return self.files[path]
