"""Reads the pickle of a torch file without running it: describes tensors, names other objects.

The pickle is untrusted, so no unpickler sees it. `_Machine` executes the opcodes that torch.save writes, and keeps each
global as its name, so its stack holds nothing that can be called. torch's weights-only unpickler refuses DeepSpeed's
objects, has no limits, and gives the place of a storage only since torch 2.7.
"""

from __future__ import annotations

import io
import pickletools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.expression import Shape

MAX_OPCODES = 1 << 22  # a tensor needs about 25; each may create an object of some 64 bytes
MIN_NBYTES_PER_OBJECT, FREE_OBJECTS = 6, 4096
"""Bound on objects by the bytes of the pickle, so that memory stays below 30 times these bytes. A tensor has about ten
containers and ten memo entries of at least nine bytes each, and takes up to 14 times the bytes of its pickle."""

MAX_DIMS = 64  # the limit of numpy: many tensors may share one long tuple

STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}
"""Dtypes of the storage types. Tensors of newer dtypes (float8, uint16, ...) have an UntypedStorage and name them."""

_NEWER = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("uint16", "uint32", "uint64"),
)
DTYPES: Mapping[str, torch.dtype] = {
    **{str(dtype): dtype for dtype in STORAGE_DTYPES.values()},
    **{f"torch.{name}": getattr(torch, name) for name in _NEWER if hasattr(torch, name)},
}


@dataclass(frozen=True, slots=True)
class Global:
    """The dotted name of a function or class; never the thing itself."""

    name: str


@dataclass(eq=False, slots=True)
class Foreign:
    """An object of another class, which is not created: the function that the pickle calls, arguments and state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Storage:
    """The entry `data/<key>` holds `numel` elements of `dtype`."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a storage. Offset and strides are in elements of `dtype`; `attributes` are those set by users."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: Shape
    strides: Shape
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)


class OrderedNames(dict[Any, Any]):
    """Stands for `collections.OrderedDict`, which takes more memory."""


