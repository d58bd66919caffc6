"""Finds out who wrote a training checkpoint, and opens it."""

from __future__ import annotations

import os

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.io.executor import Executor
from lowmem_load.training_checkpoints.dcp import METADATA, open_dcp, open_shards, shard_files
from lowmem_load.training_checkpoints.rank_files import open_rank_files, rank_files
from lowmem_load.training_checkpoints.weights import SavedState

_OF_ACCELERATE = "pytorch_model_fsdp_0"
"""Folder of the weights that accelerate, Trainer, axolotl and LLaMA-Factory save in theirs."""

_OF_VERL = ("actor", "critic")


def is_saved_state(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds what `open_state` opens."""
    try:
        return find_state(os.fspath(folder)) is not None
    except CheckpointError:
        return True  # its error is the better one


def find_state(folder: str) -> str | None:
    """Return the folder that has the weights: this one, or a known one in it. None if there is none."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder")
    for place in (folder, os.path.join(folder, _OF_ACCELERATE)):
        if os.path.isdir(place) and (
            os.path.isfile(os.path.join(place, METADATA)) or rank_files(place)[1] or shard_files(place)
        ):
            return place
    if parts := [part for part in _OF_VERL if os.path.isdir(os.path.join(folder, part))]:
        raise CheckpointError(f"{folder}: is verl's folder of a step; name one model in it: {listed(parts)}")
    if any(name.endswith(".distcp") for name in os.listdir(folder)):
        raise CheckpointError(
            f"{folder}: has .distcp files and no {METADATA}: the save did not end, or the file was not copied (its "
            "name begins with a dot)"
        )
    return None


def open_state(folder: str, executor: Executor) -> SavedState:
    """Return what a training checkpoint holds. No weights are read.

    Raises:
        CheckpointError: it is no checkpoint, incomplete, or malformed.
        UnsupportedError: it was saved in a form that cannot be read by ranges.
    """
    place = find_state(folder)
    if place is None:
        raise CheckpointError(
            f"{folder}: is no training checkpoint: it has no {METADATA} of torch DCP, no files of ranks "
            "(model_world_size_*_rank_*.pt), no shard-*.safetensors, and no file 'latest' of DeepSpeed (if it "
            "has tags, name one; if it is a model, name it as such, not as weights). It holds "
            f"{listed(sorted(os.listdir(folder))) or 'nothing'}"
        )
    if os.path.isfile(os.path.join(place, METADATA)):
        return open_dcp(place, executor)
    if shard_files(place):
        return open_shards(place, executor)
    return open_rank_files(place, executor)
