"""What a checkpoint format is: bytes in, named tensors as expressions out. A new one is one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lowmem_load.errors import CheckpointError
from lowmem_load.io.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Expression

_POINTER_MAGIC = b"version https://git-lfs"
_MAX_POINTER_NBYTES = 1024
"""Bytes; git-lfs takes no larger file for a pointer."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint, described; none of its data was read.

    Attributes:
        path: as it was opened.
        nbytes: its size.
        digest: of the bytes that say what tensor lies where.
        version: of the source when these were read.
        names: of its tensors, in the order of the file.
        metadata: free-form strings; None where the file has none.
        expression: what a tensor, given by name, is made of; names of the same tensor give the same object. Raises
            UnsupportedError for one that torch has no dtype for.
    """

    path: str
    nbytes: int
    digest: str
    version: str
    names: tuple[str, ...]
    metadata: Mapping[str, str] | None
    expression: Callable[[str], Expression]


class CheckpointFormat(Protocol):
    """How files of one kind are described."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        """Read what says where the tensors of a file lie, and nothing else.

        Raises:
            CheckpointError: the file is malformed, unsafe, or not of this format.
            TruncatedFileError: it is shorter than it says.
        """


def refuse_git_lfs_pointer(source: ByteSource) -> None:
    """Raise CheckpointError if the file is a git-lfs pointer, which a clone without git-lfs has in place of weights."""
    head = read_bytes(source, 0, len(_POINTER_MAGIC)) if source.nbytes <= _MAX_POINTER_NBYTES else b""
    if head == _POINTER_MAGIC:
        raise CheckpointError(
            f"{source.path}: is a git-lfs pointer and not the weights; run `git lfs pull` in its folder"
        )
