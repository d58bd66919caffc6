"""Opens legacy torch files (`pytorch_model*.bin`): tensors become byte ranges of the file, and no pickle code is run.

Layout (torch 2.13 `torch/serialization.py`, `_save`): a zip of stored, never compressed entries. `<prefix>/data.pkl`
is a pickle of the state dict in which each storage is a persistent id, and `<prefix>/data/<key>` holds its bytes.

[Note: inert unpickling] The pickle is untrusted. It is not given to Python's unpickler: `_Machine` knows the opcodes
that torch writes, keeps globals as names, and knows by name the few functions that describe tensors. There is nothing
on its stack that could be called, so a name that is not in its table can only be reported.
"""

from __future__ import annotations

import functools
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .errors import CheckpointError, TruncatedFileError
from .expression import Computed, Expression, Shape, Source, permute

MAX_OPCODES = 1 << 22
"""About 25 are needed for a tensor; each may make an object of some 64 bytes."""

MAX_PICKLE_NBYTES = 32 << 20
"""Bytes of `data.pkl`. A tensor takes about 200, so this is 150 000 tensors in one file; more would cost gigabytes."""

MAX_DIRECTORY_NBYTES = 32 << 20
"""Bytes of the zip directory, for the same reason: about 75 for each storage."""

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

_CONVERT = (
    "convert it once: state = torch.load(path, weights_only=True), then "
    'safetensors.torch.save_file(state, "model.safetensors", metadata={"format": "pt"}), '
    "or load the model without lowmem_load and call its save_pretrained(new_folder)"
)

_FOREIGN: Sequence[tuple[int, bytes, str]] = (
    (0, b"\x80", f"is in the old torch format (before torch 1.6, not a zip), which cannot be streamed; {_CONVERT}"),
    (257, b"ustar", f"is in the oldest torch format (a tar), which cannot be streamed; {_CONVERT}"),
    (0, b"version https://git-lfs", "is a git-lfs pointer and not the weights; run `git lfs pull` in its folder"),
)
"""Offset, bytes found there, and what such a file is."""


