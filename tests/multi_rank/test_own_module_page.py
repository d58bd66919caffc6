"""The code of docs/howto/own_module.md runs as it is written, on two ranks, with small checkpoints under its names."""

import json
import os
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowmem_load
from lowmem_load.distributed.process_group import DistributedInterface
from tests.model_digest import differing
from tests.multi_rank import test_parts as parts
from tests.multi_rank.test_diffusers import SETTINGS, adapted
from tests.multi_rank.test_own_modules import Z3
from tests.ranks import REPO, run_ranks

PAGE = REPO / "docs" / "howto" / "own_module.md"
LLM, VISION = "meta-llama/Llama-3.1-8B", "google/siglip-so400m-patch14-384"


class Policy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(8)


def write(folder: Path, checkpoints: Path) -> dict[str, str]:
    """Returns the Hub ids of the page and what is there in their place."""
    (folder / "checkpoint").mkdir()
    state = policy().state_dict()
    save_file(state, folder / "checkpoint" / "model.safetensors")
    gamma = {f"net.{name}".replace(".weight", ".gamma"): tensor for name, tensor in state.items()}
    torch.save(gamma, folder / "last.pth")
    config = {
        **Z3,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    paths = parts.write(folder, checkpoints)
    return {LLM: paths["llm"], VISION: paths["vision"]}


def write_diffusers(folder: Path) -> None:
    import diffusers

    diffusers.FluxTransformer2DModel(**SETTINGS["FluxTransformer2DModel"]).save_pretrained(
        folder / "folder/transformer"
    )
    settings = {"num_attention_heads": 2, "attention_head_dim": 4, "out_channels": 8, "num_layers": 1, "sample_size": 8}
    vae, scheduler = diffusers.AutoencoderKL(**SETTINGS["AutoencoderKL"]), diffusers.DDIMScheduler()
    pipe = diffusers.DiTPipeline(diffusers.DiTTransformer2DModel(**settings, num_embeds_ada_norm=8), vae, scheduler)
    pipe.save_pretrained(folder / "pipeline")


def blocks(part: int, names: dict[str, str]) -> list[str]:
    """Returns the blocks of code of a part of the page: 0, of any module, or 1, of diffusers."""
    text = PAGE.read_text(encoding="utf-8").split("\n## diffusers\n")[part].replace('"cuda"', '"cpu"')
    for name, path in names.items():
        text = text.replace(name, path)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def start(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    rank = DistributedInterface().rank
    return {
        "deepspeed": deepspeed,
        "fully_shard": fully_shard,
        "lowmem_load": lowmem_load,
        "torch": torch,
        "rank": rank,
    }


def run_blocks_of_modules(folder: str, names: dict[str, str]) -> None:
    values = start(folder) | {"Policy": Policy, "config": 8}
    code = blocks(0, names)
    assert len(code) == 4
    paths = {"llm": names[LLM], "vision": names[VISION]}
    for number, block in enumerate(code):
        if number == 2:
            values["model"] = parts.on_meta(paths)
            torch.manual_seed(0)  # the projector is initialised
        elif number == 3:
            exec(code[0], values)  # another model in shards
        exec(block, values)
        assert not differing(values["model"], parts.stock(paths) if number == 2 else policy()), block


def run_blocks_of_diffusers(folder: str) -> None:
    import diffusers

    values = start(folder) | {"mesh": init_device_mesh("cpu", (2,))}
    values |= {name: getattr(diffusers, name) for name in ("DiffusionPipeline", "FluxPipeline")}
    for block in blocks(1, {}):
        if "iter_weights" in block:
            adapted(values["model"])
        exec(block, values)
    torch.distributed.barrier()
    whole = diffusers.FluxTransformer2DModel.from_pretrained("folder/transformer", torch_dtype=torch.bfloat16)
    saved = diffusers.FluxTransformer2DModel.from_pretrained("out", torch_dtype=torch.bfloat16)
    assert not differing(saved, whole)
    transformer = diffusers.DiTTransformer2DModel.from_pretrained("pipeline/transformer")
    assert not differing(values["pipe"].transformer, transformer)
    whole.load_lora_adapter("lora", adapter_name="default", weight_name="pytorch_lora_weights.safetensors")
    assert not differing(values["model"], whole)


def test_code_of_modules_runs(tmp_path: Path, checkpoints: Path) -> None:
    run_ranks(run_blocks_of_modules, str(tmp_path), write(tmp_path, checkpoints), timeout_s=240)


def test_code_of_diffusers_runs(tmp_path: Path, checkpoints: Path) -> None:
    pytest.importorskip("diffusers")
    write(tmp_path, checkpoints)
    write_diffusers(tmp_path)
    run_ranks(run_blocks_of_diffusers, str(tmp_path), timeout_s=240)
