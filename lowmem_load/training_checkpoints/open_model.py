"""Finds out who wrote a training checkpoint, and opens the model in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowmem_load.errors import CheckpointError, ConfigError, listed
from lowmem_load.files.executor import Executor
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.training_checkpoints.dcp import METADATA, open_dcp
from lowmem_load.training_checkpoints.names import weights_in, without_wrappers
from lowmem_load.training_checkpoints.rank_files import open_rank_files, rank_files
from lowmem_load.training_checkpoints.safetensors_shards import open_shards, shard_files
from lowmem_load.training_checkpoints.saved_state import OF_VERL, BandedTensor, SavedState, own_files
from lowmem_load.training_checkpoints.zero_checkpoint import PLACEHOLDER, find_folder, open_checkpoint

_OF_ACCELERATE = "pytorch_model_fsdp_0"
"""Folder of the weights that accelerate, Trainer, axolotl and LLaMA-Factory save in theirs."""

_MODELS_OF_VERL = ("actor", "critic")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model in a training checkpoint.

    Attributes:
        folder: that has the files.
        kind: who writes such files.
        tensors: under the names of the model's parameters and buffers. Two names may have one tensor.
        files: all files that were opened.
        near: folders that may have files about the model.
        adapter: see `NamedWeights`, as for `left_out` and `removed`.
        num_masters: of the tensors, those that are the fp32 values of an optimizer, while the model had 16 bits.
        has_shapes: as in `SavedState`.
    """

    folder: str
    kind: str
    tensors: Mapping[str, BandedTensor]
    files: tuple[PlannedFile, ...]
    near: tuple[str, ...] = ()
    adapter: str | None = None
    num_masters: int = 0
    left_out: tuple[str, ...] = ()
    removed: str = ""
    has_shapes: bool = True

    def companion(self, name: str) -> str | None:
        """Return the folder that has a file about the model, such as config.json; None if none has it."""
        return next((folder for folder in self.near if own_files(folder, [name])), None)

    def without_wrappers(self) -> SavedModel:
        """Return it for a model that checks names: without what wraps modules inside of it."""
        names = without_wrappers(self.folder, self.tensors)
        return replace(self, tensors={names[name]: tensor for name, tensor in self.tensors.items()})


def open_state(folder: str, executor: Executor) -> SavedState:
    """Return what a folder of torch DCP or of files of ranks holds, or a known folder in it. No weights are read.

    Raises:
        CheckpointError: it is not a checkpoint, incomplete, or malformed.
        UnsupportedError: it was saved in a form that cannot be read by ranges.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder")
    for place in filter(os.path.isdir, (folder, os.path.join(folder, _OF_ACCELERATE))):
        if os.path.isfile(os.path.join(place, METADATA)):
            return open_dcp(place, executor)
        if rank_files(place)[1]:
            return open_rank_files(place, executor)
        if shard_files(place):
            return open_shards(place, executor)
    if parts := [part for part in _MODELS_OF_VERL if os.path.isdir(os.path.join(folder, part))]:
        raise CheckpointError(f"{folder}: is verl's folder of a step; name one model in it: {listed(parts)}")
    names = sorted(os.listdir(folder))
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"{folder}: has .distcp files and no {METADATA}: the save did not end, or the file was not copied (its "
            "name begins with a dot)"
        )
    raise CheckpointError(
        f"{folder}: is not a training checkpoint: it has no {METADATA} of torch DCP, no files of ranks "
        "(model_world_size_*_rank_*.pt), no shard-*.safetensors, and no file 'latest' of DeepSpeed (if it has tags, "
        f"name one; if it is a model, name it as such, not as weights). It holds {listed(names) or 'nothing'}"
    )


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
    entries: Mapping[tuple[str, ...], BandedTensor]
    tagged = find_folder(folder, tag)
    if tagged is None:
        state = open_state(folder, executor)
        entries = state.tensors
        model = SavedModel(state.folder, state.kind, {}, state.files, has_shapes=state.has_shapes)
    else:
        if part is not None:
            raise ConfigError(
                f"{folder}: part={part!r} names a part of torch's state dicts; a ZeRO checkpoint has tags"
            )
        checkpoint = open_checkpoint(tagged, executor, with_moments=False)
        values = {**checkpoint.replicated, **checkpoint.of_module}
        values |= {name: values[other] for name, other in checkpoint.shared.items() if other in values}
        entries = {(name,): tensor for name, tensor in values.items()}
        known = {*values, PLACEHOLDER}
        lost = tuple(name for name in checkpoint.parameters if name not in known)
        num_masters = sum(saved.group is not None for saved in checkpoint.parameters.values())
        files = tuple(checkpoint.files)
        model = SavedModel(tagged, "DeepSpeed's ZeRO", {}, files, num_masters=num_masters, left_out=lost)
    near = [model.folder, os.path.join(model.folder, OF_VERL), folder]
    if os.path.basename(os.path.abspath(model.folder)).startswith("pytorch_model_fsdp_"):
        near.append(os.path.dirname(os.path.abspath(model.folder)))  # in which accelerate saves it
    model = replace(model, near=tuple(dict.fromkeys(map(os.path.abspath, near))))
    has_adapter_config = model.companion("adapter_config.json") is not None
    weights = weights_in(model.folder, entries, part, has_adapter_config=has_adapter_config)
    tensors, left_out, removed, adapter = weights
    return replace(model, tensors=tensors, left_out=(*model.left_out, *left_out), removed=removed, adapter=adapter)