def state_dict(pickled: bytes, path: str) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict by name."""
    tensors = objects(pickled, path, only_tensors=True)
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: holds a {type(tensors).__name__}, expected a dict of tensors by name")
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: entry {reprlib.repr(name)} is a {type(value).__name__}, expected a tensor under "
                "a string; save the model's state_dict() alone"
            )
    return tensors


def objects(pickled: bytes, path: str, *, only_tensors: bool = False) -> Any:
    """Return a pickled tree of dicts, lists, tuples, numbers, text, dtypes, `Tensor`s and `Foreign`s."""
    try:
        return _Machine(pickled, path, only_tensors).run()
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{path}: its pickle is malformed: {error}") from error


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def is_key(value: object) -> bool:
    """Return whether a dict may have this key. Any number of larger integers can share one hash."""
    return isinstance(value, str) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or len(value) > MAX_DIMS or not all(_is_size(size) for size in value):
        raise TypeError(f"sizes or strides are not a tuple of at most {MAX_DIMS} sizes")
    return value


def _tensor(
    dtype: Any, storage: Any, offset: Any, size: Any, strides: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Any:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or not _is_size(offset):
        raise TypeError("a tensor without storage, dtype or offset")
    if metadata:
        raise ValueError("a tensor is saved as lazily conjugated or negated; call resolve_conj().resolve_neg() on it")
    if len(_shape(size)) != len(_shape(strides)):
        raise ValueError(f"a tensor has {len(size)} sizes and {len(strides)} strides")
    return _parameter(Tensor(storage, dtype, offset, size, strides), grad, hooks)


def _parameter(tensor: Any, grad: Any, _hooks: Any) -> Any:
    if not isinstance(grad, bool):
        raise TypeError("a tensor whose requires_grad is neither true nor false")
    return tensor


_CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda: OrderedNames(),  # noqa: PLW0108  (which takes arguments)
    "torch.Size": _shape,
    "torch.device": lambda _kind, _index=None: None,  # the device of the saved tensor does not matter
    "torch._utils._rebuild_tensor_v2": lambda *arguments: _tensor(arguments[0].dtype, *arguments),
    "torch._utils._rebuild_tensor_v3": lambda *arguments: _tensor(arguments[6], *arguments[:6], *arguments[7:]),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, grad, hooks, _state: _parameter(tensor, grad, hooks),
}
"""Functions that describe tensors. None takes many arguments: a short pickle can pass one long tuple many times."""


def _call(arguments: Any, function: Any) -> Any:
    if not isinstance(function, Global) or function.name in STORAGE_DTYPES or not isinstance(arguments, tuple):
        raise TypeError(f"a {type(function).__name__} is called with a {type(arguments).__name__}")
    if function.name in _CALLS:
        return _CALLS[function.name](*arguments)
    if function.name != "torch._tensor._rebuild_from_type_v2":
        return Foreign(function.name, arguments)
    rebuild, _, arguments, state = arguments  # a tensor with attributes set by users
    made = _CALLS[rebuild.name](*arguments)
    return replace(made, attributes=state) if isinstance(made, Tensor) and isinstance(state, dict) else made


def _storage(kind: Any, storage: Any, key: Any, _device: Any, numel: Any) -> Storage:
    if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str) or not _is_size(numel):
        raise TypeError("a persistent id that is not a storage")
    return Storage(key, STORAGE_DTYPES[storage.name], numel)


def _change(target: Any, opcode: str, items: list[Any]) -> None:
    """Give an object its state or items. The items of a `Foreign` list or dict are dropped."""
    match opcode, target:
        case "BUILD", Foreign():
            (target.state,) = items
        case ("BUILD", OrderedNames()) | (_, Foreign()):  # a state dict's state is the versions of its modules
            pass
        case (("APPEND" | "APPENDS"), list()):
            target.extend(items)
        case (("SETITEM" | "SETITEMS"), dict()) if all(map(is_key, items[::2])):
            target.update(zip(items[::2], items[1::2], strict=True))
        case _:
            raise TypeError(f"{opcode} changes a {type(target).__name__}, or sets a key that is neither text nor int")


_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_MAKES = {"EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL", "REDUCE", "NEWOBJ"}


class _Machine:
    def __init__(self, pickled: bytes, path: str, only_tensors: bool) -> None:
        self._source, self._path, self._only_tensors = io.BytesIO(pickled), path, only_tensors
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        num_objects = 0
        for _ in range(MAX_OPCODES):
            position = self._source.tell()
            opcode = _OPCODES.get(self._source.read(1))
            if opcode is None:
                raise ValueError(f"no opcode at byte {position}")
            if opcode.name == "STOP":
                (result,) = self._stack
                return result
            num_objects += opcode.name in _MAKES
            if max(num_objects, len(self._memo)) > FREE_OBJECTS + position // MIN_NBYTES_PER_OBJECT:
                raise CheckpointError(
                    f"{self._path}: its pickle makes too many objects for tensors up to byte {position}"
                )
            self._execute(opcode)
        raise CheckpointError(f"{self._path}: its pickle has more than {MAX_OPCODES} opcodes")

    def _execute(self, opcode: pickletools.OpcodeInfo) -> None:
        stack = self._stack
        match name := opcode.name:
            case "PROTO":
                self._argument(opcode)
            case "NONE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(self._argument(opcode))
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append(() if name == "EMPTY_TUPLE" else [] if name == "EMPTY_LIST" else {})
            case "MARK":
                self._below.append(stack)
                self._stack = []
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = self._pop_marked() if name == "TUPLE" else self._pop(int(name[-1]))
                self._stack.append(tuple(items))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[self._argument(opcode)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[self._argument(opcode)])
            case "GLOBAL":
                stack.append(self._global())
            case "REDUCE" | "NEWOBJ" if name == "REDUCE" or not self._only_tensors:
                stack.append(_call(stack.pop(), stack.pop()))
            case "BINPERSID":
                stack.append(_storage(*stack.pop()))
            case "BUILD" | "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS":
                items = self._pop_marked() if name[-1] == "S" else self._pop(2 if name == "SETITEM" else 1)
                _change(self._stack[-1], name, items)
            case _:
                raise CheckpointError(f"{self._path}: its pickle uses {name}, which no state dict needs")

    def _argument(self, opcode: pickletools.OpcodeInfo) -> Any:
        return opcode.arg.reader(self._source) if opcode.arg else None

    def _pop(self, count: int) -> list[Any]:
        return [self._stack.pop() for _ in range(count)][::-1]

    def _pop_marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _global(self) -> Any:
        module, name = self._source.readline(), self._source.readline()
        if not name.endswith(b"\n"):
            raise ValueError("a global without an end")
        full = f"{module[:-1].decode()}.{name[:-1].decode()}"
        if full in DTYPES:
            return DTYPES[full]
        if self._only_tensors and full not in STORAGE_DTYPES and full not in _CALLS:
            raise CheckpointError(
                f"{self._path}: its pickle names {full:.200}, which describes no tensor; nothing was run. If you trust "
                "its maker, save the tensors alone: torch.save(model.state_dict(), path), or better as safetensors"
            )
        return Global(full)