def read_torch_zip(path: str) -> dict[str, Expression]:
    """Return what each tensor of the torch file at `path` is made of. Reads the directory and `data.pkl`, no weights.

    Equal views of one storage, such as tied weights, are the same expression object.

    Raises:
        CheckpointError: the file cannot be read, is not such a zip, or holds anything but tensors.
        TruncatedFileError: the file ends early.
    """
    try:
        with open(path, "rb") as file:
            entries = _read_directory(file, path)
            prefix = _prefix(entries, path)
            byte_order = _read_entry(file, entries.get(f"{prefix}/byteorder"), path, 16)
            if byte_order not in (b"", b"little"):
                raise CheckpointError(
                    f"{path}: byte order {byte_order!r}, expected little; save it again on x86 or ARM"
                )
            pickled = _read_entry(file, entries[f"{prefix}/data.pkl"], path, MAX_PICKLE_NBYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    expressions: dict[_Tensor, Expression] = {}
    named: dict[str, Expression] = {}
    for name, tensor in _state_dict(pickled, path).items():
        if tensor not in expressions:
            entry = entries.get(f"{prefix}/data/{tensor.storage.key}")
            expressions[tensor] = _expression(tensor, entry, path, name)
        named[name] = expressions[tensor]
    return named


# -- the zip ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where an entry's data lies: first byte, absolute in the file, and bytes."""

    start: int
    nbytes: int


def _read_directory(file: BinaryIO, path: str) -> dict[str, _Entry]:
    """Return the entries by name: stored, inside the file and apart from each other."""
    directory_start = _directory_start(file, path)
    try:
        infos = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise CheckpointError(f"{path}: its zip directory is malformed: {error}") from error
    entries: dict[str, _Entry] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = info.orig_filename
        if name in entries:
            raise CheckpointError(f"{path}: two zip entries are named {name!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise CheckpointError(
                f"{path}: zip entry {name!r} is compressed or encrypted, torch stores it plainly; {_CONVERT}"
            )
        if info.header_offset < end:
            raise CheckpointError(f"{path}: zip entry {name!r} overlaps the one before it, which ends at byte {end}")
        entries[name] = _Entry(_data_start(file, info, path), info.file_size)
        end = entries[name].start + info.file_size
        if end > directory_start:
            raise CheckpointError(f"{path}: zip entry {name!r} ends at byte {end}, the data at {directory_start}")
    return entries


def _directory_start(file: BinaryIO, path: str) -> int:
    """Return where the zip directory begins. Checked before it is parsed, as a forged one could be huge."""
    file_nbytes = os.fstat(file.fileno()).st_size
    head = os.pread(file.fileno(), 512, 0)
    if not head.startswith(b"PK\x03\x04"):
        what = next((what for at, magic, what in _FOREIGN if head[at : at + len(magic)] == magic), None)
        raise CheckpointError(f"{path}: {what or 'is not a torch file: it does not begin as a zip does'}")
    last_nbytes, directory_nbytes, start = 22, 0, -1
    last = os.pread(file.fileno(), 98, max(0, file_nbytes - 98))
    if len(last) == 98 and last[-22:-18] == b"PK\x05\x06":
        directory_nbytes, start = struct.unpack_from("<2L", last, 98 - 10)
        if last[-42:-38] == b"PK\x06\x07" and last[:4] == b"PK\x06\x06":  # zip64
            directory_nbytes, start = struct.unpack_from("<2Q", last, 40)
            last_nbytes = 98
    if start + directory_nbytes + last_nbytes != file_nbytes:
        raise TruncatedFileError(f"{path}: no zip directory at its end, byte {file_nbytes}; download it again")
    if directory_nbytes > MAX_DIRECTORY_NBYTES:
        raise CheckpointError(f"{path}: zip directory of {directory_nbytes} bytes, at most {MAX_DIRECTORY_NBYTES}")
    return int(start)


def _data_start(file: BinaryIO, info: zipfile.ZipInfo, path: str) -> int:
    """Return the first byte of an entry's data: its own header tells, as torch pads there to align the data."""
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    header = os.pread(file.fileno(), 30 + len(name), info.header_offset)
    if len(header) < 30 + len(name) or header[:4] != b"PK\x03\x04" or header[30:] != name:
        raise CheckpointError(f"{path}: no header of zip entry {info.orig_filename!r} at byte {info.header_offset}")
    method, *_, stored, size, name_nbytes, extra_nbytes = struct.unpack("<4x2xxxH2H3L2H", header[:30])
    follows = bool(info.flag_bits & 8)  # sizes may be left to a descriptor behind the data
    known = {info.file_size, 0xFFFFFFFF} | ({0} if follows else set())
    if method != zipfile.ZIP_STORED or name_nbytes != len(name) or not {stored, size} <= known:
        raise CheckpointError(f"{path}: header and directory disagree on zip entry {info.orig_filename!r}")
    return int(info.header_offset + 30 + name_nbytes + extra_nbytes)


def _prefix(entries: Mapping[str, _Entry], path: str) -> str:
    """Return the folder inside the zip that holds `data.pkl`."""
    prefixes = [name[: -len("/data.pkl")] for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(prefixes) != 1:
        raise CheckpointError(f"{path}: a zip with {len(prefixes)} data.pkl, expected one; not a torch checkpoint")
    if f"{prefixes[0]}/constants.pkl" in entries:
        raise CheckpointError(f"{path}: is a TorchScript program; save its state dict with torch.save instead")
    return prefixes[0]


def _read_entry(file: BinaryIO, entry: _Entry | None, path: str, max_nbytes: int) -> bytes:
    if entry is None:
        return b""
    if entry.nbytes > max_nbytes:
        raise CheckpointError(f"{path}: a zip entry for metadata has {entry.nbytes} bytes, at most {max_nbytes}")
    file.seek(entry.start)
    return file.read(entry.nbytes)


# -- the pickle ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Global:
    """The dotted name of a function or class; never the thing itself. See [Note: inert unpickling]."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """A persistent id: the entry `data/<key>` holds `numel` elements of `dtype`."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A view of a storage; offset and strides are in elements of `dtype`."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: Shape
    strides: Shape


def _state_dict(pickled: bytes, path: str) -> dict[str, _Tensor]:
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
        if not isinstance(name, str) or not isinstance(value, _Tensor):
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
        self._stack.append(_Storage(key, STORAGE_DTYPES[storage.name], numel))


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


def _tensor(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> _Tensor:
    """Stand in for `torch._utils._rebuild_tensor_v2`; the rest: requires_grad, hooks and perhaps metadata."""
    return _tensor_of_dtype(storage, offset, size, strides, *rest[:2], getattr(storage, "dtype", None), *rest[2:])


def _tensor_of_dtype(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> _Tensor:
    """Stand in for `torch._utils._rebuild_tensor_v3`; the rest: requires_grad, hooks, dtype and perhaps metadata."""
    _, _, dtype, *metadata = rest
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype) or not _is_size(offset):
        raise TypeError("a tensor without storage, dtype or offset")
    if any(metadata):
        raise ValueError("a tensor is saved as lazily conjugated or negated; call resolve_conj().resolve_neg() on it")
    if len(_shape(size)) != len(_shape(strides)):
        raise ValueError(f"a tensor has {len(size)} sizes and {len(strides)} strides")
    return _Tensor(storage, dtype, offset, size, strides)


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


# -- the tensors -----------------------------------------------------------------------------------------------------


def _expression(tensor: _Tensor, entry: _Entry | None, path: str, name: str) -> Expression:
    """Return what a view of the storage in `entry` is made of: the bytes that it spans, with its dims in place."""
    storage, size, itemsize = tensor.storage, tensor.size, tensor.dtype.itemsize
    storage_nbytes = storage.numel * storage.dtype.itemsize
    if entry is None or entry.nbytes != storage_nbytes:
        held = "is absent" if entry is None else f"has {entry.nbytes} bytes"
        raise CheckpointError(
            f"{path}: tensor {name!r} needs data/{storage.key} of {storage_nbytes} bytes, which {held}"
        )
    if math.prod(max(1, n) for n in size) * itemsize >= 1 << 63:
        raise CheckpointError(f"{path}: tensor {name!r} has the impossible shape {size}")
    span = 1 + sum((n - 1) * stride for n, stride in zip(size, tensor.strides, strict=True)) if 0 not in size else 0
    if (tensor.offset + span) * itemsize > storage_nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} ends at element {tensor.offset + span} of data/{storage.key}, "
            f"which has {storage_nbytes // itemsize}"
        )
    start = entry.start + tensor.offset * itemsize
    order = _dense_order(size, tensor.strides)
    if order is None:
        region = Source(path, name, start, (span,), tensor.dtype)
        return Computed("as_strided", functools.partial(_strided, tensor), (region,), size, tensor.dtype)
    stored = Source(path, name, start, tuple(size[dim] for dim in order), tensor.dtype)
    return permute(stored, sorted(range(len(size)), key=lambda place: order[place]))


def _strided(tensor: _Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    return values[0].as_strided(tensor.size, tensor.strides).contiguous()


def _dense_order(size: Shape, strides: Shape) -> list[int] | None:
    """Return the dims from outermost to innermost if the elements fill one run of memory, else None."""
    if 0 in size:
        return list(range(len(size)))
    wide = [dim for dim, n in enumerate(size) if n > 1]
    order = sorted(wide, key=lambda dim: strides[dim], reverse=True)
    stride = 1
    for dim in reversed(order):
        if strides[dim] != stride:
            return None
        stride *= size[dim]
    if order == wide:
        return list(range(len(size)))
    return [dim for dim in range(len(size)) if size[dim] == 1] + order
