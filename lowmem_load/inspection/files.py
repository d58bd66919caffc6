"""The weight files of a checkpoint and their tensors, read off headers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.formats.index import check_index, read_json
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.planning.expression import Expression
from lowmem_load.read.source import Opener


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name, file: of it.
        dtype: as torch prints it, without "torch."; "unknown to this torch" for one that it lacks.
        shape: in elements.
        nbytes: of its data; 0 for a dtype that is not known.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of weights: its name, bytes, and number of tensors."""

    name: str
    nbytes: int
    num_tensors: int


def stored(folder: str, subfolder: str, open_source: Opener) -> tuple[list[StoredFile], list[StoredTensor]]:
    """Return the files that `from_pretrained` would choose, and the tensors in them, in the order of the files.

    Raises:
        CheckpointError: there are none, or one is malformed.
    """
    files: list[StoredFile] = []
    tensors: list[StoredTensor] = []
    where = os.path.join(folder, subfolder)
    for name in _weights(where, folder, subfolder):
        source = open_source(os.path.join(where, name))
        try:
            described = (Safetensors() if name.endswith(".safetensors") else TorchZip()).describe(source)
        finally:
            source.close()
        files.append(StoredFile(name, described.nbytes, len(described.names)))
        tensors += [_tensor(each, name, described.expression) for each in described.names]
    return files, tensors


def _tensor(name: str, file: str, expression: Any) -> StoredTensor:
    try:
        found: Expression = expression(name)
    except UnsupportedError:
        return StoredTensor(name, file, "unknown to this torch", (), 0)
    nbytes = math.prod(found.shape) * found.dtype.itemsize
    return StoredTensor(name, file, str(found.dtype).removeprefix("torch."), tuple(found.shape), nbytes)


_CHOICES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("adapter_model.safetensors", ""),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("adapter_model.bin", ""),
)
"""A file of all weights and the index of several, in the order in which `from_pretrained` looks for them."""


def _weights(where: str, folder: str, subfolder: str) -> list[str]:
    there = set(os.listdir(where)) if os.path.isdir(where) else set()
    for single, index in _CHOICES:
        if single in there:
            return [single]
        if index in there:
            path = os.path.join(where, index)
            check_index(path, folder, subfolder)
            return list(_named(read_json(path)["weight_map"].values()))
    loose = sorted(file for file in there if file.endswith(".safetensors"))  # a variant, or a part that is named freely
    if not loose:
        raise CheckpointError(f"{where}: holds no weights: no safetensors files, no pytorch_model*.bin")
    return loose


def _named(files: Any) -> Iterator[str]:
    yield from sorted(set(files))
