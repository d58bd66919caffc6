"""Opens files of `torch.save` of which each has the state dict of one rank: DTensors, and tensors that all ranks have.

verl writes `model_world_size_8_rank_3.pt`, accelerate with `use_dcp=False` `pytorch_model_fsdp_0_rank3.bin`. Their
pickles are read, and never run.

Source: verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`; accelerate 1.15 `utils/fsdp_utils.py`; torch 2.6 to
2.13 `distributed/tensor/_dtensor_spec.py`, `placement_types.py` and `distributed/device_mesh.py`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.files.executor import Executor
from lowmem_load.files.inert_pickle import WRAPPER, Foreign, Tensor, is_shape
from lowmem_load.files.torch_zip import MAX_PICKLE_NBYTES, TorchObjects
from lowmem_load.planning.expression import Expression, Shape, reshape, slice_dim
from lowmem_load.planning.regions import Split, grid_of
from lowmem_load.training_checkpoints.dcp import MAX_KEYS
from lowmem_load.training_checkpoints.saved_state import BandedTensor, Entries, Tile, are_equal, assemble

_NAMES = {
    "FSDP's files of verl": re.compile(r"model_world_size_(?P<count>\d+)_rank_(?P<rank>\d+)\.pt"),
    "FSDP's files of accelerate": re.compile(r"pytorch_model_fsdp_0_rank(?P<rank>\d+)\.bin"),
}

_SHARDED_TENSORS = "torch.distributed._shard"
"""Package of the sharded tensors that FSDP1 makes without a mesh."""


def rank_files(folder: str) -> tuple[str, list[str]]:
    """Return who writes such files, and the files of weights of a folder by rank, if it has such files.

    Raises CheckpointError if ranks are missing, or two jobs have saved into one folder.
    """
    for kind, pattern in _NAMES.items():
        matches = [match for match in map(pattern.fullmatch, sorted(os.listdir(folder))) if match]
        if not matches:
            continue
        counts = {int(match["count"]) for match in matches if "count" in pattern.groupindex}
        by_rank = {int(match["rank"]): match[0] for match in matches}
        count = max(counts, default=max(by_rank) + 1)
        if len(counts) > 1 or len(matches) != len(by_rank):
            raise CheckpointError(f"{folder}: has files of several jobs; remove those of all but one")
        if len(by_rank) != count or max(by_rank) >= count:  # names may have any number
            raise CheckpointError(
                f"{folder}: has files of ranks {listed(list(map(str, sorted(by_rank))))} of {count}; copy the files of "
                "all ranks to one folder"
            )
        return kind, [by_rank[rank] for rank in range(count)]
    return "", []


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a tensor: values of these sizes, for which its file has so many elements."""

    path: str
    sizes: Shape
    num_elements: int
    values: Callable[[], Expression]
    checksum: Callable[[], object | None]  # equal if ranks have equal values; None if that is not known
    shape: Shape  # of the full tensor
    placements: tuple[Foreign, ...] = ()
    places: Sequence[int] = ()  # of the rank in the groups of the mesh, along each dim


def put_together(folder: str, files: Sequence[TorchObjects], executor: Executor) -> Entries:
    """Return the tensors that the state dicts of all ranks make up, by the keys that lead to them.

    The executor reads small tensors that must be equal, and of which the files have no checksum.
    """
    shards: dict[tuple[str, ...], list[Shard]] = {}
    for file in files:
        if not isinstance(file.tree, dict):
            raise CheckpointError(f"{file.path}: is not the file of a state dict")
        for keys, value in _entries(file):
            if (shard := _shard(file, ".".join(keys), value, len(files))) is not None:
                shards.setdefault(keys, []).append(shard)
    return {keys: full_tensor(folder, ".".join(keys), parts, executor) for keys, parts in shards.items()}


