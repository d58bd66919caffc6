"""What describing a model needs from outside: how values are read now, where parameters are initialised, open files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import nn

from lowmem_load.errors import UnsupportedError
from lowmem_load.formats.format import CheckpointFile, CheckpointFormat
from lowmem_load.io.source import ByteSource
from lowmem_load.planning.expression import Source
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.initialise import Initialiser, ReadNow

T = TypeVar("T")

Keeps = Callable[[torch.Tensor], FlatRange]
"""For a parameter, the elements that this rank will be asked for."""


class Once(Protocol):
    """How things are found out that several ranks need: by one of them, or by each."""

    def __call__(self, key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Return what `find` finds here, or what `unpack` makes of the bytes that `pack` made elsewhere.

        `key` is equal on all ranks that need it. `pack` makes bytes of what `find` finds, none where it had better be
        found on each rank; `unpack` undoes that.
        """


def by_itself(key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
    """Find it on this rank: an `Once` without other ranks."""
    return find()


@dataclass(slots=True)
class Context:
    """What describing one model needs.

    Attributes:
        read_now: reads an expression for code that needs its value at once.
        initialiser: where parameters that are not in the files get their values.
        keeps_of: called with the model once its parameters are there; says what of each this rank will keep.
        check_built: called with the model as soon as its code has built it; raises for one that cannot be described.
        reading: gives the open source of a file of the checkpoint, which is not closed here.
        once: how what all ranks of a node need is found out.
        files: those described so far, by path.
    """

    read_now: ReadNow
    initialiser: Initialiser
    keeps_of: Callable[[nn.Module], Keeps]
    check_built: Callable[[nn.Module], None]
    reading: Callable[[str], AbstractContextManager[ByteSource]]
    once: Once = by_itself
    files: dict[str, CheckpointFile] = field(default_factory=dict)

    def file(self, path: str, checkpoint_format: CheckpointFormat) -> CheckpointFile:
        """Return the description of a file; each is read once, by one rank of those that share what they find.

        Raises:
            CheckpointError: see `CheckpointFormat.describe`.
        """

        def find() -> CheckpointFile:
            with self.reading(path) as source:
                return checkpoint_format.describe(source)

        if path not in self.files:
            key = f"file {os.path.abspath(path)}"
            self.files[path] = self.once(key, find, pack, functools.partial(unpack, path))
        return self.files[path]


def pack(file: CheckpointFile) -> bytes:
    """Return a description as bytes, for the other ranks of the node.

    Nothing is returned for a file with names that share a tensor, views, or dtypes that torch lacks: each rank reads
    the header of such a file itself.
    """
    tensors: list[tuple[str, int, tuple[int, ...], str]] = []
    for name in file.names:
        try:
            source = file.expression(name)
        except UnsupportedError:  # it is an error only for a model that uses this tensor
            return b""
        if not isinstance(source, Source) or source.name != name:
            return b""
        tensors.append((name, source.start, source.shape, str(source.dtype).removeprefix("torch.")))
    return json.dumps([file.nbytes, file.digest, file.version, file.metadata, tensors]).encode()


def unpack(path: str, content: bytes) -> CheckpointFile:
    """Return the description of the file at `path` that `pack` has made bytes of."""
    nbytes, digest, version, metadata, tensors = json.loads(content)
    sources = {
        name: Source(path, name, start, tuple(shape), getattr(torch, dtype)) for name, start, shape, dtype in tensors
    }
    return CheckpointFile(path, nbytes, digest, version, tuple(sources), metadata, sources.__getitem__)
