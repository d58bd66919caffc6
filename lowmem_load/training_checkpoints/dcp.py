"""Opens checkpoints of torch DCP: `.metadata` with `.distcp` files.

Accelerate, Trainer, axolotl, LLaMA-Factory, torchtitan, NeMo and Megatron's torch_dist write them. `.metadata` says
which chunk of which tensor lies where. It is a pickle of plain classes, which are read by name and never made.

Source: torch 2.6 to 2.13 `distributed/checkpoint/metadata.py`, `filesystem.py`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.files.inert_pickle import Foreign, is_shape, objects
from lowmem_load.files.torch_zip import ZippedTensors
from lowmem_load.planning.expression import Shape
from lowmem_load.planning.proof import prove_names
from lowmem_load.text import fingerprint, key_of
from lowmem_load.training_checkpoints.saved_state import Entries, Files, Tile, assemble, check_written_before

METADATA = ".metadata"

MAX_KEYS = 16
"""Dicts and lists within each other in a state dict."""

_PACKAGE = "torch.distributed.checkpoint"

_Places: TypeAlias = "Mapping[tuple[str, bytes], tuple[str, int, int]]"
"""File, first byte and number of bytes of each chunk, by name and first index."""


class Chunk(NamedTuple):
    """A block of a tensor: its first index and its size along each dim, and where its bytes lie."""

    offsets: Shape
    sizes: Shape
    file: str  # of the folder
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint. `keys` lead to it in the state dict that was saved."""

    name: str
    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


def open_dcp(files: Files) -> Entries:
    """Return the tensors of a folder with a `.metadata`. Reads a KiB of each chunk, and no weights."""
    path, pickled = files.metadata(METADATA)
    saved = read_metadata(path, pickled)
    by_file: dict[str, list[tuple[SavedTensor, Chunk]]] = {}
    for tensor in saved.values():
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.file, []).append((tensor, chunk))
    prove_names(path, saved, {name: tensor.keys for name, tensor in saved.items()})
    tiles: dict[str, list[Tile]] = {name: [] for name in saved}
    zips = ZippedTensors()
    for name, chunks in sorted(by_file.items()):
        chunks.sort(key=lambda item: item[1].start)
        end = max(chunk.start + chunk.nbytes for _, chunk in chunks)
        digest = fingerprint(f"{tensor.name} {chunk}" for tensor, chunk in chunks)
        what, advice = f"{len(chunks)} chunks of weights", "copy the files of all ranks to one folder"
        source = files.raw(name, end, what, advice, digest)
        heads = [(source, chunk.start, chunk.nbytes, tensor.name) for tensor, chunk in chunks]
        for (tensor, chunk), values in zip(chunks, files.each(lambda head: zips.find(*head), heads), strict=True):
            if (values.shape, values.dtype) != (chunk.sizes, tensor.dtype):
                raise CheckpointError(
                    f"{source.path}: {tensor.name}: is {values.dtype} of shape {values.shape} at byte "
                    f"{chunk.start}, where .metadata says {tensor.dtype} of shape {chunk.sizes}: another save "
                    "has written one of them"
                )
            tiles[tensor.name].append(Tile(chunk.offsets, values))
    check_written_before(files.opened[0], files.opened[1:])
    return {
        tensor.keys: assemble(f"{files.folder}: {name}", tensor.shape, tiles[name]) for name, tensor in saved.items()
    }


# -- .metadata ---------------------------------------------------------------------------------------------------------


