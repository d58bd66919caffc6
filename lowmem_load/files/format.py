"""The interface of checkpoint formats: bytes in, named tensors as expressions out. A new format is one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from lowmem_load.errors import CheckpointError
from lowmem_load.files.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Expression

NESTS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training code saves a state dict, next to an optimizer's and the like."""


class CheckpointFile(NamedTuple):
    """The description of one file of a checkpoint, made without reading its data.

    `expression` returns the expression of a tensor, given its name. Names of the same tensor give the same object. It
    raises UnsupportedError if torch has no dtype for the tensor.
    """

    path: str
    nbytes: int
    digest: str  # of the bytes that say which tensor lies where
    version: str  # of the source when these were read
    names: tuple[str, ...]  # of the tensors, in the order of the file
    metadata: Mapping[str, str] | None  # free-form strings, if the file has any
    expression: Callable[[str], Expression]


class CheckpointFormat(Protocol):
    """Describes the files of one kind."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        """Read where the tensors of a file lie, and nothing else. CheckpointError: it is malformed or unsafe."""


def refuse_git_lfs_pointer(source: ByteSource) -> None:
    """Raise CheckpointError if the file is a git-lfs pointer, which a clone without git-lfs has instead of weights."""
    magic, max_nbytes = b"version https://git-lfs", 1024
    if source.nbytes <= max_nbytes and read_bytes(source, 0, len(magic)) == magic:
        raise CheckpointError(
            f"{source.path}: is a git-lfs pointer and not the weights; run `git lfs pull` in its folder"
        )
