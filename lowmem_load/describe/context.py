"""What describing a model needs from outside: how values are read now, where parameters are initialised, open files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from lowmem_load.describe.initialise import Initialiser, ReadNow
from lowmem_load.formats.format import CheckpointFile, CheckpointFormat
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.read.source import ByteSource

Keeps = Callable[[torch.Tensor], FlatRange]
"""For a parameter, the elements that this rank will be asked for."""


@dataclass(slots=True)
class Context:
    """What describing one model needs.

    Attributes:
        read_now: reads an expression for code that needs its value at once.
        initialiser: where parameters that are not in the files get their values.
        keeps_of: called with the model once its parameters are there; says what of each this rank will keep.
        check_built: called with the model as soon as its code has built it; raises for one that cannot be described.
        reading: gives the open source of a file of the checkpoint, which is not closed here.
        files: those described so far, by path.
    """

    read_now: ReadNow
    initialiser: Initialiser
    keeps_of: Callable[[nn.Module], Keeps]
    check_built: Callable[[nn.Module], None]
    reading: Callable[[str], AbstractContextManager[ByteSource]]
    files: dict[str, CheckpointFile] = field(default_factory=dict)

    def file(self, path: str, checkpoint_format: CheckpointFormat) -> CheckpointFile:
        """Return the description of a file; each is read once.

        Raises:
            CheckpointError: see `CheckpointFormat.describe`.
        """
        if path not in self.files:
            with self.reading(path) as source:
                self.files[path] = checkpoint_format.describe(source)
        return self.files[path]
