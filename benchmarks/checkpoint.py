"""Random Llama checkpoints for the benchmarks."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lowmem_load.models.model_folder import files_of

# The shape of the model is chosen from these widths; depth fills up to the wanted parameter count.
HIDDEN_SIZES = (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8192)
MAX_LAYERS = 32
VOCAB_SIZE = 32_000
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class ModelShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int


class SourceTensor(NamedTuple):
    """One tensor in a shard file; `byte_offset` is absolute in the file."""

    name: str
    path: Path
    numel: int
    byte_offset: int
    nbytes: int


def shape_for(num_params: int) -> ModelShape:
    """Return the narrowest shape of at most MAX_LAYERS layers that has about `num_params` parameters."""
    for hidden in HIDDEN_SIZES:
        intermediate = hidden * 11 // 4
        layer_numel = 4 * hidden * hidden + 3 * hidden * intermediate
        num_layers = max(1, round((num_params - 2 * VOCAB_SIZE * hidden) / layer_numel))
        if num_layers <= MAX_LAYERS:
            return ModelShape(hidden, intermediate, num_layers, num_heads=max(1, hidden // 128))
    raise ValueError(f"--params {num_params}: more than the largest shape of this benchmark holds")


@contextmanager
def checkpoint_of(num_params: int) -> Iterator[Path]:
    """Write a bf16 checkpoint of about `num_params` parameters, and remove it in the end."""
    cache = REPOSITORY / ".cache" / "benchmarks"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"llama-{num_params}-", dir=cache) as folder:
        print(f"checkpoint: writing {folder}", file=sys.stderr, flush=True)
        _write_checkpoint(shape_for(num_params), Path(folder))
        yield Path(folder)


def _write_checkpoint(shape: ModelShape, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="500MB")
    for file in shard_files(path):
        # Dirty pages cannot be dropped by --cold, and their write-back would run into the first measurement.
        with file.open("rb") as written:
            os.fsync(written.fileno())


def shard_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def read_headers(path: Path) -> list[SourceTensor]:
    """Return all tensors of a checkpoint in file order, read from the safetensors headers."""
    return [tensor for file in shard_files(path) for tensor in _read_header(file)]


def _read_header(path: Path) -> list[SourceTensor]:
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_nbytes))
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors.append(SourceTensor(name, path, math.prod(entry["shape"]), 8 + header_nbytes + start, end - start))
    return sorted(tensors, key=lambda tensor: tensor.byte_offset)


def warm_page_cache(path: Path) -> None:
    """Read every file of weights once, so that each method finds it in the page cache."""
    memory = bytearray(8 << 20)
    for weights in files_of(str(path)):
        with open(weights, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def drop_page_cache(path: Path) -> None:
    """Ask the kernel to drop the cached pages of every file of weights (a hint, which needs no privileges)."""
    for weights in files_of(str(path)):
        with open(weights, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