def read_metadata(path: str, pickled: bytes) -> dict[str, SavedTensor]:
    """Return the tensors of which a `.metadata` tells, by name. Other entries are left out."""
    compact: dict[str, Callable[[Any], Any]] = {
        f"{_PACKAGE}.metadata.ChunkStorageMetadata": itemgetter("offsets", "sizes"),
        f"{_PACKAGE}.metadata.MetadataIndex": _index_state,
        f"{_PACKAGE}.filesystem._StorageInfo": _storage_state,
    }
    # The list of a tensor's chunks makes nine objects of 34 bytes for a chunk that has one dim.
    tree = objects(pickled, path, nbytes_per_object=3, compact=compact)
    try:
        state = _state(tree, "Metadata")
        places = _places(path, state["storage_data"])
        keys_of = state.get("planner_data") or {}
        tensors, num_chunks = {}, 0
        for name, entry in state["state_dict_metadata"].items():
            name.encode()  # raises for a lone surrogate
            if entry.name.endswith(".BytesStorageMetadata"):
                continue
            num_chunks += len(_state(entry, "TensorStorageMetadata")["chunks"])
            if num_chunks > len(places):  # tensors may share one long list
                raise CheckpointError(f"{path}: has more chunks than places for them")
            tensors[name] = _tensor(path, name, _keys(keys_of.get(name, name)), entry, places)
    except (CheckpointError, UnsupportedError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not metadata of a torch DCP checkpoint: {reprlib.repr(error)}") from error
    return tensors


def _state(value: Any, kind: str) -> dict[str, Any]:
    match value:
        case Foreign(name=name, state=dict(state)) if name.startswith(_PACKAGE) and name.endswith(f".{kind}"):
            return state
    raise TypeError(f"expected a {kind} with its state")


def _index_state(state: Any) -> tuple[str, Shape | None]:
    name, offset = state["fqn"], state.get("offset")
    if not isinstance(name, str) or not (offset is None or is_shape(offset)):  # other keys may take for ever to compare
        raise TypeError("an index without a name or an offset")
    name.encode()  # raises for a lone surrogate
    return name, offset


def _storage_state(state: Any) -> tuple[str, int, int, bool]:
    return state["relative_path"], state["offset"], state["length"], bool(state.get("transform_descriptors"))


def _places(path: str, storage_data: Mapping[Any, Any]) -> _Places:
    places: dict[tuple[str, bytes], tuple[str, int, int]] = {}
    for index, info in storage_data.items():
        name, offset = index.state
        key = name, key_of(offset)
        if key in places:
            raise CheckpointError(f"{path}: has two places for the chunk of {name:.80} at {offset}")
        file, start, nbytes, is_transformed = info.state
        if not isinstance(file, str) or not file or "/" in file or "\\" in file or file in (".", ".."):
            raise CheckpointError(f"{path}: names {reprlib.repr(file)} as one of its files, which is not in its folder")
        if not (type(start) is int and type(nbytes) is int and start >= 0 and nbytes >= 0):
            raise CheckpointError(f"{path}: {name:.80} has no bytes in {file}")
        if is_transformed:
            raise UnsupportedError(
                f"{path}: {name:.80} was saved with transform_descriptors (compressed or encrypted), which cannot be "
                "read by ranges; save it again with a FileSystemWriter without extensions"
            )
        places[key] = file, start, nbytes
    return places


def _keys(keys: Any) -> tuple[str, ...]:
    keys = keys if isinstance(keys, tuple) else (keys,)
    if not 0 < len(keys) <= MAX_KEYS or not all(isinstance(key, str | int) for key in keys):
        raise TypeError("keys that are neither text nor numbers, too many, or none")
    return tuple(map(str, keys))


def _tensor(path: str, name: str, keys: tuple[str, ...], entry: Any, places: _Places) -> SavedTensor:
    state = _state(entry, "TensorStorageMetadata")
    dtype, shape = state["properties"].state[0], state["size"]
    if not isinstance(dtype, torch.dtype) or not is_shape(shape):
        raise TypeError(f"{reprlib.repr(name)} has no dtype or shape")
    chunks = []
    for chunk in state["chunks"]:
        offsets, sizes = chunk.state
        if not is_shape(offsets) or not is_shape(sizes) or not len(offsets) == len(sizes) == len(shape):
            raise TypeError(f"{reprlib.repr(name)} has a chunk without place or size in shape {shape}")
        if (place := places.get((name, key_of(offsets)))) is None:
            raise CheckpointError(f"{path}: {name}: no file has the chunk at {offsets} of shape {sizes}")
        chunks.append(Chunk(offsets, sizes, *place))
    return SavedTensor(name, keys, dtype, shape, tuple(chunks))
