"""Published models as sparse checkpoints: true config.json, index and safetensors headers, and a hole for the data.

A checkpoint of 671 B parameters takes some megabytes of disk, the headers', and can be described and planned like the
original. Whatever is read from it is zero.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.published import MODELS
from benchmarks.published_tensors import ITEM_NBYTES, Tensor, tensors_of


def write(model: str, folder: str | os.PathLike[str], num_layers: int | None = None) -> Path:
    """Write a model of `MODELS` as a sparse checkpoint into `folder`, which is made, and return the folder.

    Args:
        model: a key of `MODELS`.
        folder: on a file system that keeps holes; files with the same names are replaced.
        num_layers: only that many of its layers, for tests. Multi-token prediction layers keep their published place,
            which is where transformers knows to ignore them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    published = MODELS[model]
    config = dict(published.config)
    shards = list(_cut(tensors_of(config, num_layers), published.max_shard_bytes))
    if num_layers is not None:
        text = config
        if "text_config" in config:
            text = config["text_config"] = dict(config["text_config"])
        text["num_hidden_layers"] = num_layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_sparse(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total_size = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def _cut(tensors: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Yield what goes into each shard file: as many of the next tensors as fit, as `save_pretrained` does."""
    shard: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if shard and nbytes + tensor.nbytes > max_bytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(tensor)
        nbytes += tensor.nbytes
    yield shard


def _write_sparse(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file whose header is complete and whose data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The library's own order: wide dtypes first, which aligns all of them, then by name.
    for tensor in sorted(tensors, key=lambda tensor: (-ITEM_NBYTES[tensor.dtype], tensor.name)):
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
