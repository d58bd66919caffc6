"""Files of weights before they have any: header, length, and where each tensor lies.

A safetensors file is laid out as safetensors itself does it (0.8.0, `safetensors/src/tensor.rs`, `prepare`): tensors of
the widest dtypes come first, those of one dtype by name, so that all are aligned. The header is padded with spaces to 8
bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lowmem_load.errors import UnsupportedError
from lowmem_load.files.safetensors import BITS, CODES, METADATA, PACKED
from lowmem_load.models.saver import SavedFile
from lowmem_load.planning.expression import Expression, Held, leaves, numel
from lowmem_load.planning.nest import Copy, plan_copies
from lowmem_load.planning.regions import FlatRange
from lowmem_load.text import fingerprint

_ORDER = {code: number for number, code in enumerate(BITS)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one file of weights.

    Attributes:
        name: its path in the folder, with "/".
        header, others: all bytes that are not a tensor's data: the first ones, and the others by offset.
        nbytes: of the whole file.
        starts: first byte of each tensor's data, absolute in the file, by name.
        tensors: what each tensor is made of, by name.
    """

    name: str
    header: bytes
    nbytes: int
    starts: Mapping[str, int]
    others: Mapping[int, bytes] = field(default_factory=dict)
    tensors: Mapping[str, Expression] = field(default_factory=dict)


def _in_memory(tensors: Mapping[str, Expression], starts: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
    """Yield the values that are no parameter's, such as padding, with their offset in the file."""
    for name, expression in tensors.items():
        if any(isinstance(leaf, Held) for leaf in leaves(expression)):
            for copy in plan_copies(expression, FlatRange(0, numel(expression))):
                leaf, nest = copy.leaf, copy.nest
                if isinstance(leaf, Held) and nest.is_run and not nest.casts:
                    values = leaf.flat[nest.source - leaf.first :][: nest.numel]
                    yield offset_in(starts[name], copy), values.view(torch.uint8).numpy().tobytes()


def offset_in(start: int, copy: Copy) -> int:
    """Return where in the file the elements of a copy begin to a tensor that starts at a byte of it."""
    return start + copy.nest.destination * copy.leaf.dtype.itemsize


def lay_out(file: SavedFile) -> FileLayout:
    """Return the layout of a safetensors file; raise UnsupportedError if it cannot hold the dtype of a tensor."""
    name, tensors = file.name, file.tensors
    for key, part in tensors.items():
        if part.dtype not in CODES or (CODES[part.dtype] in PACKED and not part.shape):
            raise UnsupportedError(
                f"{name}: {key} is {part.shape} of {part.dtype}, which a safetensors file cannot hold"
            )
    if wrong := [key for key in tensors if key == METADATA or key != key.encode(errors="ignore").decode()]:
        raise UnsupportedError(f"{name}: {wrong[0]!a} cannot be a name in a safetensors file; rename that tensor")

    def place(key: str) -> tuple[int, bytes]:
        return -_ORDER[CODES[tensors[key].dtype]], key.encode()

    entries: dict[str, object] = {METADATA: dict(file.metadata)} if file.metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=place):
        shape, dtype, code = tensors[key].shape, tensors[key].dtype, CODES[tensors[key].dtype]
        offsets[key], end = end, end + math.prod(shape) * dtype.itemsize
        in_file = [*shape[:-1], shape[-1] * PACKED[code]] if code in PACKED else list(shape)
        entries[key] = {"dtype": code, "shape": in_file, "data_offsets": [offsets[key], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    starts = {key: len(header) + start for key, start in offsets.items()}
    return FileLayout(name, header, len(header) + end, starts, dict(_in_memory(tensors, starts)), tensors)


def digest_of_files(files: Iterable[FileLayout]) -> str:
    """Return a fingerprint of everything that decides what lies where: names, sizes, headers."""
    return fingerprint(f"{file.name} {file.nbytes} {file.header!r} {sorted(file.others.items())}" for file in files)
