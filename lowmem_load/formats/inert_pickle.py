"""Reads the pickle of a torch file without running it: describes tensors, names other objects.

The pickle is untrusted, so no unpickler sees it. `_Machine` executes the opcodes that torch.save writes, and keeps each
global as its name, so its stack holds nothing that can be called. torch's weights-only unpickler refuses DeepSpeed's
objects, has no limits, and gives the place of a storage only since torch 2.7.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.expression import Shape

MAX_OPCODES = 1 << 22
"""A tensor needs about 25; each may create an object of some 64 bytes."""

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


def objects(
    pickled: bytes,
    path: str,
    *,
    only_tensors: bool = False,
    max_opcodes: int | None = None,
    nbytes_per_object: int = MIN_NBYTES_PER_OBJECT,
    compact: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Any:
    """Return a pickled tree of dicts, lists, tuples, numbers, text, dtypes, `Tensor`s and `Foreign`s.

    `compact` gives a shorter state to the `Foreign`s of a name, of which there may be many. `nbytes_per_object` are the
    fewest bytes in which an honest pickle of this kind makes an object.
    """
    try:
        return _Machine(
            pickled,
            path,
            max_opcodes=max_opcodes or MAX_OPCODES,
            nbytes_per_object=nbytes_per_object,
            compact=compact or {},
            only_tensors=only_tensors,
        ).run()
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, struct.error) as error:
        raise CheckpointError(f"{path}: its pickle is malformed: {error}") from error


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def is_key(value: object) -> bool:
    """Return whether a dict may have this key. Any number of larger integers can share one hash."""
    return isinstance(value, str | Foreign) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def is_shape(value: object) -> TypeGuard[Shape]:
    """Return whether a value of a tree is a tuple of sizes."""
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(map(_is_size, value))


def _shape(value: Any) -> Shape:
    if not is_shape(value):
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


WRAPPER = "torch._utils._rebuild_wrapper_subclass"
"""Name of a `Foreign` that is a DTensor: class, dtype, shape, strides, ...; its state has the local tensor."""


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Global) or function.name in STORAGE_DTYPES or not isinstance(arguments, tuple):
        raise TypeError(f"a {type(function).__name__} is called with a {type(arguments).__name__}")
    if function.name in _CALLS:
        return _CALLS[function.name](*arguments)
    if function.name != "torch._tensor._rebuild_from_type_v2":
        return Foreign(function.name, arguments)
    rebuild, _, arguments, state = arguments  # a tensor with attributes set by users, or a DTensor
    if rebuild.name == WRAPPER:
        return Foreign(WRAPPER, arguments, state)
    made = _CALLS[rebuild.name](*arguments)
    return replace(made, attributes=state) if isinstance(made, Tensor) and isinstance(state, dict) else made


def _storage(kind: Any, storage: Any, key: Any, _device: Any, numel: Any) -> Storage:
    if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str) or not _is_size(numel):
        raise TypeError("a persistent id that is not a storage")
    return Storage(key, STORAGE_DTYPES[storage.name], numel)


@dataclass(slots=True)
class _Machine:
    pickled: bytes
    path: str
    max_opcodes: int
    nbytes_per_object: int
    compact: Mapping[str, Callable[[Any], Any]]
    only_tensors: bool
    at: int = 0  # byte of the next opcode
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)  # the stacks under each mark
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        num_objects, pickled, memo = 0, self.pickled, self.memo
        known = _OF_TENSORS if self.only_tensors else _EXECUTE
        for _ in range(self.max_opcodes):
            position = self.at
            opcode = pickled[position]
            self.at += 1
            execute = known.get(opcode)
            if execute is None:
                if opcode == _STOP:
                    (result,) = self.stack
                    return result
                if opcode not in _NAMES:
                    raise ValueError(f"no opcode at byte {position}")
                raise CheckpointError(f"{self.path}: its pickle uses {_NAMES[opcode]}, which no state dict needs")
            num_objects += opcode in _MAKES
            if max(num_objects, len(memo)) > FREE_OBJECTS + position // self.nbytes_per_object:
                raise CheckpointError(
                    f"{self.path}: its pickle makes too many objects for tensors up to byte {position}"
                )
            execute(self)
        raise CheckpointError(f"{self.path}: its pickle has more than {self.max_opcodes} opcodes")

    # -- opcodes that do not just push a value -------------------------------------------------------------------------

    def _proto(self) -> None:
        self.at += 1

    def _frame(self) -> None:
        self.at += 8

    def _mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binput(self) -> None:
        self.memo[self.number(1)] = self.stack[-1]

    def _long_binput(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("the name of a global is no text")
        self.stack.append(self.named(module, name))

    def _build(self) -> None:
        """Give an object its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Foreign):
            target.state = self.compact[target.name](state) if target.name in self.compact else state
        elif not isinstance(target, OrderedNames):  # a state dict's state is the versions of its modules
            raise TypeError(f"BUILD changes a {type(target).__name__}")

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_marked())

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self.pop_marked())

    # -- what several of them need -------------------------------------------------------------------------------------

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Foreign):  # the items of a foreign list are dropped
            raise TypeError(f"items are appended to a {type(target).__name__}")

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict) and all(map(is_key, items[::2])):
            target.update(zip(items[::2], items[1::2], strict=True))
        elif not isinstance(target, Foreign):  # the items of a foreign dict are dropped
            raise TypeError(f"items of a {type(target).__name__} are set, or a key is neither text nor int")

    def take(self, nbytes: int) -> bytes:
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.pickled):
            raise ValueError(f"it ends within an opcode, at byte {len(self.pickled)}")
        return self.pickled[start : self.at]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def text(self, nbytes_of_size: int) -> str:
        return self.take(self.number(nbytes_of_size)).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        end = self.pickled.index(b"\n", self.at)
        start, self.at = self.at, end + 1
        return self.pickled[start:end].decode()

    def pop(self, count: int) -> tuple[Any, ...]:
        items = [self.stack.pop() for _ in range(count)]
        return tuple(reversed(items))

    def pop_marked(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def named(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in DTYPES:
            return DTYPES[full]
        if self.only_tensors and full not in STORAGE_DTYPES and full not in _CALLS:
            raise CheckpointError(
                f"{self.path}: its pickle names {full:.200}, which describes no tensor; nothing was run. If you trust "
                "its maker, save the tensors alone: torch.save(model.state_dict(), path), or better as safetensors"
            )
        return Global(full)


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_STOP = ord(".")
_PUSHES: Mapping[str, Callable[[_Machine], Any]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "BININT": lambda machine: int.from_bytes(machine.take(4), "little", signed=True),
    "BININT1": lambda machine: machine.number(1),
    "BININT2": lambda machine: machine.number(2),
    "LONG1": lambda machine: int.from_bytes(machine.take(machine.number(1)), "little", signed=True),
    "BINFLOAT": lambda machine: struct.unpack(">d", machine.take(8))[0],
    "SHORT_BINUNICODE": lambda machine: machine.text(1),
    "BINUNICODE": lambda machine: machine.text(4),
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "TUPLE": lambda machine: tuple(machine.pop_marked()),
    "TUPLE1": lambda machine: machine.pop(1),
    "TUPLE2": lambda machine: machine.pop(2),
    "TUPLE3": lambda machine: machine.pop(3),
    "REDUCE": lambda machine: _call(*machine.pop(2)),
    "NEWOBJ": lambda machine: _call(*machine.pop(2)),
    "BINPERSID": lambda machine: _storage(*machine.stack.pop()),
    "BINGET": lambda machine: machine.memo[machine.number(1)],
    "LONG_BINGET": lambda machine: machine.memo[machine.number(4)],
    "GLOBAL": lambda machine: machine.named(machine.line(), machine.line()),
}
"""Opcodes that push one value."""


def _pushing(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def execute(machine: _Machine) -> None:
        pushed = value(machine)  # first: a tuple of marked items takes them off the stack
        machine.stack.append(pushed)

    return execute


_EXECUTE: Mapping[int, Callable[[_Machine], None]] = {
    **{code: _pushing(_PUSHES[name]) for code, name in _NAMES.items() if name in _PUSHES},
    **{
        code: getattr(_Machine, f"_{name.lower()}")
        for code, name in _NAMES.items()
        if hasattr(_Machine, f"_{name.lower()}")
    },
}
_OF_TENSORS = {
    code: execute
    for code, execute in _EXECUTE.items()
    if _NAMES[code] not in ("NEWOBJ", "FRAME", "MEMOIZE", "STACK_GLOBAL", "SHORT_BINUNICODE")
}
"""Without what only pickles of training have: torch's weights-only loader refuses them, too."""

_MAKES = {
    code
    for code, name in _NAMES.items()
    if name in ("EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ")
    or name.endswith("GLOBAL")
}
