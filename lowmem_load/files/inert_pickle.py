"""Reads the pickle of a torch file without running it: describes tensors and plain values, names other objects.

The pickle is untrusted. A first pass refuses opcodes outside of a list. `_Unpickler` is the standard library's, and
each opcode that could call something is replaced: globals are kept as their names, so its stack has nothing that can
be called. The faster one in C would hash a deeply nested tuple as the key of a dict, which overflows the stack of C.
torch's weights-only unpickler refuses DeepSpeed's objects, also under `FakeTensorMode`, which would give the places of
storages.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeGuard

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.expression import Shape

MIN_NBYTES_PER_OBJECT, FREE_OBJECTS = 6, 4096
"""Bound on containers and on memo entries by the bytes of the pickle, so that memory stays below 64 times these bytes.
A tensor has about ten containers and ten memo entries of at least nine bytes each."""

MAX_DIMS = 64  # the limit of numpy: many tensors may share one long tuple

MAX_NAME = 1000  # characters: a few bytes can make one of any two long texts, or have it digested, again and again

_MALFORMED = pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, struct.error

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
    *("float4_e2m1fn_x2", "uint16", "uint32", "uint64"),
)
DTYPES: Mapping[str, torch.dtype] = {
    **{str(dtype): dtype for dtype in STORAGE_DTYPES.values()},
    **{f"torch.{name}": getattr(torch, name) for name in _NEWER},
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

    def append(self, item: Any) -> None:
        """Drop an item: this may be a list."""

    def __setitem__(self, key: Any, item: Any) -> None:
        """Drop an item: this may be a dict."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The entry `data/<key>` has `numel` elements of `dtype`."""

    key: str
    dtype: torch.dtype
    numel: int


TENSOR, PARAMETER = "torch.Tensor", "torch.nn.parameter.Parameter"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a storage, in elements of `dtype`; `attributes` are those set by users, `kind` names its class."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: Shape
    strides: Shape
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    requires_grad: bool = field(default=False, compare=False, repr=False)
    kind: str = field(default=TENSOR, compare=False, repr=False)


class Items(dict[Any, Any]):
    """A dict of the pickle. Its keys are checked before they are hashed, which overflows the stack for some."""

    def __setitem__(self, key: Any, item: Any) -> None:
        """Set an item."""
        if not is_key(key):
            raise TypeError("a key is neither text nor int")
        super().__setitem__(key, item)


class OrderedNames(Items):
    """Stands for `collections.OrderedDict`, which takes more memory. A module's state dict has `attributes`."""

    attributes: Mapping[Any, Any] | None = None


