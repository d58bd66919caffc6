"""The files beside the weights: index files of sharded checkpoints, configurations of adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lowmem_load.errors import CheckpointError


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
