"""What lies where in the files of a save: headers and offsets.

A safetensors file is laid out as safetensors itself does it (0.8.0, `safetensors/src/tensor.rs`, `prepare`): tensors of
the widest dtypes come first, those of one dtype by name, so that all are aligned. The header is padded with spaces to 8
bytes.

For a file of `torch.save`, torch writes one without data (`torch.serialization.skip_data`): a sparse file of a few KiB
on the disk. Everything in it that is not a tensor's data is taken over. That includes the zip's checksum of each
storage, which is wrong. torch does not check it, but other tools that unpack such a file do.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_load.errors import UnsupportedError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.formats.safetensors import BITS, DTYPES, PACKED
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.hf.saver import SavedFile
from lowmem_load.io.source import LocalFile, read_bytes
from lowmem_load.planning.expression import Expression, Shape, Source

_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items() if code not in PACKED}
_ORDER = {code: number for number, code in enumerate(BITS)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one file of weights.

    Attributes:
        name: its path in the folder, with "/". torch puts the stem into its files.
        header, others: all bytes that are not a tensor's data: the first ones, and the others by offset.
        nbytes: of the whole file.
        starts: first byte of each tensor's data, absolute in the file, by name.
    """

    name: str
    header: bytes
    nbytes: int
    starts: Mapping[str, int]
    others: Mapping[int, bytes] = field(default_factory=dict)


def lay_out_saved(file: SavedFile, scratch: Path) -> FileLayout:
    """Return the layout of a file of a save. `scratch` is a folder for temporary files."""
    if file.is_zip:
        return lay_out_zip(file.name, file.tensors, scratch)
    return lay_out(file.name, {key: (part.dtype, part.shape) for key, part in file.tensors.items()}, file.metadata)


def lay_out(name: str, tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file; raise UnsupportedError if it cannot hold the dtype of a tensor."""
    for key, (dtype, _) in tensors.items():
        if dtype not in _CODES:
            raise UnsupportedError(f"{name}: {key} is of {dtype}, which a safetensors file cannot hold")

    def place(key: str) -> tuple[int, int, bytes]:
        code = _CODES[tensors[key][0]]
        return -BITS[code], -_ORDER[code], key.encode()

    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=place):
        dtype, shape = tensors[key]
        offsets[key], end = end, end + math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offsets[key], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return FileLayout(name, header, len(header) + end, {key: len(header) + start for key, start in offsets.items()})


def lay_out_zip(name: str, tensors: Mapping[str, Expression], scratch: Path) -> FileLayout:
    """Return the layout of what `torch.save` writes of an `OrderedDict`. Two names of one expression are one tensor.

    Source: torch 2.6 to 2.13 `serialization.py`, `_save`.
    """
    path = scratch / Path(name).name
    made: dict[int, torch.Tensor] = {}
    with FakeTensorMode():
        for part in tensors.values():
            if id(part) not in made:
                made[id(part)] = torch.empty(part.shape, dtype=part.dtype, device="cpu")
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(OrderedDict((key, made[id(part)]) for key, part in tensors.items()), path)
    file = LocalFile(str(path))
    try:
        described = TorchZip().describe(file)
        starts: dict[str, int] = {}
        for key in tensors:
            found = described.expression(key)
            assert isinstance(found, Source)  # of a contiguous tensor
            starts[key] = found.start
        nbytes = {key: math.prod(part.shape) * part.dtype.itemsize for key, part in tensors.items()}
        ends = sorted({(starts[key], starts[key] + nbytes[key]) for key in tensors})
        others, at = {}, 0
        for start, end in [*ends, (file.nbytes, file.nbytes)]:
            if start > at:
                others[at] = read_bytes(file, at, start - at)
            at = end
        return FileLayout(name, others.pop(0), file.nbytes, starts, others)
    finally:
        file.close()
        path.unlink()


def digest_of(files: Iterable[FileLayout]) -> str:
    """Return a fingerprint of everything that decides what lies where: names, sizes, headers."""
    return fingerprint(f"{file.name} {file.nbytes} {file.header!r} {sorted(file.others.items())}" for file in files)
