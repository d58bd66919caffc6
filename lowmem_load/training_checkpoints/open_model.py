"""Opens the model in a training checkpoint, whoever wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lowmem_load.errors import ConfigError
from lowmem_load.io.executor import Executor
from lowmem_load.planning.expression import Expression, Shape
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.training_checkpoints.names import weights_in
from lowmem_load.training_checkpoints.open_state import is_saved_state, open_state
from lowmem_load.training_checkpoints.open_zero import open_checkpoint
from lowmem_load.training_checkpoints.zero_checkpoint import find_folder


class Values(Protocol):
    """A whole tensor of a checkpoint, which can be read in parts."""

    @property
    def shape(self) -> Shape:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements in the files."""

    @property
    def numel(self) -> int:
        """Of the whole tensor."""

    @property
    def whole(self) -> Expression:
        """All of it."""

    def part(self, elements: FlatRange) -> tuple[Expression, FlatRange]:
        """Return an expression that has these elements, and where in it they are."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model in a training checkpoint.

    Attributes:
        folder: that has the files.
        kind: who writes such files.
        tensors: under the names of the model's parameters and buffers. Two names may have one tensor.
        files: all files that were opened.
        adapter: tensors of an adapter, under the names by which PEFT saves them.
        num_masters: of the tensors, those that are the fp32 values of an optimizer, while the model had 16 bits.
        left_out: number of other tensors in the files, such as an optimizer's.
        has_shapes: whether the files say how large the tensors are; else a missing last part is not noticed.
    """

    folder: str
    kind: str
    tensors: Mapping[str, Values]
    files: tuple[PlannedFile, ...]
    adapter: Mapping[str, Values] = field(default_factory=dict)
    num_masters: int = 0
    left_out: int = 0
    has_shapes: bool = True

    @property
    def near(self) -> tuple[str, ...]:
        """Folders that may have files about the model: the checkpoint's, verl's in it, and the one above it."""
        return self.folder, os.path.join(self.folder, "huggingface"), os.path.dirname(os.path.abspath(self.folder))

    def companion(self, name: str) -> str | None:
        """Return the folder that has a file about the model, such as config.json: the checkpoint's, or one near it."""
        for folder in self.near:
            if os.path.isfile(os.path.join(folder, name)):
                return folder
        return None


def open_model(folder: str, executor: Executor, *, tag: str | None = None, part: str | None = None) -> SavedModel:
    """Return the model in a checkpoint of DeepSpeed's ZeRO, of torch DCP, or of files of ranks. Reads no weights.

    Args:
        folder: that the trainer saved to.
        executor: reads descriptions, and keeps the files open.
        tag: of a checkpoint of DeepSpeed. None: the one that the file `latest` names.
        part: of a state dict of torch, which is the model; see `weights_in`.

    Raises:
        CheckpointError: it is no checkpoint, incomplete, or malformed.
        ConfigError: there is no such tag or part.
        UnsupportedError: it was saved in a form that cannot be read by ranges.
    """
    is_of_torch = tag is None and not os.path.isfile(os.path.join(folder, "latest"))
    tagged = None if is_of_torch and is_saved_state(folder) else find_folder(folder, tag)
    if tagged is None:
        state = open_state(folder, executor)
        tensors, adapter = weights_in(state.folder, state.tensors, part)
        left_out = len(state.tensors) - len(tensors) - len(adapter)
        return SavedModel(
            state.folder, state.kind, tensors, state.files, adapter, left_out=left_out, has_shapes=state.has_shapes
        )
    if part is not None:
        raise ConfigError(f"{folder}: part={part!r} names a part of torch's state dicts; a ZeRO checkpoint has tags")
    checkpoint = open_checkpoint(tagged, executor)
    values: dict[str, Values] = {**checkpoint.replicated, **checkpoint.of_module}
    values |= {name: values[other] for name, other in checkpoint.shared.items() if other in values}
    num_masters = sum(saved.group is not None for saved in checkpoint.parameters.values())
    return SavedModel(tagged, "DeepSpeed's ZeRO", values, tuple(checkpoint.files), num_masters=num_masters)
