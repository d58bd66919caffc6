"""Reads the pickle of a torch file without running any of it: what comes out are descriptions of tensors.

[Note: inert unpickling] The pickle is untrusted. It is not given to Python's unpickler: `_Machine` knows the opcodes
that torch writes, keeps globals as names, and knows by name the few functions that describe tensors. There is nothing
on its stack that could be called, so a name that is not in its table can only be reported (`state_dict`), or described
in its turn (`inert_objects.py`).
"""

from __future__ import annotations

import pickletools
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.pickled_tensor import (
    CALLS,
    DTYPES,
    STORAGE_DTYPES,
    Global,
    OrderedNames,
    Storage,
    Tensor,
    is_key,
    is_size,
)

MAX_OPCODES = 1 << 22
"""About 25 are needed for a tensor; each may make an object of some 64 bytes."""

MIN_NBYTES_PER_OBJECT, FREE_OBJECTS = 6, 4096
"""A tensor makes some ten containers, and puts as many things into the memo, in no less than nine bytes each. More of
either only cost memory: tensors need up to 14 times the bytes of their pickle, and with this nothing takes 30 times."""


class Dialect:
    """What a pickle may hold besides descriptions of tensors: nothing, unless a subclass says so."""

    opcodes: frozenset[str] = frozenset()
    """Of `_OPERATIONS`, those that no state dict needs."""

    def unknown(self, name: str, path: str) -> Any:
        """Return what stands for a global that describes no tensor."""
        raise CheckpointError(
            f"{path}: its pickle names {name:.200}, which describes no tensor; nothing was run. If you trust "
            "its maker, save the tensors alone: torch.save(model.state_dict(), path), or better as safetensors"
        )

    def result(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what stands for the result of a call."""
        if not isinstance(function, Global) or function.name not in CALLS:
            raise TypeError(f"a {type(function).__name__} is called")
        return CALLS[function.name](*arguments)

    def set_attributes(self, owner: Any, attributes: Any) -> None:  # noqa: ARG002
        """Drop the attributes of an OrderedDict: `_metadata`, which holds the versions of modules."""
        if not isinstance(owner, OrderedNames):
            raise TypeError("attributes are set on something else than an OrderedDict")

    def drops_items(self, owner: Any) -> bool:  # noqa: ARG002
        """Return whether what is put into `owner`, which is no container, does not matter."""
        return False


def described(pickled: bytes, path: str, dialect: Dialect) -> Any:
    """Return what a pickle describes.

    Raises:
        CheckpointError: it is malformed, or holds what the dialect does not know.
    """
    try:
        return _Machine(path, dialect).run(pickled)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: its pickle is malformed: {error}") from error


def state_dict(pickled: bytes, path: str) -> dict[str, Tensor]:
    """Return the tensors by name that `pickled` describes."""
    found = described(pickled, path, Dialect())
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a dict of tensors by name")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__.lstrip("_")
            raise CheckpointError(
                f"{path}: entry {reprlib.repr(name)} is a {kind}, expected a tensor under a string; save the model's "
                "state_dict() alone"
            )
    return found


class _Machine:
    """Executes the opcodes of one pickle. See [Note: inert unpickling]."""

    def __init__(self, path: str, dialect: Dialect) -> None:
        self._path, self._dialect = path, dialect
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        """Return the object that `pickled` describes."""
        num_objects = 0
        for count, (name, argument, position) in enumerate(_opcodes(pickled, self._path, self._dialect.opcodes)):
            if count > MAX_OPCODES:
                raise CheckpointError(f"{self._path}: its pickle has more than {MAX_OPCODES} opcodes")
            num_objects += name in _MAKES
            if max(num_objects, len(self._memo)) > FREE_OBJECTS + position // MIN_NBYTES_PER_OBJECT:
                raise CheckpointError(
                    f"{self._path}: its pickle makes too many objects for tensors up to byte {position}"
                )
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _LITERALS:
                self._stack.append(argument)
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
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
        if self._dialect.drops_items(target):
            return
        if not isinstance(target, dict) or not all(map(is_key, items[::2])):
            raise TypeError("items are set on something else than a dict with plain keys")
        target.update(zip(items[::2], items[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if self._dialect.drops_items(target):
            return
        if not isinstance(target, list):
            raise TypeError("items are added to something else than a list")
        target.extend(items)

    def put(self, position: int) -> None:
        self._memo[position] = self._stack[-1]

    def get(self, position: int) -> None:
        self._stack.append(self._memo[position])

    def find(self, module: str, name: str) -> None:
        """Push what a global stands for: a dtype, or a name that `call` or `persistent` knows."""
        full = f"{module}.{name}"
        if full in DTYPES:
            self._stack.append(DTYPES[full])
        elif full in STORAGE_DTYPES or full in CALLS:
            self._stack.append(Global(full))
        else:
            self._stack.append(self._dialect.unknown(full, self._path))

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError("something is called without a tuple of arguments")
        self._stack.append(self._dialect.result(function, arguments))

    def build(self) -> None:
        attributes = self._stack.pop()
        self._dialect.set_attributes(self._stack[-1], attributes)

    def persistent(self) -> None:
        kind, storage, key, _, numel = self._stack.pop()
        if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str) or not is_size(numel):
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
_MAKES = {"EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ"}
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
    "GLOBAL": lambda machine, names: machine.find(*names),
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.persistent(),
}
"""By opcode name (`pickletools`): pickle protocol 2, which torch.save uses, as torch.load(weights_only=True) has it."""


_KNOWN = {*_CONSTANTS, *_LITERALS, *_NO_OPERATIONS, *_OPERATIONS} - {"NEWOBJ"}
_BY_CODE = {opcode.code: opcode for opcode in pickletools.opcodes}


class _Bytes:
    """Bytes as `pickletools` reads the arguments of opcodes from them."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def read(self, nbytes: int) -> bytes:
        found = self._data[self.position : self.position + nbytes]
        self.position += len(found)
        return found

    def readline(self) -> bytes:
        end = self._data.find(b"\n", self.position) + 1
        return self.read((end or len(self._data)) - self.position)


def _opcodes(pickled: bytes, path: str, also: frozenset[str]) -> Iterator[tuple[str, Any, int]]:
    """Yield name, argument and position of each opcode.

    `pickletools.genops` would decode the arguments also of opcodes that are refused, some with a warning.
    """
    source: Any = _Bytes(pickled)  # not all of a file, but what the readers of pickletools use
    name = ""
    while name != "STOP":
        position = source.position
        opcode = _BY_CODE.get(source.read(1).decode("latin-1"))
        if opcode is None:
            raise ValueError(f"no opcode at byte {position} of {len(pickled)}")
        name = opcode.name
        if name not in _KNOWN and name not in also:
            raise CheckpointError(f"{path}: its pickle uses {name}, which no state dict needs")
        if name == "GLOBAL":  # whose reader undoes escapes, with a warning about odd ones, as no unpickler does
            yield name, _names(source), position
        else:
            yield name, opcode.arg.reader(source) if opcode.arg else None, position


def _names(source: _Bytes) -> tuple[str, str]:
    """Return the module and the name of a global, each on a line."""
    module, name = source.readline(), source.readline()
    if not name.endswith(b"\n"):
        raise ValueError("a global without an end")
    return module[:-1].decode("utf-8"), name[:-1].decode("utf-8")
