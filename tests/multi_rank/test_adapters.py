"""Adapters whose initialisation reads or changes the weights that they adapt: loaded as an ordinary load does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowmem_load import load_model, plan
from lowmem_load.distributed.process_group import DistributedInterface
from tests import builders
from tests.multi_rank.test_plan import Case, differing, executed_plans
from tests.parity import FP32, differences
from tests.ranks import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "olora": {"init_lora_weights": "olora"},
    "pissa": {"init_lora_weights": "pissa"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "dora": {"use_dora": True},
    "saved modules": {"modules_to_save": ["lm_head"]},
}


def make_adapters(path: str, folder: str) -> None:
    """Rank function, for PEFT and transformers warn of each other."""
    from peft import LoraConfig, get_peft_model

    for name, options in KINDS.items():
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(path)
        model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "up_proj"], r=2, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) / 10)
        model.save_pretrained(f"{folder}/{name}")


def load_adapters(folder: str) -> None:
    for name in KINDS:
        torch.manual_seed(0)
        model = load_model(f"{folder}/{name}", FP32, auto_class="AutoModelForCausalLM")
        torch.manual_seed(0)
        ordinary = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)
        assert differences(model, ordinary) == [], name
        assert any("lora_" in parameter for parameter, _ in model.named_parameters()), name


def plan_adapters(loads: dict[str, Case]) -> None:
    group = DistributedInterface()
    for name, executed in executed_plans(loads).items():
        path, config, kwargs = loads[name]
        planned = plan(path, config, rank=group.rank, world_size=group.world_size, **kwargs)
        assert next(differing(executed, planned), None) is None, name


@pytest.fixture(scope="module")
def adapters(checkpoints: Path) -> Path:
    folder = checkpoints / "adapters"
    run_ranks(make_adapters, str(builders.tiny_llama(checkpoints, torch.float32)), str(folder), world_size=1)
    return folder


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.release), 2])
def test_adapters_equal_the_ordinary_load(adapters: Path, world_size: int) -> None:
    run_ranks(load_adapters, str(adapters), world_size=world_size, timeout_s=180)


@pytest.mark.parametrize(
    "kinds",
    [("plain", "pissa", "dora"), pytest.param(("olora", "orthogonal", "saved modules"), marks=pytest.mark.release)],
)
def test_they_are_planned_as_they_are_loaded(adapters: Path, kinds: tuple[str, ...]) -> None:
    auto_class = {"auto_class": "AutoModelForCausalLM"}
    run_ranks(plan_adapters, {name: (str(adapters / name), FP32, auto_class) for name in kinds})
