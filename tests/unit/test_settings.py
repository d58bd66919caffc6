"""What a load goes by is read once, resolved once, and passed down."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn
from transformers import EncoderDecoderConfig, GPT2Config, ResNetConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

from lowmem_load import load_model, plan
from lowmem_load.config.settings import Partition, Settings, hidden_size_of, read_settings
from lowmem_load.errors import ConfigError
from tests import builders
from tests.unit.test_ds_config import HF_ZERO3

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


# -- "auto", and what is left of an active ds_config for a load --------------------------------------------------------


TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def resolve(config: dict[str, Any], world_size: int = 4, hidden_size: int | None = 64) -> dict[str, Any]:
    before = copy.deepcopy(config)
    try:
        resolved = Settings(config, 3, torch.bfloat16, world_size).for_model(SimpleNamespace(hidden_size=hidden_size))
    finally:
        assert config == before, "the settings that were to be resolved have changed"
    return dict(resolved.ds_config)


# ---- Settings.for_model


def test_trainer_resolves_to_the_same() -> None:
    args = SimpleNamespace(
        world_size=4, per_device_train_batch_size=8, gradient_accumulation_steps=1, max_grad_norm=1.0,
        learning_rate=5e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        save_on_each_node=False, fp16=False, fp16_full_eval=False, bf16=True, bf16_full_eval=False,
        get_warmup_steps=lambda _: 0,
    )  # fmt: skip
    trainer = HfTrainerDeepSpeedConfig(HF_ZERO3)
    try:
        trainer.trainer_config_process(args)
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
        trainer.trainer_config_finalize(args, model, num_training_steps=10)
    finally:
        unset_hf_deepspeed_config()
    ours = resolve(HF_ZERO3)
    for section in ("optimizer", "scheduler"):
        del ours[section], trainer.config[section]
    assert ours == trainer.config


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        # (train, micro, steps) with 4 ranks; None is absent and stays absent
        (("auto", "auto", "auto"), (32, 8, 1)),
        ((64, "auto", 8), (64, 2, 8)),  # 64 / (8 * 4)
        (("auto", 2, 3), (24, 2, 3)),  # 2 * 3 * 4
        (("auto", None, None), (32, None, None)),
        ((64, 4, None), (64, 4, None)),
        ((None, None, "auto"), (None, 1, 1)),
    ],
)
def test_batch_sizes(given_sizes: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    config = {key: size for key, size in zip((TRAIN, MICRO, STEPS), given_sizes, strict=True) if size is not None}
    resolved = resolve(config)
    assert tuple(resolved.get(key) for key in (TRAIN, MICRO, STEPS)) == expected


def test_the_precision_is_explicit_and_other_keys_of_its_sections_stay() -> None:
    resolved = resolve({"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"check_grad_overflow": False}, MICRO: 1})
    assert resolved["fp16"] == {"enabled": False, "loss_scale": 0}
    assert resolved["bf16"] == {"enabled": True, "check_grad_overflow": False}


def test_sequence_parallel_ranks_share_samples() -> None:
    resolved = resolve({TRAIN: "auto", MICRO: 2, "sequence_parallel_size": 2})
    assert resolved[TRAIN] == 4  # 2 * 1 * (4 / 2)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size: expected a divisor of the 4 rank\(s\), got 3"):
        resolve({MICRO: 2, "sequence_parallel_size": 3})


def test_all_unresolvable_keys_are_one_error() -> None:
    config = copy.deepcopy(HF_ZERO3)
    config["zero_optimization"]["offload_param"]["device"] = "auto"
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = "auto"
    config["data_efficiency"] = {"metrics": [{"name": "seqlen"}, {"name": "auto"}, ["auto"]]}
    config["fp16"]["loss_scale"] = "auto"
    config["steps_per_print"] = "auto"
    config |= {TRAIN: 0, MICRO: "8", STEPS: True}
    with pytest.raises(ConfigError) as caught:
        resolve(config, hidden_size=None)
    first, *lines = str(caught.value).splitlines()
    assert first == "ds_config: 12 key(s) cannot be resolved"
    assert {line.split(":")[0] for line in lines} == {
        *("- train_batch_size", "- train_micro_batch_size_per_gpu", "- gradient_accumulation_steps"),
        "- zero_optimization.reduce_bucket_size",
        "- zero_optimization.stage3_prefetch_bucket_size",
        "- zero_optimization.stage3_param_persistence_threshold",
        "- zero_optimization.offload_param.device",
        "- zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "- data_efficiency.metrics[1].name",
        "- data_efficiency.metrics[2][0]",
        "- fp16.loss_scale",
        "- steps_per_print",
    }
    assert all("write " in line or 'expected a positive integer or "auto", got ' in line for line in lines)
    assert any("the model config has no hidden_size; write a number of elements" in line for line in lines)


def test_what_deepspeed_itself_calls_auto_stays() -> None:
    config = {
        "data_types": {"keep_in_fp32_modules": "auto"},
        "zero_optimization": {"stage": 3, "zenflow": {"select_strategy": "auto"}},
        "expert_parallel": {"enabled": True, "top_k": "auto"},
        MICRO: 1,
    }
    resolved = resolve(config)
    assert {key: resolved[key] for key in config} == config
    assert for_loading(config)["data_types"] == config["data_types"]
    with pytest.raises(ConfigError, match=r"- data_types\.grad_accum_dtype: cannot be resolved"):
        resolve({"data_types": {"grad_accum_dtype": "auto"}})


@pytest.mark.parametrize(
    "config",
    [
        HF_ZERO3,
        {"zero_optimization": {"stage": 3}, TRAIN: "auto", STEPS: "auto"},
        {"zero_optimization": {"stage": 3, "zenflow": {"select_strategy": "auto"}}, MICRO: "auto"},
    ],
)
def test_deepspeed_accepts_the_resolved_config(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    resolved = resolve(config, world_size=1)
    accepted = DeepSpeedConfig(copy.deepcopy(resolved))
    assert accepted.zero_optimization_stage == 3
    assert accepted.bfloat16_config.enabled
    assert not accepted.float16_config.enabled
    assert accepted.train_micro_batch_size_per_gpu == resolved.get(MICRO, 8)
    assert accepted.gradient_accumulation_steps == resolved.get(STEPS, 1)
    assert accepted.zero_config.reduce_bucket_size == resolved["zero_optimization"].get("reduce_bucket_size", 5e8)


# ---- hidden_size_of


def refuse_text_config() -> None:
    raise ValueError("Multiple valid text configs were found")


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        (SimpleNamespace(hidden_size=64), 64),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=(16, 24))), 24),
        (SimpleNamespace(hidden_size=64, text_config=SimpleNamespace(hidden_size=48)), 64),
        (SimpleNamespace(hidden_size=None, text_config=SimpleNamespace(hidden_size=48)), 48),
        (SimpleNamespace(hidden_sizes=[]), None),
        (SimpleNamespace(get_text_config=refuse_text_config), None),
        (None, None),
        (GPT2Config(n_embd=48), 48),
        (ResNetConfig(hidden_sizes=[8, 24, 16, 8]), 24),
        (EncoderDecoderConfig.from_encoder_decoder_configs(GPT2Config(n_embd=48), GPT2Config(n_embd=80)), 80),
    ],
)
def test_hidden_size_of(model_config: Any, expected: int | None) -> None:
    assert hidden_size_of(model_config) == expected


def for_loading(config: dict[str, Any]) -> Any:
    """What is left of a ds_config that a training loop has yet to complete."""
    return read_settings(config, world_size=1, is_active=True).ds_config


def active() -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto",
            "offload_param": {"device": "cpu", "pin_memory": "auto"},
        },
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "steps_per_print": 5,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "train_batch_size": 3,  # of a training loop that counts one rank
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": "auto",
    }


def test_keeps_what_loading_reads() -> None:
    given = active()
    assert for_loading(given) == {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
        "bf16": {},
        "gradient_clipping": "auto",
        "steps_per_print": 5,
        "train_micro_batch_size_per_gpu": 1,
    }
    assert given == active()
