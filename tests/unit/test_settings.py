"""What a load goes by is read once, resolved once, and passed down."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn

from lowmem_load import load_model, plan
from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.errors import ConfigError
from tests import builders

ZERO_3: dict[str, Any] = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}}


def read(world_size: int = 2, partition: Partition | None = None, **sections: Any) -> Settings:
    return read_settings({**ZERO_3, **sections}, world_size=world_size, partition=partition)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_the_callers_dict_is_neither_changed_nor_kept() -> None:
    config = copy.deepcopy(ZERO_3)
    settings = read_settings(config, world_size=2).for_model(SimpleNamespace(hidden_size=8))
    assert config == ZERO_3
    config["zero_optimization"]["stage"] = 0
    assert settings.ds_config["zero_optimization"]["stage"] == settings.stage == 3


def test_what_depends_on_the_model_is_resolved_with_it_and_once() -> None:
    settings = read()
    resolved = settings.for_model(SimpleNamespace(hidden_size=8))
    assert resolved.ds_config["zero_optimization"]["reduce_bucket_size"] == 64
    assert resolved.for_model(SimpleNamespace(hidden_size=9)) == resolved
    assert settings.ds_config["zero_optimization"]["reduce_bucket_size"] == "auto"
    with pytest.raises(ConfigError, match=r"reduce_bucket_size.*no hidden_size"):
        settings.for_model(None)


def test_ranks_compare_what_they_were_given_by_key() -> None:
    same = read(zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/on/node1"}})
    other = read(zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/on/node2"}})
    assert same.compared == other.compared
    different = [
        same,
        read(zero_optimization={"stage": 3, "offload_param": {"device": OffloadDeviceEnum.cpu}}),
        read(),
        read(bf16={"enabled": True}, fp16={"enabled": "auto"}),
        read(partition="model"),
        read(train_batch_size=4),
    ]
    assert different[1].offload_device == "cpu"
    assert len({str(settings.compared) for settings in different}) == len(different)
    assert same.compared == {
        "ds_config bf16.enabled": '"auto"',
        "ds_config zero_optimization.stage": "3",
        "ds_config zero_optimization.offload_param.device": '"nvme"',
        "ds_config zero_optimization.offload_param.nvme_path": '""',
        "precision": "bfloat16",
        "partition": "of the full model",
    }
    assert read(flops_profiler={}).compared["ds_config flops_profiler"] == "{}"
    assert len(read(tags=["x"] * 99).compared["ds_config tags"]) == 16


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_stage_3_takes_a_partition(stage: int) -> None:
    with pytest.raises(ConfigError, match=f"partition needs ZeRO stage 3, the ds_config has stage {stage}"):
        read(partition=["model"], zero_optimization={"stage": stage})


# -- predicates ------------------------------------------------------------------------------------------------------


def test_a_predicate_is_asked_once_for_each_module(checkpoints: Path, lone_process: None) -> None:
    asked: Counter[str] = Counter()

    def predicate(name: str, _: nn.Module) -> bool:
        asked[name] += 1
        return name == "model.layers.1" or name.startswith("lm_")

    path = builders.tiny_llama(checkpoints)
    model = load_model(path, ZERO_3, partition=[predicate])
    names = [name for name, _ in model.named_modules() if name]
    assert asked == dict.fromkeys(names, 1)
    asked.clear()
    plan(path, ZERO_3, rank=0, world_size=2, partition=predicate)
    assert asked == dict.fromkeys(names, 1)