def _entries(file: TorchObjects) -> Iterator[tuple[tuple[str, ...], Tensor | Foreign]]:
    """Yield the tensors and objects of a state dict, and of containers in it, by the keys that lead to them."""
    count, most = itertools.count(1), min(file.nbytes, MAX_PICKLE_NBYTES)  # an entry takes a byte of the pickle

    def entries(container: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor | Foreign]]:
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if not isinstance(key, str | int) or len(above) == MAX_KEYS or next(count) > most:
                raise CheckpointError(
                    f"{file.path}: has a key that is neither text nor a number, containers more than {MAX_KEYS} deep, "
                    "or one container in so many places that its pickle has fewer bytes"
                )
            if isinstance(value, dict | list | tuple):
                yield from entries(value, (*above, str(key)))
            elif isinstance(value, Tensor | Foreign):
                yield (*above, str(key)), value

    return entries(file.tree, ())


def _shard(file: TorchObjects, name: str, value: Tensor | Foreign, num_ranks: int) -> Shard | None:
    """Return what a rank has of a tensor; None if the entry is another object."""
    if "_flat_param" in name:
        raise UnsupportedError(
            f"{file.path}: {name} is a flat parameter of FSDP1, whose cuts are not saved; save with "
            "StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    if isinstance(value, Tensor):
        return _of_file(file, name, value, value.size)
    if value.name == WRAPPER:
        return _dtensor(file, name, value, num_ranks)
    if value.name.startswith(("torch._utils._rebuild", _SHARDED_TENSORS)):
        raise UnsupportedError(
            f"{file.path}: {name}: is a tensor of a kind that is not read by ranges ({value.name:.80})"
        )
    return None


def _dtensor(file: TorchObjects, name: str, value: Foreign, num_ranks: int) -> Shard:
    """Return what a rank has of a DTensor.

    The mesh says where the rank is along each dim, and, in `_flatten_mesh_list` (torch to 2.9) or `_flatten_rank_map`,
    which ranks there are. Process groups number their ranks in ascending order, whatever the mesh does.
    """
    try:
        _, slots = value.state
        spec = slots["_spec"].state
        mesh, placements = spec["mesh"].state, tuple(spec["placements"])
        ranks = mesh["_flatten_rank_map"] if "_flatten_rank_map" in mesh else mesh["_flatten_mesh_list"]
        local, shape, places = slots["_local_tensor"], value.arguments[2], tuple(mesh["_coordinate_on_dim"])
        is_right = isinstance(local, Tensor) and is_shape(shape) and is_shape(places)
        is_right = is_right and len(ranks) <= num_ranks and all(type(rank) is int for rank in ranks)
        is_right = is_right and len(places) == len(placements) and all(isinstance(cut, Foreign) for cut in placements)
        if not is_right:
            raise TypeError("a slot of another type or length")
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file.path}: {name}: is not a DTensor of torch 2.6 to 2.13: {error!r}") from error
    if list(ranks) != sorted(ranks):
        raise UnsupportedError(f"{file.path}: {name}: its mesh has ranks in another order; save it with torch DCP")
    return _of_file(file, name, local, shape, placements, places)


def _of_file(
    file: TorchObjects,
    name: str,
    local: Tensor,
    shape: Shape,
    cuts: tuple[Foreign, ...] = (),
    places: Sequence[int] = (),
) -> Shard:
    values, checksum = partial(file.expression, local, name), partial(file.checksum, local)
    return Shard(file.path, local.size, local.storage.numel, values, checksum, shape, cuts, places)


