"""The files beside the weights: index files of sharded checkpoints, configurations of adapters."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lowmem_load.errors import CheckpointError
from lowmem_load.read.source import LocalFile, read_bytes

MAX_JSON_NBYTES = 64 << 20
"""Bytes of such a file: three times the largest published index. Parsed, it takes up to some ten times that."""

_BLOB = re.compile(r".*/(?:models--[^/]+/blobs/[^/]+|blobs/[0-9a-f]{2}/[0-9a-f]{64})")
"""Where links in the cache of the Hub lead: to a blob of the repository, or (huggingface_hub 1.x) of all of them."""


def check_index(index: str, folder: str | None = None, subfolder: str = "") -> None:
    """Refuse an index that is malformed, or names files outside of its folder.

    An index is untrusted input: transformers joins its names to the folder as they are.

    Args:
        index: path of the index that transformers is about to use.
        folder: local folder that is loaded from; None for a Hub id, whose files the Hub's cache names.
        subfolder: of it, that holds index and weights.

    Raises:
        CheckpointError: names the index, and the tensor or file.
    """
    content = _read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map that gives the file of each tensor")
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f"{index}: has no metadata, which transformers reads; write an empty object")
    of_file = {file if isinstance(file, str) else repr(file): name for name, file in weight_map.items()}
    for file, name in of_file.items():
        what = f"{index}: tensor {name!r} is said to be in {file!r}"
        if not isinstance(weight_map[name], str) or not file or "\0" in file:
            raise CheckpointError(f"{what}, which is no name of a file")
        if os.path.isabs(file) or ".." in Path(file).parts:
            raise CheckpointError(f"{what}, outside of the folder")
        if folder is not None:
            _check_link(os.path.join(folder, subfolder, file), folder, what)


def _check_link(path: str, folder: str, what: str) -> None:
    """Refuse what leads out of `folder` by a link, unless into the cache of the Hub."""
    inside, target = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([inside, target]) != inside and not _BLOB.fullmatch(target):
        raise CheckpointError(
            f"{what}, a link out of the folder, to {target}; load from the folder that holds the files, or copy them"
        )


def base_of_adapter(path: str) -> str:
    """Return the folder or Hub id of the model that the adapter whose configuration is at `path` belongs to.

    Raises:
        CheckpointError: it cannot be read, or names none.
    """
    content = _read_json(path)
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{path}: names no base_model_name_or_path")
    return base


def _read_json(path: str) -> Any:
    """Return what a JSON file holds; it is never waited for, and must not be huge."""
    source = LocalFile(path)
    try:
        if source.nbytes > MAX_JSON_NBYTES:
            raise CheckpointError(f"{path}: has {source.nbytes} bytes, expected at most {MAX_JSON_NBYTES}")
        content = read_bytes(source, 0, source.nbytes)
    finally:
        source.close()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
