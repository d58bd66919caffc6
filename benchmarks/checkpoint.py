"""Random Llama and Qwen3-MoE checkpoints for the benchmark: written shard file by shard file, kept, and reused."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lowmem_load.bench import page_cache

# Small enough that writing a checkpoint never holds more than this in memory.
MAX_SHARD_FILE_BYTES = 500_000_000
# The shape of the model is chosen from these widths; depth fills up to the wanted parameter count.
HIDDEN_SIZES = (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8192)
MAX_LAYERS = 32
VOCAB_SIZE = 32_000
SPEC_FILE = "benchmark_spec.json"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a random Llama model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = VOCAB_SIZE
    num_experts: int = 0  # 0: Llama; else Qwen3-MoE, whose files hold one tensor per expert and projection
    format_version: int = 1  # raise it when write_checkpoint writes other bytes, so that old files are not reused


class SourceTensor(NamedTuple):
    """One tensor in a shard file; `byte_offset` is absolute in the file."""

    name: str
    path: Path
    dtype: str
    numel: int
    byte_offset: int
    nbytes: int


def shape_for(num_params: int, family: str) -> ModelShape:
    """Return the narrowest shape of at most MAX_LAYERS layers that has about `num_params` parameters."""
    if family == "qwen3-moe":
        hidden, intermediate, num_experts = 1024, 384, 32
        layer_numel = 4 * hidden * hidden + 3 * hidden * intermediate * num_experts
        num_layers = max(1, round((num_params - 2 * VOCAB_SIZE * hidden) / layer_numel))
        return ModelShape(hidden, intermediate, num_layers, num_heads=8, num_experts=num_experts)
    for hidden in HIDDEN_SIZES:
        intermediate = hidden * 11 // 4
        layer_numel = 4 * hidden * hidden + 3 * hidden * intermediate
        num_layers = max(1, round((num_params - 2 * VOCAB_SIZE * hidden) / layer_numel))
        if num_layers <= MAX_LAYERS:
            return ModelShape(hidden, intermediate, num_layers, num_heads=max(1, hidden // 128))
    raise ValueError(f"--params {num_params}: more than the largest shape of this benchmark holds")


@contextmanager
def checkpoint_of(
    num_params: int, cache: Path, keep: bool, log: Callable[[str], None], family: str = "llama"
) -> Iterator[Path]:
    """Give a bf16 checkpoint of about `num_params` parameters; one that was not there before goes again unless kept."""
    path = cache / f"{family}-{num_params}"
    existed = (path / SPEC_FILE).exists()
    try:
        yield _ensure_checkpoint(shape_for(num_params, family), path, log)
    finally:
        if not keep and not existed:
            shutil.rmtree(path, ignore_errors=True)


def _ensure_checkpoint(shape: ModelShape, path: Path, log: Callable[[str], None]) -> Path:
    spec_path = path / SPEC_FILE
    if spec_path.exists() and json.loads(spec_path.read_text()) == asdict(shape):
        log(f"checkpoint: reusing {path}")
        return path
    if path.exists() and not spec_path.exists():
        raise FileExistsError(
            f"{path}: exists and was not written by this benchmark; remove it or choose another --cache"
        )
    log(f"checkpoint: writing {path}")
    unfinished = path.with_name(path.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _write_checkpoint(shape, unfinished)
    (unfinished / SPEC_FILE).write_text(json.dumps(asdict(shape)))
    # Only files that this benchmark wrote (they carry its spec file) are ever replaced.
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    return path


def _write_checkpoint(shape: ModelShape, path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {"num_experts": shape.num_experts, "moe_intermediate_size": shape.intermediate_size, "head_dim": 128}
    config = (Qwen3MoeConfig if experts else LlamaConfig)(
        **experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(path)
    with torch.device("meta"):  # names and shapes only: the weights are made one tensor at a time
        skeleton = AutoModelForCausalLM.from_config(config)
    shapes = _in_files({name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()})
    groups = list(_group_by_bytes(shapes))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: _random_weight(name, shapes[name], generator) for name in names}
        save_file(tensors, path / file_name, metadata={"format": "pt"})
        _sync(path / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(_numel(shape_) for shape_ in shapes.values()) * 2
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _in_files(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors as files on the Hub hold them: experts apart, gate and up projections apart."""
    apart: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        prefix, _, kind = name.rpartition(".")
        if prefix.endswith("experts") and kind == "gate_up_proj":
            for expert, half in ((e, h) for e in range(shape[0]) for h in ("gate_proj", "up_proj")):
                apart[f"{prefix}.{expert}.{half}.weight"] = (shape[1] // 2, shape[2])
        elif prefix.endswith("experts") and kind == "down_proj":
            for expert in range(shape[0]):
                apart[f"{prefix}.{expert}.down_proj.weight"] = shape[1:]
        else:
            apart[name] = shape
    return apart


def _random_weight(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    # Weights of norms lie around one, as in a trained model, so that the training steps see ordinary losses.
    centre = 1.0 if name.endswith("norm.weight") else 0.0
    return torch.randn(shape, generator=generator).mul_(0.02).add_(centre).to(torch.bfloat16)


def _group_by_bytes(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    group: list[str] = []
    group_bytes = 0
    for name, shape in shapes.items():
        nbytes = _numel(shape) * 2
        if group and group_bytes + nbytes > MAX_SHARD_FILE_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += nbytes
    yield group


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel


def _sync(path: Path) -> None:
    # Dirty pages cannot be dropped by --cold, and their write-back would run into the first measurement.
    with path.open("rb") as file:
        os.fsync(file.fileno())


def shard_files(path: Path) -> list[Path]:
    """Return the shard files of a checkpoint in name order."""
    return sorted(path.glob("*.safetensors"))


def read_headers(path: Path) -> list[SourceTensor]:
    """Return all tensors of a checkpoint in file order, read from the safetensors headers."""
    return [tensor for file in shard_files(path) for tensor in _read_header(file)]


def _read_header(path: Path) -> list[SourceTensor]:
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_nbytes))
    header.pop("__metadata__", None)
    data_start = 8 + header_nbytes
    tensors = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        numel = _numel(tuple(entry["shape"]))
        tensors.append(SourceTensor(name, path, entry["dtype"], numel, data_start + start, end - start))
    return sorted(tensors, key=lambda tensor: tensor.byte_offset)


def warm_page_cache(path: Path) -> None:
    """Read every shard file once, so that each method finds it in the page cache."""
    page_cache.warm(shard_files(path))


def drop_page_cache(path: Path) -> None:
    """Ask the kernel to drop the cached pages of every shard file (a hint, which needs no privileges)."""
    page_cache.drop(shard_files(path))


def cached_bytes(path: Path) -> int:
    """Return how many bytes of the shard files the page cache holds, whole pages."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    total = 0
    for file_path in shard_files(path):
        with file_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            is_cached = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            start = ctypes.c_char.from_buffer(mapped)
            status = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), is_cached)
            del start  # or the mapping could not be closed
            if status:
                raise OSError(ctypes.get_errno(), f"mincore of {file_path}")
            total += sum(flag & 1 for flag in bytes(is_cached)) * mmap.PAGESIZE
    return total
