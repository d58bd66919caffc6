"""Names of files of weights, and the JSON files next to them: indexes, configurations of models and adapters."""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
from typing import Any

from lowmem_load.errors import CheckpointError, listed
from lowmem_load.files.source import LocalFile, read_bytes

MAX_JSON_NBYTES = 64 << 20
"""Bytes of such a file: three times the largest published index. Parsed, it takes up to ten times as much."""

MAX_COUNT, MAX_LABELS = 1 << 14, 1 << 20
"""Largest number of layers or experts, and of labels, in a config.json. transformers makes lists of this length."""

WEIGHTS = (
    *("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
)
"""Files of weights and indexes that transformers and diffusers look for; see `of_variant`."""

_COUNTS = re.compile(r"(?:\A|_)(?:layers?|experts?|blocks?|stages?|depths?|heads?|codebooks?|quantizers?|labels)\Z")
"""Keys of a config.json that count something."""


def of_variant(file: str, variant: str | None) -> str:
    """Return the name that a file of weights, or an index, has for a `variant` of `from_pretrained`."""
    stem, _, end = file.rpartition(".")
    return f"{stem}.{variant}.{end}" if variant else file


def check_index(index: str, *, needs_metadata: bool = True) -> None:
    """Refuse an index that is malformed or names files outside of its folder: transformers does not check."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map that gives the file of each tensor")
    if needs_metadata and not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f"{index}: has no metadata, which transformers reads; write an empty object")
    for name, file in weight_map.items():
        is_name = _is_file_name(file)
        if not is_name or os.path.isabs(file) or ".." in file.split("/"):
            what = "outside of the folder" if is_name else "which is not a name of a file"
            raise CheckpointError(f"{index}: tensor {name!r} is said to be in {reprlib.repr(file)}, {what}")


def check_files(index: str) -> None:
    """Refuse an index that names files which its folder lacks."""
    folder, names = os.path.dirname(index), set(read_json(index)["weight_map"].values())
    if missing := sorted(file for file in names if not os.path.isfile(os.path.join(folder, file))):
        what = f"{len(missing)} of {len(names)} files are missing that it names: {listed(missing, 3)}"
        raise CheckpointError(f"{index}: {what}; copy or download them")


def _is_file_name(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def base_of_adapter(path: str) -> str:
    """Return the folder or Hub id of an adapter's base model, given the path of the adapter's configuration."""
    content = read_json(path)
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{path}: lacks a base_model_name_or_path that names its base model")
    return base


def check_model_config(path: str, least_count: int = 0) -> None:
    """Refuse a config.json with impossible counts, before its library makes millions of modules."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object {{...}}, got {reprlib.repr(config)}")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) and name for name in names)):
        raise CheckpointError(f"{path}: architectures: expected a list of class names, got {reprlib.repr(names)}")
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += ((key, item) for item in value)
        elif isinstance(value, int) and _COUNTS.search(key):
            is_number = key.startswith(("num_", "n_"))  # other keys count layers from the end
            most = MAX_LABELS if key.endswith("labels") else MAX_COUNT
            least = least_count if is_number else -most
            if not least <= value <= most:
                raise CheckpointError(f"{path}: {key}: expected {least} to {most}, got {reprlib.repr(value)}")


def read_json(path: str) -> Any:
    """Return the content of a JSON file. It must be a regular file of limited size."""
    with contextlib.closing(LocalFile(path)) as source:
        if source.nbytes > MAX_JSON_NBYTES:
            raise CheckpointError(f"{path}: has {source.nbytes} bytes, expected at most {MAX_JSON_NBYTES}")
        content = read_bytes(source, 0, source.nbytes)
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
