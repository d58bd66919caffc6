"""What is needed to describe a model: reads that cannot wait, the initialiser, the descriptions of files."""

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
from lowmem_load.io.stand_ins import is_url
from lowmem_load.planning.expression import Source
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.symbolic.initialise import Initialiser, ReadNow

T = TypeVar("T")

Keeps = Callable[[torch.Tensor], FlatRange]
"""Returns the elements of a parameter that this rank will be asked for."""


class Once(Protocol):
    """Finds out something that several ranks need, on one of them or on each."""

    def __call__(self, key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Return `find()`, or what another rank of the node found and packed; if that is nothing, each finds it."""


def by_itself(key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
    """Return `find()`: a `Once` without other ranks."""
    return find()


@dataclass(slots=True)
class Context:
    """What describing one model needs.

    Attributes:
        read_now: reads an expression for code that needs its value at once.
        initialiser: writes into the parameters that are not in the files.
        keeps_of: called with the model once it has its parameters; returns what this rank keeps of each.
        check_built: called with the model as soon as it is built; raises for one that cannot be described.
        reading: opens a file of the checkpoint for a block; the file may stay open afterwards.
        constructor: the values that the model's constructor computes.
    """

    read_now: ReadNow
    initialiser: Initialiser
    keeps_of: Callable[[nn.Module], Keeps]
    check_built: Callable[[nn.Module], None]
    reading: Callable[[str], AbstractContextManager[ByteSource]]
    once: Once = by_itself
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    constructor: Constructor = field(default_factory=Constructor)

    def file(self, path: str, checkpoint_format: CheckpointFormat) -> CheckpointFile:
        """Return the description of a file. One rank of a node reads it, once."""

        def find() -> CheckpointFile:
            with self.reading(path) as source:
                return checkpoint_format.describe(source)

        if path not in self.files:
            key = f"file {os.path.abspath(path)}"
            self.files[path] = self.once(key, find, pack, functools.partial(unpack, path))
        return self.files[path]


def pack(file: CheckpointFile) -> bytes:
    """Return a description as bytes; empty for one with views, tied names or dtypes that torch lacks."""
    tensors: list[tuple[str, int, tuple[int, ...], str]] = []
    for name in file.names:
        try:
            source = file.expression(name)
        except UnsupportedError:  # an error only for a model that uses this tensor
            return b""
        if not isinstance(source, Source) or source.name != name:
            return b""
        tensors.append((name, source.start, source.shape, str(source.dtype).removeprefix("torch.")))
    name = file.path if is_url(file.path) else ""  # a local path may differ between ranks
    return json.dumps([name, file.nbytes, file.digest, file.version, file.metadata, tensors]).encode()


def unpack(path: str, content: bytes) -> CheckpointFile:
    """Return the description of the file at `path` from what `pack` returned."""
    name, nbytes, digest, version, metadata, tensors = json.loads(content)
    path = name or path
    sources = {
        name: Source(path, name, start, tuple(shape), getattr(torch, dtype)) for name, start, shape, dtype in tensors
    }
    return CheckpointFile(path, nbytes, digest, version, tuple(sources), metadata, sources.__getitem__)
