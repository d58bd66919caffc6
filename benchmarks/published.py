"""Published models as sparse checkpoints: true config.json, index and safetensors headers, and a hole for the data.

A checkpoint of 671 B parameters takes some megabytes of disk, for its headers. It can be described and planned like the
original. All data that is read from it is zero. The configurations are those of benchmarks/models.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ITEM_NBYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


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
    """

    num_tensors: int
    num_parameters: int
    max_shard_bytes: int
    config: Mapping[str, Any]


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
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_NBYTES[self.dtype]


def write(model: str, folder: Path) -> Path:
    """Write a model of `MODELS` as a sparse checkpoint into `folder`, which is made, and return the folder.

    Args:
        model: a key of `MODELS`.
        folder: on a file system that keeps holes; files with the same names are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    published = MODELS[model]
    (folder / "config.json").write_text(json.dumps(published.config, indent=2))
    shards = list(_cut(tensors_of(published.config), published.max_shard_bytes))
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


def tensors_of(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of the checkpoint that has this config.json, in the order of the modules."""
    if "vision_config" in config:
        yield from _vision_language(config)
        return
    layers = _LAYERS[config["model_type"]]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    num_published = config["num_hidden_layers"]
    tensors = [_bf16("model.embed_tokens", vocab, hidden)]
    for layer in range(num_published):
        tensors += layers(config, layer)
    tensors += [_bf16("model.norm", hidden), _bf16("lm_head", vocab, hidden)]
    for layer in range(num_published, num_published + config.get("num_nextn_predict_layers", 0)):
        tensors += _multi_token_prediction(config, layer)
    quantization = config.get("quantization_config", {})
    yield from _in_fp8(tensors, quantization) if quantization.get("quant_method") == "fp8" else tensors


def _bf16(module: str, *shape: int) -> Tensor:
    return Tensor(f"{module}.weight", "BF16", shape)


