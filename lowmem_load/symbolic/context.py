"""What is needed to describe a model: reads that cannot wait, the initialiser, the descriptions of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from lowmem_load.formats.format import CheckpointFile, CheckpointFormat
from lowmem_load.io.source import ByteSource
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.symbolic.initialise import Initialiser, ReadNow

Keeps = Callable[[torch.Tensor], FlatRange]
"""Returns the elements of a parameter that this rank will be asked for."""


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
        is_partitioned: whether the load is one of ZeRO-3, or of shards.
        weights: take the place of those in the files.
        is_quiet: whether a loader of others says errors alone: its report of a load is the same on all ranks.
    """

    read_now: ReadNow
    initialiser: Initialiser
    keeps_of: Callable[[nn.Module], Keeps]
    check_built: Callable[[nn.Module], None]
    reading: Callable[[str], AbstractContextManager[ByteSource]]
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    constructor: Constructor = field(default_factory=Constructor)
    is_partitioned: bool = True
    weights: Mapping[str, torch.Tensor] | None = None
    is_quiet: bool = False

    def file(self, path: str, checkpoint_format: CheckpointFormat) -> CheckpointFile:
        """Return the description of a file, which is read once."""
        if path not in self.files:
            with self.reading(path) as source:
                self.files[path] = checkpoint_format.describe(source)
        return self.files[path]
