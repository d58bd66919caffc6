"""The file `.metadata` of a torch DCP checkpoint: which chunk of which tensor lies where in which file.

It is a pickle of plain classes, which are read by name and never made. Source: torch 2.6 to 2.13
`distributed/checkpoint/metadata.py` and `filesystem.py` (`_StorageInfo`).
"""

from __future__ import annotations

import hashlib
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.formats.inert_pickle import Foreign, is_shape, objects
from lowmem_load.io.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Shape

MAX_METADATA_NBYTES = 256 << 20
"""Bytes of the file: a chunk takes about 190, so this is 1.4 million chunks."""

MAX_KEYS = 16
"""Dicts and lists within each other in a state dict."""

_PACKAGE = "torch.distributed.checkpoint"


class Place(NamedTuple):
    """Where the bytes of a chunk lie: in a file of the folder, from `start` on."""

    file: str
    start: int
    nbytes: int


class Chunk(NamedTuple):
    """A block of a tensor: its first index and its size along each dim."""

    offsets: Shape
    sizes: Shape
    place: Place


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint. `keys` lead to it in the state dict that was saved."""

    name: str
    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What `.metadata` says of tensors. Entries of other kinds, such as an optimizer's settings, are left out."""

    tensors: Mapping[str, SavedTensor]
    nbytes: int
    digest: str


def read_metadata(source: ByteSource) -> DcpMetadata:
    """Return what the `.metadata` of a checkpoint says.

    Raises:
        CheckpointError: it is malformed or too large, or lacks the place of a chunk.
        UnsupportedError: chunks are compressed or encrypted.
    """
    path, nbytes = source.path, source.nbytes
    if nbytes > MAX_METADATA_NBYTES:
        raise CheckpointError(f"{path}: has {nbytes} bytes, expected at most {MAX_METADATA_NBYTES}")
    pickled = read_bytes(source, 0, nbytes)
    compact = {
        f"{_PACKAGE}.metadata.ChunkStorageMetadata": _chunk_state,
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
            name.encode()  # a lone surrogate is no name
            if entry.name.endswith(".BytesStorageMetadata"):
                continue
            num_chunks += len(_state(entry, "TensorStorageMetadata")["chunks"])
            if num_chunks > len(places):  # tensors may share one long list
                raise CheckpointError(f"{path}: has more chunks than places for them")
            tensors[name] = _tensor(path, name, _keys(keys_of.get(name, name)), entry, places)
    except (CheckpointError, UnsupportedError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no metadata of a torch DCP checkpoint: {reprlib.repr(error)}") from error
    return DcpMetadata(tensors, nbytes, hashlib.sha256(pickled).hexdigest()[:16])


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Foreign) or not value.name.startswith(_PACKAGE) or not value.name.endswith(f".{kind}"):
        raise TypeError(f"expected a {kind}")
    if not isinstance(value.state, dict):
        raise TypeError(f"a {kind} without state")
    return value.state


def _chunk_state(state: Any) -> tuple[Shape, Shape]:
    return state["offsets"], state["sizes"]


def _index_state(state: Any) -> tuple[str, Shape | None]:
    name, offset = state["fqn"], state.get("offset")
    if not isinstance(name, str) or not (offset is None or is_shape(offset)):  # other keys may take for ever to compare
        raise TypeError("an index without a name or an offset")
    name.encode()  # a lone surrogate is no name
    return name, offset


def _storage_state(state: Any) -> tuple[str, int, int, bool]:
    return state["relative_path"], state["offset"], state["length"], bool(state.get("transform_descriptors"))


def _places(path: str, storage_data: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], Place]:
    places: dict[tuple[str, Shape | None], Place] = {}
    for index, info in storage_data.items():
        if index.state in places:
            raise CheckpointError(f"{path}: has two places for the chunk of {index.state[0]:.80} at {index.state[1]}")
        places[index.state] = _place(path, index, info)
    return places


def _place(path: str, index: Any, info: Any) -> Place:
    file, start, nbytes, is_transformed = info.state
    if not isinstance(file, str) or not file or "/" in file or "\\" in file or file in (".", ".."):
        raise CheckpointError(f"{path}: names {reprlib.repr(file)} as one of its files, which is no name in its folder")
    if not (type(start) is int and type(nbytes) is int and start >= 0 and nbytes >= 0):
        raise CheckpointError(f"{path}: {index.state[0]:.80} has no bytes in {file}")
    if is_transformed:
        raise UnsupportedError(
            f"{path}: {index.state[0]:.80} was saved with transform_descriptors (compressed or encrypted), which "
            "cannot be read by ranges; save it again with a FileSystemWriter without extensions"
        )
    return Place(file, start, nbytes)


def _keys(keys: Any) -> tuple[str, ...]:
    keys = keys if isinstance(keys, tuple) else (keys,)
    if len(keys) > MAX_KEYS or not all(isinstance(key, str | int) for key in keys):
        raise TypeError("keys that are neither text nor numbers, or too many")
    return tuple(map(str, keys))


def _tensor(
    path: str, name: str, keys: tuple[str, ...], entry: Any, places: Mapping[tuple[str, Shape | None], Place]
) -> SavedTensor:
    state = _state(entry, "TensorStorageMetadata")
    dtype, shape = state["properties"].state[0], state["size"]
    if not isinstance(dtype, torch.dtype) or not is_shape(shape):
        raise TypeError(f"{reprlib.repr(name)} has no dtype or shape")
    chunks = []
    for chunk in state["chunks"]:
        offsets, sizes = chunk.state
        if not is_shape(offsets) or not is_shape(sizes):
            raise TypeError(f"{reprlib.repr(name)} has a chunk without place or size")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{path}: {name}: a chunk of {len(sizes)} dims in a tensor of shape {shape}")
        if (name, offsets) not in places:
            raise CheckpointError(f"{path}: {name}: no file has the chunk at {offsets} of shape {sizes}")
        place = places[name, offsets]
        if math.prod(sizes) * dtype.itemsize > place.nbytes:
            raise CheckpointError(
                f"{path}: {name}: the chunk at {offsets} of shape {sizes} has {place.nbytes} bytes in {place.file}, "
                "too few for it"
            )
        chunks.append(Chunk(offsets, sizes, place))
    return SavedTensor(name, keys, dtype, shape, tuple(chunks))
