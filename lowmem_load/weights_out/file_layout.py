"""Files of weights before they are written: header, length, and where each tensor lies.

A safetensors file is laid out as safetensors itself does it (0.8.0, `safetensors/src/tensor.rs`, `prepare`): tensors of
the widest dtypes come first, those of one dtype by name, so that all are aligned. The header is padded with spaces to 8
bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowmem_load.errors import UnsupportedError
from lowmem_load.files.safetensors import BITS, CODES, METADATA, PACKED
from lowmem_load.models.saver import SavedFile
from lowmem_load.planning.expression import Held, numel
from lowmem_load.text import fingerprint
from lowmem_load.weights_out.buckets import PlannedTensor
from lowmem_load.weights_out.weights import needs_gathering, plan_tensor

_ORDER = {code: number for number, code in enumerate(BITS)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one file of weights."""

    name: str  # its path in the folder, with "/"
    header: bytes
    nbytes: int  # of the file
    tensors: Sequence[tuple[int, PlannedTensor]] = ()  # each after the byte where it starts, in the order of the file
    constants: Mapping[int, bytes] = field(default_factory=dict)  # such as padding, by offset


def lay_out(file: SavedFile) -> FileLayout:
    """Return the layout of a safetensors file; raise UnsupportedError if it cannot have the dtype of a tensor."""
    name, tensors = file.name, file.tensors
    for key, part in tensors.items():
        if part.dtype not in CODES or (CODES[part.dtype] in PACKED and not part.shape):
            raise UnsupportedError(
                f"{name}: {key} is {part.shape} of {part.dtype}, which a safetensors file cannot have"
            )
    if wrong := [key for key in tensors if key == METADATA or key != key.encode(errors="ignore").decode()]:
        raise UnsupportedError(f"{name}: {wrong[0]!a} cannot be a name in a safetensors file; rename that tensor")

    def place(key: str) -> tuple[int, bytes]:
        return -_ORDER[CODES[tensors[key].dtype]], key.encode()

    entries: dict[str, object] = {METADATA: dict(file.metadata)} if file.metadata else {}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=place):
        shape, code = tensors[key].shape, CODES[tensors[key].dtype]
        starts[key], end = end, end + numel(tensors[key]) * tensors[key].dtype.itemsize
        in_file = [*shape[:-1], shape[-1] * PACKED[code]] if code in PACKED else list(shape)
        entries[key] = {"dtype": code, "shape": in_file, "data_offsets": [starts[key], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    planned = [(len(header) + starts[key], plan_tensor(key, tensors[key], name)) for key in starts]
    return FileLayout(name, header, len(header) + end, planned, dict(_constants(name, planned)))


def _constants(file: str, tensors: Iterable[tuple[int, PlannedTensor]]) -> Iterator[tuple[int, bytes]]:
    for start, tensor in tensors:
        for copy in tensor.copies:
            leaf, nest = copy.leaf, copy.nest
            if isinstance(leaf, Held):
                if not nest.is_run or nest.casts:
                    raise needs_gathering(f"{file}: {tensor.name}", leaf)
                values = leaf.flat[nest.source - leaf.first :][: nest.numel]
                yield start + nest.destination * tensor.dtype.itemsize, values.view(torch.uint8).numpy().tobytes()


def digest_of_files(files: Iterable[FileLayout]) -> str:
    """Return a fingerprint of everything that decides what lies where."""
    return fingerprint(f"{file.name} {file.nbytes} {file.header!r} {sorted(file.constants.items())}" for file in files)
