"""Reads the pickle of a torch file without running any of it: what comes out are descriptions of tensors.

[Note: inert unpickling] The pickle is untrusted. It is not given to Python's unpickler: `_Machine` knows the opcodes
that torch writes, keeps globals as names, and knows by name the few functions that describe tensors. There is nothing
on its stack that could be called, so a name that is not in its table can only be reported.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.expression import Shape

MAX_OPCODES = 1 << 22
"""About 25 are needed for a tensor; each may make an object of some 64 bytes."""

MAX_DIMS = 64
"""Dims of a tensor, the limit of numpy; a pickle may name one long tuple many times at no cost to itself."""

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
"""The legacy storage types. Newer dtypes (float8, uint16, ...) have an UntypedStorage and are named beside it."""

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in (
        *STORAGE_DTYPES.values(),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.uint16, torch.uint32, torch.uint64),
    )
}


@dataclass(frozen=True, slots=True)
class _Global:
    """The dotted name of a function or class; never the thing itself. See [Note: inert unpickling]."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A persistent id: the entry `data/<key>` holds `numel` elements of `dtype`."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a storage; offset and strides are in elements of `dtype`."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: Shape
    strides: Shape


def state_dict(pickled: bytes, path: str) -> dict[str, Tensor]:
    """Return the tensors by name that `pickled` describes."""
    try:
        found = _Machine(path).run(pickled)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: its pickle is malformed: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a dict of tensors by name")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: entry {name!r} is a {type(value).__name__.lstrip('_')}, expected a tensor under a string; "
                "save the model's state_dict() alone"
            )
    return found


class _Machine:
    """Executes the opcodes of one pickle. See [Note: inert unpickling]."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        """Return the object that `pickled` describes."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if count > MAX_OPCODES:
                raise CheckpointError(f"{self._path}: its pickle has more than {MAX_OPCODES} opcodes")
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name in _LITERALS:
                self._stack.append(argument)
            elif opcode.name in _OPERATIONS:
                _OPERATIONS[opcode.name](self, argument)
            elif opcode.name not in _NO_OPERATIONS:
                raise CheckpointError(f"{self._path}: its pickle uses {opcode.name}, which no state dict needs")
        (found,) = self._stack
        return found

    def mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def pop_last(self, count: int) -> list[Any]:
        if count >= len(self._stack):
            raise IndexError("stack underflow")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def tuple_marked(self) -> None:
        items = self.pop_mark()
        self._stack.append(tuple(items))

    def tuple_of(self, size: int) -> None:
        if size > len(self._stack):
            raise IndexError("stack underflow")
        self._stack[-size:] = [tuple(self._stack[-size:])]

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in items[::2]):
            raise TypeError("items are set on something else than a dict with plain keys")
        target.update(zip(items[::2], items[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError("items are added to something else than a list")
        self._stack[-1].extend(items)

    def put(self, position: int) -> None:
        self._memo[position] = self._stack[-1]

    def get(self, position: int) -> None:
        self._stack.append(self._memo[position])

    def find(self, module: str, name: str) -> None:
        """Push what a global stands for: a dtype, or a name that `call` or `persistent` knows."""
        full = f"{module}.{name}"
        if full in DTYPES:
            self._stack.append(DTYPES[full])
        elif full in STORAGE_DTYPES or full in _CALLS:
            self._stack.append(_Global(full))
        else:
            raise CheckpointError(
                f"{self._path}: its pickle names {full}, which describes no tensor; nothing was run. If you trust its "
                "maker, save the tensors alone: torch.save(model.state_dict(), path), or better as safetensors"
            )

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Global) or function.name not in _CALLS or not isinstance(arguments, tuple):
            raise TypeError(f"a {type(function).__name__} is called")
        self._stack.append(_CALLS[function.name](*arguments))

    def build(self) -> None:
        """Drop the attributes of an OrderedDict: `_metadata`, which holds the versions of modules."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise TypeError("attributes are set on something else than an OrderedDict")

    def persistent(self) -> None:
        kind, storage, key, _, numel = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or not isinstance(key, str) or not _is_size(numel):
            raise TypeError("a persistent id that is not a storage")
        self._stack.append(Storage(key, STORAGE_DTYPES[storage.name], numel))


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_NO_OPERATIONS = {"PROTO", "STOP"}
_OPERATIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.tuple_marked(),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop_last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "APPEND": lambda machine, _: machine.add_items(machine.pop_last(1)),
    "APPENDS": lambda machine, _: machine.add_items(machine.pop_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": lambda machine, name: machine.find(*name.split(" ", 1)),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.persistent(),
}
"""By opcode name (`pickletools`): pickle protocol 2, which torch.save uses, as torch.load(weights_only=True) has it."""


# -- what the pickle may call ----------------------------------------------------------------------------------------


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _shape(value: object) -> Shape:
    if not isinstance(value, tuple) or len(value) > MAX_DIMS or not all(_is_size(size) for size in value):
        raise TypeError(f"sizes or strides are not a tuple of at most {MAX_DIMS} sizes")
    return value


def _ordered_dict() -> dict[str, Any]:
    """Stand in for `collections.OrderedDict`."""
    return {}


def _tensor(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> Tensor:
    """Stand in for `torch._utils._rebuild_tensor_v2`; the rest: requires_grad, hooks and perhaps metadata."""
    return _tensor_of_dtype(storage, offset, size, strides, *rest[:2], getattr(storage, "dtype", None), *rest[2:])


def _tensor_of_dtype(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> Tensor:
    """Stand in for `torch._utils._rebuild_tensor_v3`; the rest: requires_grad, hooks, dtype and perhaps metadata."""
    _, _, dtype, *metadata = rest
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or not _is_size(offset):
        raise TypeError("a tensor without storage, dtype or offset")
    if any(metadata):
        raise ValueError("a tensor is saved as lazily conjugated or negated; call resolve_conj().resolve_neg() on it")
    if len(_shape(size)) != len(_shape(strides)):
        raise ValueError(f"a tensor has {len(size)} sizes and {len(strides)} strides")
    return Tensor(storage, dtype, offset, size, strides)


def _parameter(data: Any, *_: Any) -> Any:
    """Stand in for `torch._utils._rebuild_parameter` and `_rebuild_parameter_with_state`: only the tensor matters."""
    return data


def _device(*_: Any) -> None:
    """Stand in for `torch.device`: where a tensor was does not matter."""


_CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _shape,
    "torch.device": _device,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
