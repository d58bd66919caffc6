"""Safetensors files: untrusted headers in, validated tensor descriptions out.

Layout of a file (safetensors 0.8.0, `safetensors/src/tensor.rs`): 8 bytes little-endian header length, the header as
a JSON object, then the data. The data offsets of the tensors must tile the data exactly: no hole, no overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_load.errors import HeaderError, TruncatedFileError, UnsupportedError
from lowmem_load.formats.format import CheckpointFile, refuse_git_lfs_pointer
from lowmem_load.planning.expression import Source
from lowmem_load.read.source import ByteSource, read_bytes

PREFIX_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
"""Bytes. The limit of safetensors itself (`MAX_HEADER_SIZE`): a forged length must not allocate gigabytes."""

MAX_SIZE, MAX_DIMS = 1 << 60, 64
"""Of a shape: what torch can hold, with room to multiply."""

MIN_NBYTES_PER_BRACKET = 12
"""A tensor has an object and two lists in no less than 48 bytes. More brackets than that only cost memory to parse."""

BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of an element by dtype as the file spells it: all dtypes of safetensors 0.8.0 (`Dtype` in `tensor.rs`)."""

_TORCH_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}

DTYPES: Mapping[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _TORCH_NAMES.items() if hasattr(torch, name)
}
"""Those that the installed torch has, too."""

PACKED = {"F4": 2}
"""How many elements, along the last dimension, are one element of the dtype that torch has for them."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one shard file. A file may hold tensors that torch cannot: only to use them is an error.

    Attributes:
        where: how messages call it.
        dtype_code: the dtype as the file spells it, such as "BF16".
        file_shape: sizes in elements as the file counts them; () for a scalar.
        start: first byte of the data, absolute in the file.
    """

    where: str
    dtype_code: str
    file_shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype as torch names it.

        Raises:
            UnsupportedError: the installed torch has no such dtype.
        """
        if self.dtype_code not in DTYPES:
            raise UnsupportedError(f"{self.where}: torch {torch.__version__} has no dtype for its {self.dtype_code}")
        return DTYPES[self.dtype_code]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements of `dtype`, as safetensors' own loader gives them.

        Raises:
            UnsupportedError: torch packs elements of this dtype, and they do not come out even.
        """
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
    def nbits(self) -> int:
        """Bits of the data."""
        return math.prod(self.file_shape) * BITS[self.dtype_code]

    @property
    def nbytes(self) -> int:
        """Bytes of the data; a header in which they are not whole is refused."""
        return self.nbits // 8


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: tensors by name, and the free-form string metadata (None when the file has none)."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] | None


def header_nbytes(prefix: bytes, file_name: str, file_nbytes: int) -> int:
    """Return the byte length of the JSON header that follows the 8 bytes of `prefix`.

    Raises:
        HeaderError: the length is absurd.
        TruncatedFileError: the file ends inside the header.
    """
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
    """Parse and validate the JSON `header` of a file of `file_nbytes` bytes.

    Raises:
        HeaderError: malformed JSON, duplicate or ill-formed entries, or offsets that do not tile the data.
        TruncatedFileError: the file is shorter than the tensors need.
    """
    if header.count(b"{") + header.count(b"[") > 16 + len(header) // MIN_NBYTES_PER_BRACKET:
        raise HeaderError(f"{file_name}: header is not one of tensors: too many brackets for its {len(header)} bytes")
    try:
        decoded = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # also of an integer with thousands of digits
        raise HeaderError(f"{file_name}: header is not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise HeaderError(f"{file_name}: header is a JSON {type(decoded).__name__}, expected an object")
    metadata = _metadata(decoded.pop("__metadata__", None), file_name)
    data_start = PREFIX_NBYTES + len(header)
    entries = {name: _entry(name, fields, data_start, file_name) for name, fields in decoded.items()}
    _check_tiling(entries, data_start, file_name, file_nbytes)
    return Header(entries, metadata)


class _DuplicateKey(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise _DuplicateKey(f"duplicate key {name!r}")
        unique[name] = value
    return unique


def _metadata(metadata: Any, file_name: str) -> Mapping[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{file_name}: __metadata__ must map strings to strings")
    return metadata


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE


def _entry(name: str, fields: Any, data_start: int, file_name: str) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise HeaderError(f"{file_name}: tensor {name!r} lacks dtype, shape or data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in BITS:
        raise HeaderError(f"{file_name}: tensor {name!r} has unknown dtype {code!r}; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(size) for size in shape):
        raise HeaderError(f"{file_name}: tensor {name!r} has shape {shape!r}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise HeaderError(f"{file_name}: tensor {name!r} has data_offsets {offsets!r}, expected [start, end)")
    entry = TensorEntry(f"{file_name}: tensor {name!r}", code, tuple(shape), data_start + offsets[0])
    if entry.nbits % 8:
        raise HeaderError(
            f"{entry.where} of shape {tuple(shape)} and dtype {code} has {entry.nbits} bits, no whole number of bytes"
        )
    if offsets[1] - offsets[0] != entry.nbytes:
        raise HeaderError(
            f"{file_name}: tensor {name!r} of shape {tuple(shape)} and dtype {code} needs {entry.nbytes} bytes, "
            f"its data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return entry


def _check_tiling(entries: Mapping[str, TensorEntry], data_start: int, file_name: str, file_nbytes: int) -> None:
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise HeaderError(
                f"{file_name}: tensor {name!r} starts at byte {entry.start}, the one before it ends at {end}; "
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
        """See `CheckpointFormat`.

        Raises:
            CheckpointError: the file is a git-lfs pointer.
            HeaderError: the header is malformed.
            TruncatedFileError: the file is shorter than its header promises.
        """
        path, version = source.path, source.version
        refuse_git_lfs_pointer(source)
        prefix = read_bytes(source, 0, PREFIX_NBYTES)
        raw = read_bytes(source, PREFIX_NBYTES, header_nbytes(prefix, path, source.nbytes))
        header = parse_header(raw, path, source.nbytes)

        def expression(name: str) -> Source:
            entry = header.tensors[name]
            return Source(path, name, entry.start, entry.shape, entry.dtype)

        digest = hashlib.sha256(raw).hexdigest()[:16]
        return CheckpointFile(path, source.nbytes, digest, version, tuple(header.tensors), header.metadata, expression)


def code_of(dtype: torch.dtype) -> str:
    """Return the name that safetensors has for a dtype of torch, such as "BF16"."""
    return next(code for code, known in DTYPES.items() if known == dtype)
