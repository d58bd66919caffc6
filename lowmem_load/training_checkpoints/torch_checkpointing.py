"""Opens folders of torch_checkpointing: each rank has written a safetensors file, and one of them `metadata.pkl`.

The metadata says, for each item such as "model", which file is of which rank, and what a rank has of each tensor. It is
a pickle of dicts, lists, text and numbers, which is read and never run.

Source: torch_checkpointing 0.1.1 `distributed_metadata.py`, `dtensor_metadata.py`, `checkpoint_layout.py`.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.files.format import CheckpointFile
from lowmem_load.files.inert_pickle import Foreign, is_shape, objects
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.planning.expression import Expression, numel
from lowmem_load.planning.proof import prove_names
from lowmem_load.training_checkpoints.dcp import MAX_KEYS
from lowmem_load.training_checkpoints.rank_files import Shard, full_tensor
from lowmem_load.training_checkpoints.saved_state import BandedTensor, Entries, Files

ITEMS = "metadata.pkl"

_SAFETENSORS = "SafetensorsSerialization"


def open_items(files: Files) -> Entries:
    """Return the tensors of a folder with a `metadata.pkl`. Reads headers, and values that must be equal."""
    path, pickled = files.metadata(ITEMS)
    tree, entries = objects(pickled, path, nbytes_per_object=3), dict[tuple[str, ...], BandedTensor]()
    try:
        if tree["version"] != "2.0":
            raise UnsupportedError(f"{path}: is of version {reprlib.repr(tree['version'])}; only 2.0 can be read")
        for item, content in tree["metadata"].items():
            entries |= _item(files, item, content, tree["world_size"])
    except (CheckpointError, UnsupportedError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not metadata of torch_checkpointing: {reprlib.repr(error)}") from error
    files.check_one_save()
    return entries


def _item(files: Files, item: str, content: Mapping[str, Any], num_ranks: int) -> Entries:
    """Return the tensors of one item."""
    layouts, where = content["rank_to_layout_info"], f"{files.folder}: {item}"
    if len(layouts) != num_ranks or not all(type(rank) is int and 0 <= rank < num_ranks for rank in layouts):
        raise CheckpointError(f"{where}: its metadata does not say which files are those of the {num_ranks} ranks")
    names = {}
    for text, groups in content["nested_path_to_metadata"].items():
        keys = json.loads(text)
        if not isinstance(keys, list) or len(keys) >= MAX_KEYS or not all(isinstance(key, str | int) for key in keys):
            raise TypeError("keys that are neither text nor numbers, or too many")
        names[(item, *map(str, keys))] = ".".join(map(str, keys)), groups
    prove_names(where, names, {keys: name.encode() for keys, (name, _) in names.items()})  # fails for half a surrogate
    written = {rank: layout for rank, layout in layouts.items() if layout is not None}
    formats = {layout["serialization_format"]["type"] for layout in written.values()}
    if formats != {_SAFETENSORS}:
        raise UnsupportedError(f"{where}: is not in safetensors files; save the item with {_SAFETENSORS}()")
    opened = {rank: _open(files, layout["file_path"]) for rank, layout in sorted(written.items())}
    known = {name for name, _ in names.values()}
    for file in opened.values():
        if unknown := sorted(set(file.names) - known):
            raise CheckpointError(f"{file.path}: has {listed(unknown)}, which {ITEMS} does not name")
    return {keys: _full(files, f"{where}: {name}", name, groups, opened) for keys, (name, groups) in names.items()}


def _open(files: Files, name: str) -> CheckpointFile:
    path = os.path.join(files.folder, name)
    if os.path.isabs(name) or os.path.normpath(name) != name or name.startswith("."):
        raise CheckpointError(f"{files.folder}: {ITEMS} names {name!r:.80}, which is not in its folder")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: is missing; copy the files of all ranks to one folder")
    return files.open(name, Safetensors().describe)


def _full(files: Files, what: str, name: str, groups: Any, opened: Mapping[int, CheckpointFile]) -> BandedTensor:
    kinds = [group["sharding_metadata"]["type"] for group in groups]
    if kinds != ["DTensorShardingMetadata"]:
        raise UnsupportedError(f"{what}: is not a tensor of one mesh, but of {kinds!r:.80}; save it with torch DCP")
    data, ranks = groups[0]["sharding_metadata"]["data"], groups[0]["ranks"]
    mesh, of_mesh = data["mesh_spec"]["mesh_shape"], data["mesh_spec"]["mesh_data"]
    if not is_shape(mesh) or list(of_mesh) != sorted(set(of_mesh)) or len(set(ranks)) < len(ranks):
        raise UnsupportedError(f"{what}: its mesh has ranks in another order; save it with torch DCP")
    kinds = [cut["type"].replace("Strided", "_Strided") for cut in data["placements"]]  # as torch calls it
    cuts = tuple(Foreign(f"{__name__}.{kind}", (), cut) for kind, cut in zip(kinds, data["placements"], strict=True))
    # A tensor that is not a DTensor is said to be replicated, whatever each rank has of it. So its values are compared.
    known = None if set(kinds) <= {"Replicate"} else ""
    shards, shape = [], tuple(data["global_shape"])
    if not is_shape(shape):
        raise TypeError("a shape that is not of sizes")
    for rank in filter(opened.__contains__, ranks):
        local = _values(opened[rank], name, data["dtype"])
        places = tuple(map(int, np.unravel_index(of_mesh.index(rank), mesh)))
        values = partial(_values, opened[rank], name, data["dtype"])
        shards.append(Shard(opened[rank].path, local.shape, numel(local), values, lambda: known, shape, cuts, places))
    return full_tensor(files.folder, name, shards, files.executor)


def _values(file: CheckpointFile, name: str, dtype: str) -> Expression:
    try:
        values = file.expression(name)
    except KeyError:
        raise CheckpointError(f"{file.path}: lacks {name}, which {ITEMS} says that it has") from None
    if str(values.dtype) != dtype:
        raise CheckpointError(f"{file.path}: {name}: is of {values.dtype}, {ITEMS} says {dtype!r:.80}")
    return values
