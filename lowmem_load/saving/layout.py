"""What lies where in the files of a save: headers and offsets. Pure.

A file is laid out as safetensors itself does it (0.8.0, `safetensors/src/tensor.rs`, `prepare`): tensors with the
widest dtypes first, those of one dtype by name, so that all are aligned; the header is padded with spaces to 8 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from lowmem_load.errors import UnsupportedError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.formats.safetensors import BITS, DTYPES, PACKED
from lowmem_load.planning.expression import Shape

_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items() if code not in PACKED}
_ORDER = {code: number for number, code in enumerate(BITS)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One safetensors file.

    Attributes:
        name: its path in the folder, with "/".
        header: its first bytes.
        nbytes: of all of it.
        starts: first byte of the data of each tensor, absolute in the file, by name; in the order in which they lie.
        others: what else is no data of a tensor, by its first byte.
    """

    name: str
    header: bytes
    nbytes: int
    starts: Mapping[str, int]
    others: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of tensors."""
        return self.nbytes - len(self.header) - sum(map(len, self.others.values()))


def lay_out(name: str, tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a file that holds these tensors.

    Raises:
        UnsupportedError: safetensors has no such dtype.
    """
    for key, (dtype, _) in tensors.items():
        if dtype not in _CODES:
            raise UnsupportedError(f"{name}: {key} is of {dtype}, which a safetensors file cannot hold")
    ordered = sorted(tensors, key=lambda key: (-_width(tensors[key][0]), -_rank(tensors[key][0]), key.encode()))
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for key in ordered:
        dtype, shape = tensors[key]
        offsets[key], end = end, end + math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offsets[key], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return FileLayout(name, header, len(header) + end, {key: len(header) + start for key, start in offsets.items()})


def digest_of(files: Iterable[FileLayout]) -> str:
    """Return a fingerprint of names, sizes and headers: of all that decides what lies where."""
    return fingerprint(f"{file.name} {file.nbytes} {file.header!r} {sorted(file.others.items())}" for file in files)


def _width(dtype: torch.dtype) -> int:
    return BITS[_CODES[dtype]]


def _rank(dtype: torch.dtype) -> int:
    return _ORDER[_CODES[dtype]]