def objects(
    pickled: bytes,
    path: str,
    *,
    only_tensors: bool = False,
    nbytes_per_object: int = MIN_NBYTES_PER_OBJECT,
    compact: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Any:
    """Return a pickled tree of dicts, lists, tuples, numbers, text, dtypes, `Tensor`s and `Foreign`s.

    `compact` gives a shorter state to the `Foreign`s of a name, of which there may be many. `nbytes_per_object` are the
    fewest bytes in which an honest pickle of this kind makes an object.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # genops: a name has a backslash
            _check_opcodes(pickled, path, nbytes_per_object)
        return _Unpickler(pickled, path, compact or {}, only_tensors=only_tensors).load()
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise CheckpointError(f"{path}: its pickle is malformed: {str(error) or 'it does not end'}") from error


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
    dtype: Any, storage: Any, offset: Any, size: Any, strides: Any, grad: Any, _hooks: Any, metadata: Any = None
) -> Tensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or not _is_size(offset):
        raise TypeError("a tensor without storage, dtype or offset")
    if metadata:
        raise ValueError("a tensor is saved as lazily conjugated or negated; call resolve_conj().resolve_neg() on it")
    if len(_shape(size)) != len(_shape(strides)):
        raise ValueError(f"a tensor has {len(size)} sizes and {len(strides)} strides")
    return Tensor(storage, dtype, offset, size, strides, requires_grad=_checked(grad))


def _checked(grad: Any) -> bool:
    if not isinstance(grad, bool):
        raise TypeError("a tensor whose requires_grad is neither true nor false")
    return grad


def _parameter(tensor: Any, grad: Any, state: Any) -> Any:
    grad = _checked(grad)
    return _of_kind(replace(tensor, requires_grad=grad), PARAMETER, state) if isinstance(tensor, Tensor) else tensor


def _of_kind(tensor: Tensor, kind: str, state: Any) -> Tensor:
    """Return a tensor of a class, with the attributes that its state sets."""
    if not isinstance(state, dict | None):
        return replace(tensor, kind=f"{kind} with slots")
    return replace(tensor, kind=kind, attributes=state or {})


_CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda: OrderedNames(),  # noqa: PLW0108  (which takes arguments)
    "torch.Size": _shape,
    "torch._utils._rebuild_tensor_v2": lambda *arguments: _tensor(arguments[0].dtype, *arguments),
    "torch._utils._rebuild_tensor_v3": lambda *arguments: _tensor(arguments[6], *arguments[:6], *arguments[7:]),
    "torch._utils._rebuild_parameter": lambda tensor, grad, _hooks: _parameter(tensor, grad, None),
    "torch._utils._rebuild_parameter_with_state": lambda tensor, grad, _hooks, state: _parameter(tensor, grad, state),
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
    rebuild, kind, arguments, state = arguments  # a tensor with attributes set by users, or a DTensor
    if rebuild.name == WRAPPER:
        return Foreign(WRAPPER, arguments, state)
    made = _CALLS[rebuild.name](*arguments)
    return _of_kind(made, kind.name, state) if isinstance(made, Tensor) else made


class _Unpickler(pickle._Unpickler):  # noqa: SLF001  (as torch.package does)
    stack: list[Any]
    append: Callable[[Any], None]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch}  # noqa: SLF001

    def __init__(
        self, pickled: bytes, path: str, compact: Mapping[str, Callable[[Any], Any]], *, only_tensors: bool
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._path, self._compact, self._only_tensors = path, compact, only_tensors

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or the name alone."""
        if len(module) + len(name) > MAX_NAME:
            raise ValueError(f"a global whose name has {len(module) + len(name)} characters")
        full = f"{module}.{name}"
        if full in DTYPES:
            return DTYPES[full]
        if self._only_tensors and full not in STORAGE_DTYPES and full not in _CALLS:
            raise CheckpointError(
                f"{self._path}: its pickle names {full:.200}, which does not describe a tensor; nothing was run. If "
                "you trust its maker, save its tensors alone: torch.save(model.state_dict(), path), or as safetensors"
            )
        return Global(full)

    def persistent_load(self, pid: Any) -> Storage:
        """Return a storage."""
        kind, storage, key, _device, numel = pid
        is_storage = kind == "storage" and isinstance(storage, Global) and isinstance(key, str) and len(key) <= MAX_NAME
        if not is_storage or not _is_size(numel):
            raise TypeError("a persistent id that is not a storage")
        return Storage(key, STORAGE_DTYPES[storage.name], numel)

    def load_dict(self) -> None:
        """Make a dict that checks its keys."""
        self.append(Items())

    def load_reduce(self) -> None:
        """Describe a call, or a new object of a class."""
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(_call(function, arguments))

    def load_build(self) -> None:
        """Give an object its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Foreign):
            target.state = self._compact[target.name](state) if target.name in self._compact else state
        elif isinstance(target, OrderedNames) and isinstance(state, dict):
            target.attributes = state
        else:
            raise TypeError(f"BUILD changes a {type(target).__name__}")

    dispatch[pickle.EMPTY_DICT[0]] = load_dict
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build


_MAKES = {
    *("EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ"),
    *("GLOBAL", "STACK_GLOBAL"),
}
_REMEMBERS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_ALLOWED = {
    *_MAKES,
    *_REMEMBERS,
    *("PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "BINPERSID", "BINGET", "LONG_BINGET"),
    *("BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
}
"""The opcodes that torch.save and DCP write."""


def _check_opcodes(pickled: bytes, path: str, nbytes_per_object: int) -> None:
    """Refuse other opcodes, and more objects than the bytes up to them may make, before anything is made."""
    num_made = num_remembered = 0
    for opcode, _, position in pickletools.genops(pickled):
        if opcode.name not in _ALLOWED:
            raise CheckpointError(
                f"{path}: its pickle is malformed: it uses {opcode.name}, which state dicts do not need"
            )
        num_made += opcode.name in _MAKES
        num_remembered += opcode.name in _REMEMBERS
        if max(num_made, num_remembered) > FREE_OBJECTS + (position or 0) // nbytes_per_object:
            raise CheckpointError(f"{path}: its pickle makes too many objects for tensors up to byte {position}")


def shown(value: Any) -> str:
    """Return a value of a tree for a message. A container is only named: spelling it out may never end."""
    if isinstance(value, str):
        return repr(value[:80])  # many places may share one long text
    return f"{value!r:.80}" if isinstance(value, int | float | None) else f"a {type(value).__name__}"
