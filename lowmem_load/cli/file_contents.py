"""The weight files of a checkpoint and their tensors, read off headers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.formats.index import check_index, read_json
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.io.source import Opener
from lowmem_load.planning.expression import Expression

CHOICES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("adapter_model.safetensors", ""),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("adapter_model.bin", ""),
)
"""A file of all weights and the index of several, in the order in which `from_pretrained` looks for them."""


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


def weight_files(folder: str, subfolder: str = "") -> Sequence[str]:
    """Return the paths of the files that `from_pretrained` would choose.

    Raises:
        CheckpointError: there are none.
    """
    where = os.path.join(folder, subfolder)
    there = set(os.listdir(where)) if os.path.isdir(where) else set()
    for single, index in CHOICES:
        if single in there:
            return [os.path.join(where, single)]
        if index in there:
            path = os.path.join(where, index)
            check_index(path)
            return [os.path.join(where, file) for file in sorted(set(read_json(path)["weight_map"].values()))]
    loose = sorted(file for file in there if file.endswith(".safetensors"))  # a variant, or a part that is named freely
    if not loose:
        raise CheckpointError(f"{where}: holds no weights: no safetensors files, no pytorch_model*.bin")
    return [os.path.join(where, file) for file in loose]


def stored_tensors(path: str, open_source: Opener) -> tuple[int, list[StoredTensor]]:
    """Return the bytes of a weight file, and the tensors in it.

    Raises:
        CheckpointError: it is malformed.
    """
    with closing(open_source(path)) as source:
        described = (Safetensors() if path.endswith(".safetensors") else TorchZip()).describe(source)
        file = os.path.basename(path)
        return described.nbytes, [_tensor(name, file, described.expression) for name in described.names]


def _tensor(name: str, file: str, expression: Callable[[str], Expression]) -> StoredTensor:
    try:
        found = expression(name)
    except UnsupportedError:
        return StoredTensor(name, file, "unknown to this torch", (), 0)
    nbytes = math.prod(found.shape) * found.dtype.itemsize
    return StoredTensor(name, file, str(found.dtype).removeprefix("torch."), tuple(found.shape), nbytes)
