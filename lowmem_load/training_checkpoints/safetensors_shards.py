"""Opens safetensors files, each with the parts that one rank saved: `shard-00001-model-00001-of-00001.safetensors`.

torch DCP's `HuggingFaceStorageWriter` and transformers' `save_pretrained(distributed_checkpoint=True)` write them.

Source: torch 2.8 to 2.13 `distributed/checkpoint/hf_storage.py`, `_hf_utils.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.files.inert_pickle import is_shape
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.planning.expression import numel
from lowmem_load.text import key_of
from lowmem_load.training_checkpoints.saved_state import BandedTensor, Entries, Files, Tile, assemble

_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")

_SHARDING_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys in the header of a file: for each tensor, the first index of its part along each dim."""


def shard_files(folder: str) -> list[str]:
    """Return the names of the files of a folder that have parts of tensors, in order."""
    return sorted(name for name in os.listdir(folder) if _SHARD.fullmatch(name))


def open_shards(files: Files, names: Sequence[str]) -> Entries:
    """Return the tensors whose parts are in files of these names. Reads headers alone."""
    folder, tiles = files.folder, dict[str, list[Tile]]()
    numbers = {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}
    if len(numbers - {0}) < max(numbers):  # which may be any number
        absent = next(number for number in itertools.count(1) if number not in numbers)
        raise CheckpointError(f"{folder}: lacks shard {absent} of {max(numbers)} or more, and perhaps others")
    for file in files.open_all(names, Safetensors().describe):
        offsets = _offsets_in(file.path, (file.metadata or {}).get(_SHARDING_INFO))
        if fields := {field for entry in offsets.values() for field in entry} - {_OFFSETS}:
            raise UnsupportedError(
                f"{file.path}: its header has {listed(sorted(fields))}, as in pytorch's pull request 189945, which may "
                "give tensors other names; save with torch 2.13"
            )
        for tensor in file.names:
            values = file.expression(tensor)
            first = offsets.get(tensor, {}).get(_OFFSETS)
            if not isinstance(first, list) or len(first) != len(values.shape) or not is_shape(tuple(first)):
                raise CheckpointError(
                    f"{file.path}: its header does not say where the part of {tensor} belongs ({_OFFSETS})"
                )
            tiles.setdefault(tensor, []).append(Tile(tuple(first), values))
    return {(name,): _assemble(f"{folder}: {name}", parts) for name, parts in tiles.items()}


def _offsets_in(path: str, text: str | None) -> dict[str, dict[str, object]]:
    try:
        content = json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {_SHARDING_INFO} in its header is not JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise CheckpointError(f"{path}: has no {_SHARDING_INFO} in its header, as the other files have")
    return content


def _assemble(what: str, parts: Sequence[Tile]) -> BandedTensor:
    # A save writes each part once, so one of two files would be taken for the other one.
    places = [key_of(part.offsets) for part in parts if numel(part.values)]
    if len(set(places)) < len(places):
        raise CheckpointError(f"{what}: two files have the same part of it; remove the files of the earlier save")
    # The files do not say the shape of the full tensor: the parts that end last do.
    dims = range(len(parts[0].offsets))
    if any(len(part.offsets) != len(dims) for part in parts):
        raise CheckpointError(f"{what}: its parts have different numbers of dims")
    shape = tuple(max(part.offsets[dim] + part.values.shape[dim] for part in parts) for dim in dims)
    return assemble(what, shape, parts)
