"""Safetensors files (0.8.0): validates untrusted headers and describes their tensors.

A file has 8 bytes of little-endian header length, the header as JSON, then the data, which tensors cover exactly.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import reprlib
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lowmem_load.errors import HeaderError, TruncatedFileError, UnsupportedError
from lowmem_load.files.format import CheckpointFile, refuse_git_lfs_pointer
from lowmem_load.files.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Source
from lowmem_load.text import key_of

PREFIX_NBYTES = 8
METADATA, FIELDS = "__metadata__", {"dtype", "shape", "data_offsets"}
MAX_HEADER_NBYTES = 100_000_000  # as in safetensors: a forged length must not allocate gigabytes
MAX_SIZE = (1 << 64) - 1  # of a dimension, an offset, and the elements and bits of a tensor, as in safetensors
MAX_TORCH_SIZE = (1 << 63) - 1  # of strides, where an empty dimension counts as 1

_DTYPES: Mapping[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
"""Dtypes of safetensors 0.8.0, in the order of `Dtype` in `tensor.rs`: bits of an element, name in torch if any."""

BITS: Mapping[str, int] = {code: bits for code, (bits, _) in _DTYPES.items()}
DTYPES: Mapping[str, torch.dtype] = {code: getattr(torch, name) for code, (_, name) in _DTYPES.items() if name}
"""The dtypes that torch has too."""

PACKED = {"F4": 2}
"""Elements along the last dimension that torch packs into one element of its dtype."""


class TensorEntry(NamedTuple):
    """One tensor of a file, as the file spells it. torch may be unable to hold it; only using it is an error then.

    `start` is the first byte of the data, absolute in the file.
    """

    file_name: str
    name: str
    dtype_code: str
    file_shape: tuple[int, ...]
    start: int

    @property
    def where(self) -> str:
        """Its name in messages."""
        return f"{self.file_name}: tensor {self.name!r}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        if self.dtype_code not in DTYPES:
            raise UnsupportedError(f"{self.where}: torch {torch.__version__} has no dtype for its {self.dtype_code}")
        return DTYPES[self.dtype_code]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements of `dtype`, as in safetensors' own loader."""
        if math.prod(max(1, size) for size in self.file_shape) > MAX_TORCH_SIZE:
            raise UnsupportedError(f"{self.where}: its shape {self.file_shape} is beyond what torch can hold")
        packed = PACKED.get(self.dtype_code, 1)
        if packed == 1:
            return self.file_shape
        *rows, last = self.file_shape
        if last % packed:
            raise UnsupportedError(
                f"{self.where}: its shape {self.file_shape} is odd in the last dimension, along which torch packs "
                f"{packed} elements of {self.dtype_code} into one"
            )
        return (*rows, last // packed)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.file_shape) * BITS[self.dtype_code] // 8


class Header(NamedTuple):
    """A validated header."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] | None


def header_nbytes(prefix: bytes, file_name: str, file_nbytes: int) -> int:
    """Return the bytes of the JSON header that follows the 8 bytes of `prefix`."""
    if len(prefix) < PREFIX_NBYTES:
        raise TruncatedFileError(f"{file_name}: {file_nbytes} bytes are too few for a safetensors file")
    (nbytes,) = struct.unpack("<Q", prefix)
    if nbytes > MAX_HEADER_NBYTES:
        raise HeaderError(
            f"{file_name}: header length {nbytes} exceeds {MAX_HEADER_NBYTES} bytes; not a safetensors file?"
        )
    if PREFIX_NBYTES + nbytes > file_nbytes:
        raise TruncatedFileError(
            f"{file_name}: the header needs {PREFIX_NBYTES + nbytes} bytes, the file has {file_nbytes}; "
            "download it again"
        )
    return int(nbytes)


def parse_header(header: bytes, file_name: str, file_nbytes: int) -> Header:
    """Parse and validate the JSON `header` of a file of `file_nbytes` bytes."""
    data_start = PREFIX_NBYTES + len(header)
    try:
        tensors = json.loads(header.decode("utf-8"), object_pairs_hook=_without_twins, parse_constant=_refuse)
        if not isinstance(tensors, dict):
            raise TypeError(f"expected an object {{...}}, got {reprlib.repr(tensors)}")
        metadata = tensors.pop(METADATA, None)
        texts = {} if metadata is None else metadata
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise TypeError(f"{METADATA} must map strings to strings")
        "".join((*tensors, *texts, *texts.values())).encode()  # fails for half a surrogate, which no name may have
    except (ValueError, TypeError, RecursionError) as error:
        raise HeaderError(f"{file_name}: header is not valid JSON of tensors: {error}") from error
    entries = {name: _entry(name, fields, data_start, file_name) for name, fields in tensors.items()}
    _check_tiling(entries, data_start, file_name, file_nbytes)
    return Header(entries, metadata)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the JSON. Of two equal names safetensors and Python take the last, without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"{reprlib.repr(max(counts, key=counts.__getitem__))} comes twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE


def _entry(name: str, fields: Any, data_start: int, file_name: str) -> TensorEntry:
    where = f"{file_name}: tensor {name!r}"
    if not isinstance(fields, dict) or not fields.keys() >= FIELDS:
        raise HeaderError(f"{where} lacks dtype, shape or data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in BITS:
        raise HeaderError(f"{where} has unknown dtype {reprlib.repr(code)}; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise HeaderError(f"{where} has shape {reprlib.repr(shape)}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise HeaderError(f"{where} has data_offsets {reprlib.repr(offsets)}, expected [start, end)")
    numel = 1
    for size in shape:
        numel *= size
        if numel > MAX_SIZE:  # even if a size of 0 follows, as in safetensors
            break
    nbits = numel * BITS[code]
    if nbits > MAX_SIZE:
        raise HeaderError(f"{where} has shape {reprlib.repr(shape)}, too large to be counted")
    if nbits % 8:
        raise HeaderError(
            f"{where} of shape {tuple(shape)} and dtype {code} has {nbits} bits, no whole number of bytes"
        )
    if offsets[1] - offsets[0] != nbits // 8:
        raise HeaderError(
            f"{where} of shape {tuple(shape)} and dtype {code} needs {nbits // 8} bytes, "
            f"its data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return TensorEntry(file_name, name, code, tuple(shape), data_start + offsets[0])


def _check_tiling(entries: Mapping[str, TensorEntry], data_start: int, file_name: str, file_nbytes: int) -> None:
    end = data_start
    # Two sorts, since one by pairs needs twice the memory. Empty tensors come before others of the same start.
    in_file = sorted(entries.values(), key=lambda entry: entry.nbytes)
    in_file.sort(key=lambda entry: entry.start)
    for entry in in_file:
        if entry.start != end:
            raise HeaderError(
                f"{entry.where} starts at byte {entry.start}, the one before it ends at {end}; "
                "safetensors allows neither holes nor overlaps"
            )
        end += entry.nbytes
    if file_nbytes < end:
        raise TruncatedFileError(
            f"{file_name}: the header promises {end} bytes, the file has {file_nbytes}; download it again"
        )
    if file_nbytes > end:
        raise HeaderError(f"{file_name}: {file_nbytes - end} bytes follow the last tensor; the file is corrupt")


class Safetensors:
    """The format of `.safetensors` files."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        """See `CheckpointFormat`."""
        path, version = source.path, source.version
        refuse_git_lfs_pointer(source)
        prefix = read_bytes(source, 0, PREFIX_NBYTES)
        raw = read_bytes(source, PREFIX_NBYTES, header_nbytes(prefix, path, source.nbytes))
        header = parse_header(raw, path, source.nbytes)
        digest = hashlib.sha256(raw).hexdigest()[:16]
        expression = _expressions(path, header.tensors)
        return CheckpointFile(path, source.nbytes, digest, version, tuple(header.tensors), header.metadata, expression)


def _expressions(path: str, entries: Mapping[str, TensorEntry]) -> Callable[[str], Source]:
    """Return a function from names to sources. It shares equal shapes: there may be a hundred thousand tensors."""
    shapes: dict[bytes, tuple[int, ...]] = {}
    sources: dict[str, Source | str] = {}
    for name, entry in entries.items():
        try:
            shape = entry.shape
            sources[name] = Source(path, name, entry.start, shapes.setdefault(key_of(shape), shape), entry.dtype)
        except UnsupportedError as error:  # only a model that uses this tensor fails
            sources[name] = str(error)

    def expression(name: str) -> Source:
        source = sources[name]
        if isinstance(source, str):
            raise UnsupportedError(source)
        return source

    return expression


CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
