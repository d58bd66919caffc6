"""A file of a checkpoint as `safetensors.safe_open` shows it to transformers, with symbolic tensors.

Part of the transformers seam, see `loader.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.safetensors import code_of
from lowmem_load.planning.expression import Expression
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor


class SymbolicFile:
    """What `safetensors.safe_open` returns, with symbolic tensors."""

    def __init__(self, file: CheckpointFile, read_now: ReadNow) -> None:
        self._file, self._read_now = file, read_now

    def __enter__(self) -> SymbolicFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return names of the tensors."""
        return list(self._file.names)

    def metadata(self) -> Mapping[str, str] | None:
        """Return the texts in the header, such as its format."""
        return self._file.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, symbolic."""
        return SymbolicTensor(self.expression(name), self._read_now)

    def get_slice(self, name: str) -> _SymbolicSlice:
        """Return a tensor that may be cut before it is made."""
        return _SymbolicSlice(self, name)

    def expression(self, name: str) -> Expression:
        """Return what a tensor is made of."""
        return self._file.expression(name)


class _SymbolicSlice:
    """What `safe_open(...).get_slice` returns: shape and dtype at once, a tensor when indexed. One for each tensor."""

    __slots__ = ("_file", "_name")

    def __init__(self, file: SymbolicFile, name: str) -> None:
        self._file, self._name = file, name  # looked up when used: torch may lack the dtype of one that nobody uses

    def get_shape(self) -> list[int]:
        """Return its sizes."""
        return list(self._file.expression(self._name).shape)

    def get_dtype(self) -> str:
        """Return the name that safetensors has for its dtype."""
        return code_of(self._file.expression(self._name).dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index]
