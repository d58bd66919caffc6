"""Checkpoints whose weights are quantized, written as published ones are."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by tensor": ("float-quantized", {**FLOAT8, "strategy": "tensor"}),
    "fp8 by channel": ("float-quantized", {**FLOAT8, "strategy": "channel"}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}
"""Format and arguments of compressed-tensors."""


def write_fp8(folder: Path) -> dict[str, Any]:
    """Writes weights as float8 with one scale per block, as DeepSeek stores them; returns the quantization_config."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 101, "head_dim": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    tensors = _saved(folder, config)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().reshape(rows // 64, 64, columns // 64, 64)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
    return _write(folder, tensors, quantization)


def write_mxfp4(folder: Path) -> dict[str, Any]:
    """Writes experts as 4-bit codes, two to a byte, with one scale for 32 of them, as gpt-oss stores them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 101, "num_local_experts": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tensors, generator = _saved(folder, transformers.GptOssConfig(**sizes, **heads, **special)), torch.Generator()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(110, 140, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
    return _write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def _saved(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    """Writes a random model; returns its tensors."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> dict[str, Any]:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": quantization}))
    return quantization


def write_compressed(folder: Path, config: Any, name: str) -> None:
    """Writes a random model whose projections are compressed by one of `SCHEMES`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format_name, arguments = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=format_name)
    compressor, tensors = BaseCompressor.get_value_from_registry(format_name), {}
    for key, weight in _saved(folder, config).items():
        if not key.endswith("_proj.weight"):
            tensors[key] = weight
            continue
        for suffix, tensor in compressor.compress(
            {"weight": weight, **_scales(weight, scheme.weights)}, scheme
        ).items():
            tensors[key.removesuffix("weight") + suffix] = tensor.contiguous()
    quantization = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    _write(folder, tensors, quantization)


def _scales(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    values = weight.float().abs()
    if args.strategy == "tensor":
        return {"weight_scale": (values.max() / 448).reshape(1).bfloat16()}
    if args.strategy == "channel":
        return {"weight_scale": (values.amax(1, keepdim=True) / 448).bfloat16()}
    groups = values.reshape(len(values), -1, args.group_size).amax(-1)
    if args.type == "int":
        return {"weight_scale": (groups / 7).bfloat16()}
    whole = 448 * 6 / values.max()
    return {"weight_scale": groups / 6 * whole, "weight_global_scale": whole.reshape(1)}
