"""The weights of a training checkpoint, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.training_checkpoints.tiles import TiledTensor


@dataclass(frozen=True, slots=True)
class SavedState:
    """What the ranks of a job have saved.

    Attributes:
        folder: where the files are.
        kind: who writes such files, for messages.
        tensors: by the keys that lead to them in the state dict that was saved.
        files: all files that were opened.
        has_shapes: whether the files say how large the tensors are.
    """

    folder: str
    kind: str
    tensors: Mapping[tuple[str, ...], TiledTensor]
    files: tuple[PlannedFile, ...]
    has_shapes: bool = True
