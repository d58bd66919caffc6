"""Checkpoints of compressed-tensors, dequantized on load: every rank has the bytes of the ordinary load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("compressed_tensors", reason="an optional package of transformers")

import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

import lowmem_load
from lowmem_load.api import plan_model as stages
from lowmem_load.errors import UnsupportedError
from lowmem_load.io.executor import Executor
from lowmem_load.pipeline.make_plan import Planned
from lowmem_load.planning.regions import FlatRange

# transformers says so whenever `dequantize` is asked for of a checkpoint that has a quantization_config
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by tensor": ("float-quantized", {**FLOAT8, "strategy": "tensor"}),
    "fp8 by channel": ("float-quantized", {**FLOAT8, "strategy": "channel"}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}


def compressed(folder: Path, config: Any, name: str) -> Path:
    """Writes a random model whose projections are compressed by one of `SCHEMES`."""
    format_name, arguments = SCHEMES[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=format_name)
    compressor, tensors = BaseCompressor.get_value_from_registry(format_name), {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            tensors[key] = weight
            continue
        for suffix, tensor in compressor.compress(
            {"weight": weight, **_scales(weight, scheme.weights)}, scheme
        ).items():
            tensors[key.removesuffix("weight") + suffix] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _scales(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
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


def loading() -> dict[str, Any]:
    return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


@pytest.mark.parametrize("name", SCHEMES)
def test_all_ranks_have_the_bytes_of_the_ordinary_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compressed(tmp_path, transformers.LlamaConfig(**SIZES), name)
    ordinary = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **loading())
    expected = {key: value.detach().view(-1).view(torch.int16) for key, value in ordinary.named_parameters()}
    made: list[Planned] = []
    make_plan = stages.make_plan
    monkeypatch.setattr(stages, "make_plan", lambda *args: made.append(make_plan(*args)) or made[-1])
    for world_size in (1, 2, 3, 7):
        for rank in range(world_size):
            plan = lowmem_load.plan(folder, DS_CONFIG, rank=rank, world_size=world_size, **loading())
            with Executor() as executor:
                for target in plan.targets:
                    fill, region = target.destinations[0].fill, target.destinations[0].region
                    assert fill is not None and isinstance(region, FlatRange)
                    memory = torch.empty(fill.numel, dtype=target.dtype)
                    executor.fill(fill, memory, plan.values, made[-1].constants)
                    executor.finish()
                    assert torch.equal(memory.view(torch.int16), expected[target.name][region.start : region.end])
    assert bool(plan.slow_paths) == (name in ("int4", "nvfp4")), "codes are unpacked one whole weight at a time"


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=64, num_experts_per_tok=2)
    folder = compressed(tmp_path, config, "fp8 by tensor")
    with pytest.raises(UnsupportedError, match="dequantizes the experts of this model whole"):
        lowmem_load.plan(folder, DS_CONFIG, rank=0, world_size=2, **loading())