def full_tensor(folder: str, name: str, shards: Sequence[Shard], executor: Executor) -> BandedTensor:
    """Return the tensor that the shards of all ranks make up, of which those at one place must have equal values."""
    shape, placements = shards[0].shape, [placement.name for placement in shards[0].placements]
    by_place: dict[tuple[int, ...], Shard] = {}
    for shard in shards:
        if (shard.shape, [placement.name for placement in shard.placements]) != (shape, placements):
            raise CheckpointError(
                f"{shard.path}: {name} is of shape {shard.shape} and placed differently than in "
                f"{os.path.basename(shards[0].path)}: the files are of different saves"
            )
        # Along the dims of the mesh that do not cut the tensor all ranks have one place.
        cuts = zip(shard.placements, shard.places, strict=True)
        place = tuple(index for placement, index in cuts if not placement.name.endswith(".Replicate"))
        first = by_place.setdefault(place, shard)
        if first is not shard and 0 not in shard.sizes and not _are_replicas(name, first, shard, executor):
            raise CheckpointError(
                f"{shard.path}: {name} has other values than the same part in "
                f"{os.path.basename(first.path)}: the files do not say what each rank has of it"
            )
    # A mesh dim has as many ranks as places occur along it.
    sizes = [max(along) + 1 for along in zip(*(shard.places for shard in shards), strict=True)]
    tiles = (tile for shard in shards for tile in _tiles(name, shard, sizes, len(shards)))
    return assemble(f"{folder}: {name}", shape, tiles)


def _are_replicas(name: str, one: Shard, other: Shard, executor: Executor) -> bool:
    """Return whether ranks have the same values of one part: each may have experts of its own under one name."""
    checksums = {one.checksum(), other.checksum()}
    if None not in checksums:
        return len(checksums) == 1
    return are_equal(name, one.values(), other.values(), executor)


def _tiles(name: str, shard: Shard, mesh: Sequence[int], num_ranks: int) -> Iterator[Tile]:
    splits = [
        split
        for placement, num_chunks, index in zip(shard.placements, mesh, shard.places, strict=True)
        for split in _split(shard, name, placement, num_chunks, index)
    ]
    if (factor := max((split.split_factor for split in splits), default=1)) > num_ranks:
        raise CheckpointError(
            f"{shard.path}: {name}: its placements cut it into {factor} groups, one for each rank of another dim "
            f"of the mesh, and the mesh has only {num_ranks} ranks"
        )
    grid = grid_of(shard.shape, splits)
    if grid.sizes != shard.sizes and grid.numel + shard.num_elements:
        raise CheckpointError(
            f"{shard.path}: {name}: its local tensor is of shape {shard.sizes}, its placements give {grid.sizes}"
        )
    if not math.prod(shard.shape):
        yield Tile((0,) * len(shard.shape), reshape(shard.values(), shard.shape))
    if not grid.numel:
        return
    local = shard.values()
    # Each piece has an element of its own, unless the file is forged.
    if math.prod(map(len, grid.runs)) > shard.num_elements:
        raise CheckpointError(f"{shard.path}: {name}: has fewer elements than pieces")
    for starts, first, sizes in grid.boxes():
        values = local
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            values = slice_dim(values, dim, start, 1, size)
        yield Tile(first, values)


def _split(shard: Shard, name: str, placement: Foreign, num_chunks: int, index: int) -> Iterator[Split]:
    kind, state = placement.name.rpartition(".")[2], placement.state if isinstance(placement.state, dict) else {}
    if kind == "Replicate":
        return
    dim, factor = state.get("dim"), state.get("split_factor", 1)
    if kind not in ("Shard", "_StridedShard") or type(dim) is not int or type(factor) is not int or factor < 1:
        raise UnsupportedError(f"{shard.path}: {name}: cannot be read by ranges from its placement {kind}")
    dim = dim if dim >= 0 else dim + len(shard.shape)
    if not 0 <= dim < len(shard.shape):
        raise CheckpointError(f"{shard.path}: {name}: is cut along dim {dim} of shape {shard.shape}")
    if factor > 1 and shard.shape[dim] % (factor * num_chunks):
        # Releases of torch cut such a dim differently.
        raise UnsupportedError(
            f"{shard.path}: {name}: dim {dim} of {shard.shape} is cut by _StridedShard into {factor} x "
            f"{num_chunks} parts that are not equal; gather it with the release of torch that saved it"
        )
    yield Split(dim, num_chunks, index, factor)
