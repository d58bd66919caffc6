"""Published models as sparse checkpoints: true config.json, index and safetensors headers, and a hole for the data.

A checkpoint of 671 B parameters takes some megabytes of disk, for its headers. It can be described and planned like the
original. All data that is read from it is zero. The configurations are those of benchmarks/models.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lowmem_load.files.safetensors import DTYPES
from lowmem_load.models.saver import SavedFile
from lowmem_load.planning.expression import Source
from lowmem_load.weights_out.weight_files import lay_out


@dataclass(frozen=True, slots=True)
class Published:
    """A published model.

    Attributes:
        num_tensors: tensors in all of its files.
        num_parameters: elements of the parameters of the model that transformers builds. So multi-token prediction
            layers (they make the 671 B of DeepSeek-V3 685 B), scales, and its routers' biases, which are buffers, do
            not count.
        max_shard_bytes: how large its shard files may be.
        config: its config.json.
        tensors: patterns of names, with dtypes and shapes; see `tensors_of`.
    """

    num_tensors: int
    num_parameters: int
    max_shard_bytes: int
    config: Mapping[str, Any]
    tensors: Sequence[str]


MODELS = {
    path.stem: Published(**json.loads(path.read_text(encoding="utf-8")))
    for path in sorted(Path(__file__).with_name("models").glob("*.json"))
}


class Tensor(NamedTuple):
    """A tensor of a checkpoint; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write(model: str, folder: Path) -> Path:
    """Write a model of `MODELS` as a sparse checkpoint into `folder`, which is made, and return the folder.

    Args:
        model: a key of `MODELS`.
        folder: on a file system that keeps holes; files with the same names are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    published = MODELS[model]
    (folder / "config.json").write_text(json.dumps(published.config, indent=2))
    shards = list(_cut(tensors_of(published.tensors), published.max_shard_bytes))
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
    kinds = {each.name: Source("", each.name, 0, each.shape, DTYPES[each.dtype]) for each in tensors}
    layout = lay_out(SavedFile(path.name, kinds, {"format": "pt"}))
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)


def tensors_of(patterns: Iterable[str]) -> list[Tensor]:
    """Return the tensors of patterns such as "layers.{0-3}.experts.{0-7}.weight BF16 [8,4]", layer by layer."""
    found: list[Tensor] = []
    for pattern in patterns:
        name, dtype, shape = pattern.split()
        ranges = [range(int(first), int(last) + 1) for first, last in re.findall(r"\{(\d+)-(\d+)\}", name)]
        template = re.sub(r"\{.*?\}", "{}", name)
        found += [
            Tensor(template.format(*numbers), dtype, tuple(json.loads(shape))) for numbers in itertools.product(*ranges)
        ]
    return sorted(found, key=lambda tensor: int("".join(re.findall(r"\.(\d+)\.", tensor.name)[:1]) or -1))
