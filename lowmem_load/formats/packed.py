"""What is known of a checkpoint file, as few bytes: how one rank of a node tells the others, who need not open it.

[Note: packed] JSON with a list for each property of the tensors instead of an object for each tensor, shapes and dtypes
once: read seven times as fast as the headers of DeepSeek-V3, whose tensors are checked one by one. What is checked here
again is that every tensor lies in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.formats.format import CheckpointFile
from lowmem_load.planning.expression import Source

_PLAIN = (("nbytes", int), ("digest", str), ("version", str))
_LISTS = (("names", str), ("starts", int), ("kinds", int))


def pack(file: CheckpointFile) -> bytes:
    """Return what `unpack` makes an equal description of; nothing for a file in which not every name is a tensor."""
    starts: list[int] = []
    kinds: list[int] = []
    known: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
    for name in file.names:
        try:
            source = file.expression(name)
        except UnsupportedError:  # an error only for whoever uses it
            return b""
        if not isinstance(source, Source) or source.name != name:  # a view of a storage, or another's name
            return b""
        starts.append(source.start)
        kinds.append(known.setdefault((source.dtype, source.shape), len(known)))
    content = {
        "nbytes": file.nbytes,
        "digest": file.digest,
        "version": file.version,
        "metadata": file.metadata,
        "names": file.names,
        "starts": starts,
        "kinds": kinds,
        "of_kinds": [[str(dtype).removeprefix("torch."), shape] for dtype, shape in known],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def unpack(path: str, content: bytes) -> CheckpointFile:
    """Return the description that was packed, of the file at `path`.

    Raises:
        CheckpointError: it is malformed, or describes a tensor that does not lie in the file.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its packed description is no JSON: {error}") from error
    if not _is_well_formed(fields):
        raise CheckpointError(f"{path}: its packed description is malformed")
    of_kinds = [(getattr(torch, name), tuple(shape)) for name, shape in fields["of_kinds"]]
    names, starts, kinds, nbytes = fields["names"], fields["starts"], fields["kinds"], fields["nbytes"]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in of_kinds]
    if any(start + sizes[kind] > nbytes for start, kind in zip(starts, kinds, strict=True)):
        raise CheckpointError(f"{path}: its packed description has tensors beyond its {nbytes} bytes")
    places = {name: place for place, name in enumerate(names)}

    def expression(name: str) -> Source:
        place = places[name]
        dtype, shape = of_kinds[kinds[place]]
        return Source(path, name, starts[place], shape, dtype)

    return CheckpointFile(
        path, nbytes, fields["digest"], fields["version"], tuple(names), fields["metadata"], expression
    )


def _is_well_formed(fields: Any) -> bool:
    names = {*(name for name, _ in (*_PLAIN, *_LISTS)), "metadata", "of_kinds"}
    if not isinstance(fields, dict) or fields.keys() != names:
        return False
    lists, of_kinds = {name: fields[name] for name, _ in _LISTS}, fields["of_kinds"]
    if not all(type(fields[name]) is kind for name, kind in _PLAIN) or not isinstance(of_kinds, list):
        return False
    if not all(isinstance(lists[name], list) and set(map(type, lists[name])) <= {kind} for name, kind in _LISTS):
        return False
    return (
        all(_is_kind(kind) for kind in of_kinds)
        and _is_metadata(fields["metadata"])
        and len(set(lists["names"])) == len(lists["names"]) == len(lists["starts"]) == len(lists["kinds"])
        and min(lists["starts"], default=0) >= 0
        and min(lists["kinds"], default=0) >= 0
        and max(lists["kinds"], default=-1) < len(of_kinds)
    )


def _is_kind(kind: Any) -> bool:
    if not isinstance(kind, list) or len(kind) != 2:
        return False
    name, shape = kind
    is_dtype = isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)
    return is_dtype and isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _is_metadata(metadata: Any) -> bool:
    is_text = isinstance(metadata, Mapping) and all(isinstance(value, str) for value in metadata.values())
    return metadata is None or is_text
