"""Safetensors files (0.8.0): validates untrusted headers and describes their tensors.

A file has 8 bytes of little-endian header length, the header as JSON, then the data, which tensors cover exactly.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lowmem_load.errors import HeaderError, TruncatedFileError, UnsupportedError
from lowmem_load.files.format import CheckpointFile, refuse_git_lfs_pointer
from lowmem_load.files.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Source

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

CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

PACKED = {"F4": 2}
"""Elements along the last dimension that torch packs into one element of its dtype."""


class Entry(NamedTuple):
    """One tensor as the header describes it: the bytes of the file that are its data, and its name, dtype and shape."""

    start: int
    end: int
    name: str
    code: str
    shape: tuple[int, ...]


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
            f"{file_name}: the header needs {PREFIX_NBYTES + nbytes} bytes, but the file has {file_nbytes}; "
            "download it again"
        )
    return int(nbytes)


def parse_header(header: bytes, file_name: str, file_nbytes: int) -> tuple[dict[str, Entry], dict[str, str] | None]:
    """Return the tensors and the metadata of the JSON `header` of a file of `file_nbytes` bytes, both validated.

    The tensors are in the order of their data.
    """
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
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # which experts share: else 130 bytes for each tensor
    entries = sorted(_entry(name, fields, data_start, file_name, shapes) for name, fields in tensors.items())
    _check_tiling(entries, data_start, file_name, file_nbytes)
    return {entry.name: entry for entry in entries}, metadata


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the JSON. If two names are equal, safetensors and Python silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"{reprlib.repr(max(counts, key=counts.__getitem__))} comes twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE


def _entry(
    name: str, fields: Any, data_start: int, file_name: str, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> Entry:
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
    what = f"{where} of shape {tuple(shape)} and dtype {code}"
    if nbits % 8:
        raise HeaderError(f"{what} has {nbits} bits, which is not a whole number of bytes")
    start, end = offsets
    if end - start != nbits // 8:
        raise HeaderError(f"{what} needs {nbits // 8} bytes, but its data_offsets {offsets} have {end - start}")
    sizes = tuple(shape)
    return Entry(data_start + start, data_start + end, name, code, shapes.setdefault(sizes, sizes))


def _check_tiling(entries: Sequence[Entry], data_start: int, file_name: str, file_nbytes: int) -> None:
    end = data_start
    for entry in entries:  # empty tensors come before others of the same start
        if entry.start != end:
            raise HeaderError(
                f"{file_name}: tensor {entry.name!r} starts at byte {entry.start}, but the one before it ends at "
                f"{end}; safetensors allows neither holes nor overlaps"
            )
        end = entry.end
    if file_nbytes < end:
        raise TruncatedFileError(
            f"{file_name}: the header promises {end} bytes, but the file has {file_nbytes}; download it again"
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
        entries, metadata = parse_header(raw, path, source.nbytes)
        digest = hashlib.sha256(raw).hexdigest()[:16]
        expression = functools.cache(lambda name: _source(path, entries[name]))
        return CheckpointFile(path, source.nbytes, digest, version, tuple(entries), metadata, expression)


def _source(path: str, entry: Entry) -> Source:
    """Return a tensor as safetensors' own loader gives it. UnsupportedError: torch lacks its dtype or shape."""
    where, code, shape = f"{path}: tensor {entry.name!r}", entry.code, entry.shape
    if math.prod(max(1, size) for size in shape) > MAX_TORCH_SIZE:
        raise UnsupportedError(f"{where}: its shape {shape} is too large for torch")
    if code not in DTYPES:
        raise UnsupportedError(f"{where}: torch {torch.__version__} has no dtype for its {code}")
    if code in PACKED:
        *rows, last = shape
        if last % PACKED[code]:
            raise UnsupportedError(
                f"{where}: its shape {shape} is odd in the last dimension, along which torch packs {PACKED[code]} "
                f"elements of {code} into one"
            )
        shape = (*rows, last // PACKED[code])
    return Source(path, entry.name, entry.start, shape, DTYPES[code])
