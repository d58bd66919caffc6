"""Opens checkpoint folders and shard files: indexes and headers only, nothing mapped."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.safetensors import PREFIX_NBYTES, Header, header_nbytes, parse_header
from lowmem_load.planning.expression import Source


def check_indexes(folder: str) -> None:
    """Refuse index files (`*.index.json`) of `folder` that are malformed or name files outside of it.

    An index is untrusted input: transformers joins its names to the folder as they are.

    Raises:
        CheckpointError: names the index, and the tensor or file.
    """
    indexes = [*Path(folder).glob("*.safetensors.index*.json"), *Path(folder).glob("*.bin.index*.json")]
    for index in sorted(indexes):
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{index}: cannot be read: {error}") from error
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: has no weight_map that gives the file of each tensor")
        for name, file in weight_map.items():
            if not isinstance(file, str) or os.path.isabs(file) or ".." in Path(file).parts:
                raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file!r}, outside of the folder")


def base_of_adapter(path: str) -> str:
    """Return the folder or Hub id of the model that the adapter whose configuration is at `path` belongs to.

    Raises:
        CheckpointError: it cannot be read, or names none.
    """
    try:
        base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{path}: names no base_model_name_or_path")
    return base


def read_header(path: str) -> Header:
    """Read and validate the header of the safetensors file at `path`.

    Raises:
        CheckpointError: the file cannot be opened.
        HeaderError: the header is malformed.
        TruncatedFileError: the file is shorter than its header promises.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            nbytes = header_nbytes(file.read(PREFIX_NBYTES), path, file_nbytes)
            return parse_header(_read_fully(file.fileno(), nbytes), path, file_nbytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def source(path: str, header: Header, name: str) -> Source:
    """Return tensor `name` of the file at `path` as a leaf of expressions."""
    entry = header.tensors[name]
    return Source(path, name, entry.start, entry.shape, entry.dtype)


def _read_fully(descriptor: int, nbytes: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < nbytes:
        piece = os.pread(descriptor, nbytes - len(pieces), PREFIX_NBYTES + len(pieces))
        if not piece:
            break
        pieces += piece
    return bytes(pieces)
