"""Finds out who wrote a training checkpoint, and opens the model in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.files.executor import Executor
from lowmem_load.files.remote_checkpoint import folder_of_checkpoint
from lowmem_load.files.stand_ins import origin
from lowmem_load.files.torch_zip import describe_objects
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.training_checkpoints.dcp import METADATA, open_dcp
from lowmem_load.training_checkpoints.names import weights_in, without_wrappers
from lowmem_load.training_checkpoints.rank_files import put_together, rank_files
from lowmem_load.training_checkpoints.safetensors_shards import open_shards, shard_files
from lowmem_load.training_checkpoints.saved_state import OF_VERL, BandedTensor, Entries, Files, own_files
from lowmem_load.training_checkpoints.torch_checkpointing import ITEMS, open_items
from lowmem_load.training_checkpoints.zero_checkpoint import PLACEHOLDER, find_folder, open_checkpoint

ADAPTER_CONFIG = "adapter_config.json"

SHARDS = "torch DCP in safetensors files"
"""Kind of a checkpoint whose files do not say how large the tensors are: a missing last part is not noticed."""

_OF_ACCELERATE = "pytorch_model_fsdp_0"
"""Folder of the weights that accelerate, Trainer, axolotl and LLaMA-Factory save in theirs."""

_MODELS_OF_VERL = ("actor", "critic")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model in a training checkpoint. For `left_out`, `removed` and `adapter` see `NamedWeights`."""

    folder: str  # its name, which may be a URL
    kind: str  # who writes such files
    tensors: Mapping[str, BandedTensor]  # by names of parameters and buffers, of which two may have one tensor
    files: tuple[PlannedFile, ...]  # all that were opened
    near: Sequence[str]  # folders that may have files about the model
    num_masters: int  # of the tensors, how many are the fp32 values of an optimizer, while the model had 16 bits
    left_out: Sequence[str]
    removed: str
    adapter: str | None

    def companion(self, name: str) -> str | None:
        """Return the folder that has a file about the model, such as config.json; None if none has it."""
        return next((folder for folder in self.near if own_files(folder, [name])), None)

    def without_wrappers(self) -> SavedModel:
        """Return it for a model that checks names: without what wraps modules inside of it."""
        names = without_wrappers(self.folder, self.tensors)
        return replace(self, tensors={names[name]: tensor for name, tensor in self.tensors.items()})


def open_state(folder: str, executor: Executor) -> tuple[str, Entries, Files]:
    """Return what a folder has that torch DCP or ranks have saved, or a known folder in it. No weights are read.

    The first value says who writes such files.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder")
    for place in filter(os.path.isdir, (folder, os.path.join(folder, _OF_ACCELERATE))):
        files = Files(place, executor)
        if os.path.isfile(os.path.join(place, METADATA)):
            return "torch DCP", open_dcp(files), files
        if os.path.isfile(os.path.join(place, ITEMS)):
            return "torch_checkpointing", open_items(files), files
        kind, names = rank_files(place)
        shards = shard_files(place)
        if names or shards:
            states = files.open_all(names, describe_objects)
            entries = put_together(place, states, executor) if states else open_shards(files, shards)
            files.check_one_save()
            return kind or SHARDS, entries, files
    if parts := [part for part in _MODELS_OF_VERL if os.path.isdir(os.path.join(folder, part))]:
        raise CheckpointError(f"{folder}: is verl's folder of a step; name one model in it: {listed(parts)}")
    names = sorted(os.listdir(folder))
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"{folder}: has .distcp files and no {METADATA}: the save did not end, or the file was not copied (its "
            "name begins with a dot)"
        )
    raise CheckpointError(
        f"{folder}: is not a training checkpoint: it has no {METADATA} of torch DCP, no {ITEMS} of "
        "torch_checkpointing, no files of ranks (model_world_size_*_rank_*.pt), no shard-*.safetensors, and no file "
        "'latest' of DeepSpeed (if it has tags, name one; if it is a model, name it as such, not as weights). It "
        f"contains {listed(names) or 'nothing'}"
    )


def open_model(folder: str, executor: Executor, *, tag: str | None = None, part: str | None = None) -> SavedModel:
    """Return the model in a checkpoint of DeepSpeed's ZeRO, of torch's packages, or of files of ranks.

    The folder may be a URL. The executor keeps the files open. `tag` is that of a checkpoint of DeepSpeed; None: the
    one that the file `latest` names. `part` is the part of a state dict of torch that is the model; see `weights_in`.
    """
    name, folder = folder, folder_of_checkpoint(folder, tag, (_OF_ACCELERATE, OF_VERL), executor.tasks.check)
    try:
        return _open_model(folder, executor, tag, part)
    except (CheckpointError, ConfigError, UnsupportedError) as error:
        if folder == name:
            raise
        raise type(error)(str(error).replace(folder, origin(folder))) from error


def _open_model(folder: str, executor: Executor, tag: str | None, part: str | None) -> SavedModel:
    tagged, num_masters, lost = find_folder(folder, tag), 0, list[str]()
    if tagged is None:
        kind, entries, files = open_state(folder, executor)
        place, opened = files.folder, files.opened
    elif part is not None:
        raise ConfigError(f"{folder}: part={part!r} names a part of torch's state dicts; a ZeRO checkpoint has tags")
    else:
        checkpoint = open_checkpoint(tagged, executor, with_moments=False)
        values = {**checkpoint.replicated, **checkpoint.of_module}
        shared = {name: checkpoint.own_name(other) for name, other in checkpoint.shared.items()}
        values |= {checkpoint.own_name(name): values[other] for name, other in shared.items() if other in values}
        kind, entries = "DeepSpeed's ZeRO", {(name,): tensor for name, tensor in values.items()}
        lost = [
            name for name in checkpoint.parameters if checkpoint.own_name(name) not in values and name != PLACEHOLDER
        ]
        num_masters = sum(saved.group is not None for saved in checkpoint.parameters.values())
        place, opened = tagged, list(checkpoint.files)
    where = os.path.abspath(place)
    near = [where, os.path.join(where, OF_VERL), os.path.abspath(folder)]
    if os.path.basename(where).startswith("pytorch_model_fsdp_"):
        near.append(os.path.dirname(where))  # in which accelerate saves it
    has_adapter_config = any(own_files(each, [ADAPTER_CONFIG]) for each in near)
    weights = weights_in(place, entries, part, has_adapter_config=has_adapter_config)
    left_out = (*lost, *weights.left_out)
    return SavedModel(
        origin(place), kind, weights.model, tuple(opened), near, num_masters, left_out, weights.removed, weights.adapter
    )