def _llama_layer(config: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}"
    yield from _attention(config, prefix, config["hidden_size"] // config["num_attention_heads"])
    yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
    yield from _layer_norms(config, prefix)


def _qwen3_moe_layer(config: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    prefix, head_dim = f"model.layers.{layer}", config["head_dim"]
    yield from _attention(config, prefix, head_dim)
    yield _bf16(f"{prefix}.self_attn.q_norm", head_dim)
    yield _bf16(f"{prefix}.self_attn.k_norm", head_dim)
    yield _bf16(f"{prefix}.mlp.gate", config["num_experts"], config["hidden_size"])
    for expert in range(config["num_experts"]):
        yield from _mlp(config, f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
    yield from _layer_norms(config, prefix)


def _deepseek_v3_layer(config: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}"
    yield from _latent_attention(config, f"{prefix}.self_attn")
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
    else:
        num_experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        yield _bf16(f"{prefix}.mlp.gate", num_experts, config["hidden_size"])
        yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (num_experts,))
        for expert in range(num_experts):
            yield from _mlp(config, f"{prefix}.mlp.experts.{expert}", width)
        yield from _mlp(config, f"{prefix}.mlp.shared_experts", width * config["n_shared_experts"])
    yield from _layer_norms(config, prefix)


def _gpt_oss_layer(config: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    prefix, hidden, width = f"model.layers.{layer}", config["hidden_size"], config["intermediate_size"]
    num_experts, group = config["num_local_experts"], 32  # values that share a scale, two to a byte
    for weight in _attention(config, prefix, config["head_dim"]):
        yield weight
        yield Tensor(weight.name.replace(".weight", ".bias"), "BF16", weight.shape[:1])
    yield Tensor(f"{prefix}.self_attn.sinks", "BF16", (config["num_attention_heads"],))
    yield _bf16(f"{prefix}.mlp.router", num_experts, hidden)
    yield Tensor(f"{prefix}.mlp.router.bias", "BF16", (num_experts,))
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        groups = columns // group
        yield Tensor(f"{prefix}.mlp.experts.{name}_blocks", "U8", (num_experts, rows, groups, group // 2))
        yield Tensor(f"{prefix}.mlp.experts.{name}_scales", "U8", (num_experts, rows, groups))
        yield Tensor(f"{prefix}.mlp.experts.{name}_bias", "BF16", (num_experts, rows))
    yield from _layer_norms(config, prefix)


def _vision_language(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of a Qwen3-VL mixture of experts, whose experts are stacked and transposed in the file."""
    text, vision = config["text_config"], config["vision_config"]
    hidden, width, num_experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield _bf16("model.language_model.embed_tokens", text["vocab_size"], hidden)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{layer}"
        yield from _attention(text, prefix, text["head_dim"])
        yield _bf16(f"{prefix}.self_attn.q_norm", text["head_dim"])
        yield _bf16(f"{prefix}.self_attn.k_norm", text["head_dim"])
        yield _bf16(f"{prefix}.mlp.gate", num_experts, hidden)
        yield Tensor(f"{prefix}.mlp.experts.gate_up_proj", "BF16", (num_experts, hidden, 2 * width))
        yield Tensor(f"{prefix}.mlp.experts.down_proj", "BF16", (num_experts, width, hidden))
        yield from _layer_norms(text, prefix)
    yield _bf16("model.language_model.norm", hidden)
    yield _bf16("lm_head", text["vocab_size"], hidden)
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    pixels = (vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield from _with_bias("model.visual.patch_embed.proj", size, *pixels)
    yield _bf16("model.visual.pos_embed", vision["num_position_embeddings"], size)
    for layer in range(vision["depth"]):
        prefix = f"model.visual.blocks.{layer}"
        for name, *shape in (("norm1", size), ("norm2", size), ("attn.qkv", 3 * size, size), ("attn.proj", size, size)):
            yield from _with_bias(f"{prefix}.{name}", *shape)
        yield from _with_bias(f"{prefix}.mlp.linear_fc1", inner, size)
        yield from _with_bias(f"{prefix}.mlp.linear_fc2", size, inner)
    merged = size * vision["spatial_merge_size"] ** 2
    mergers = [("model.visual.merger", size)]
    mergers += [(f"model.visual.deepstack_merger_list.{i}", merged) for i in range(3)]
    for prefix, normed in mergers:
        yield from _with_bias(f"{prefix}.norm", normed)
        yield from _with_bias(f"{prefix}.linear_fc1", merged, merged)
        yield from _with_bias(f"{prefix}.linear_fc2", vision["out_hidden_size"], merged)


def _with_bias(module: str, *shape: int) -> Iterator[Tensor]:
    yield _bf16(module, *shape)
    yield Tensor(f"{module}.bias", "BF16", shape[:1])


_LAYERS = {
    "llama": _llama_layer,
    "qwen3_moe": _qwen3_moe_layer,
    "deepseek_v3": _deepseek_v3_layer,
    "gpt_oss": _gpt_oss_layer,
}


def _multi_token_prediction(config: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    """Yield a multi-token prediction layer of DeepSeek-V3, with its copies of the embedding and the head."""
    prefix, hidden, vocab = f"model.layers.{layer}", config["hidden_size"], config["vocab_size"]
    yield _bf16(f"{prefix}.embed_tokens", vocab, hidden)
    yield _bf16(f"{prefix}.enorm", hidden)
    yield _bf16(f"{prefix}.hnorm", hidden)
    yield _bf16(f"{prefix}.eh_proj", hidden, 2 * hidden)
    yield from _deepseek_v3_layer(config, layer)
    yield _bf16(f"{prefix}.shared_head.norm", hidden)
    yield _bf16(f"{prefix}.shared_head.head", vocab, hidden)


def _attention(config: Mapping[str, Any], prefix: str, head_dim: int) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield _bf16(f"{prefix}.self_attn.q_proj", queries, hidden)
    yield _bf16(f"{prefix}.self_attn.k_proj", keys, hidden)
    yield _bf16(f"{prefix}.self_attn.v_proj", keys, hidden)
    yield _bf16(f"{prefix}.self_attn.o_proj", hidden, queries)


def _latent_attention(config: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield _bf16(f"{prefix}.q_a_proj", q_rank, hidden)
    yield _bf16(f"{prefix}.q_a_layernorm", q_rank)
    yield _bf16(f"{prefix}.q_b_proj", heads * (nope + rope), q_rank)
    yield _bf16(f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield _bf16(f"{prefix}.kv_a_layernorm", kv_rank)
    yield _bf16(f"{prefix}.kv_b_proj", heads * (nope + values), kv_rank)
    yield _bf16(f"{prefix}.o_proj", hidden, heads * values)


def _mlp(config: Mapping[str, Any], prefix: str, width: int) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    yield _bf16(f"{prefix}.gate_proj", width, hidden)
    yield _bf16(f"{prefix}.up_proj", width, hidden)
    yield _bf16(f"{prefix}.down_proj", hidden, width)


def _layer_norms(config: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    yield _bf16(f"{prefix}.input_layernorm", config["hidden_size"])
    yield _bf16(f"{prefix}.post_attention_layernorm", config["hidden_size"])


def _in_fp8(tensors: Iterable[Tensor], quantization: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors with the projections of layers in fp8, each followed by the scales of its blocks."""
    for tensor in tensors:
        # In bf16 stay norms, embeddings, heads, the experts' gate and eh_proj.
        if "_proj" not in tensor.name or "eh_proj" in tensor.name:
            yield tensor
            continue
        yield tensor._replace(dtype="F8_E4M3")
        # A last block may be partial: kv_a_proj_with_mqa has 576 rows, 4.5 blocks.
        blocks = [
            -(-size // block) for size, block in zip(tensor.shape, quantization["weight_block_size"], strict=True)
        ]
        yield Tensor(f"{tensor.name}_scale_inv", "F32", tuple(blocks))
