"""install(): when it takes effect, what it leaves alone, the order mistakes it reports, and uninstall()."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.multi_rank.test_streaming import global_state
from tests.parity import BF16, FP32, differences
from tests.ranks import run_ranks

STAGE_2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
UNRESOLVED = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}


def order_warnings(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    from lowmem_load import LoadOrderWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(warning.message) for warning in caught if warning.category is LoadOrderWarning]


def follow(path: str) -> dict[str, Any]:
    """Rank function."""
    import deepspeed
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    import lowmem_load
    from lowmem_load.ds.partition import is_partitioned

    def load(**kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)

    def partitioned(model: Any) -> set[bool]:
        return {is_partitioned(parameter) for parameter in model.parameters()}

    found: dict[str, Any] = {}
    before, ordinary_initialize = global_state(), deepspeed.initialize
    lowmem_load.install()
    lowmem_load.install()  # does nothing
    plain, found["warnings of a plain load"] = order_warnings(load)
    found["plain"] = partitioned(plain), partitioned(AutoModelForCausalLM.from_config(plain.config))
    found["name kept"] = AutoModelForCausalLM.from_pretrained.__name__, LlamaForCausalLM.from_pretrained.__name__

    alive = HfDeepSpeedConfig(STAGE_2)
    found["stage 2"] = partitioned(load())
    alive = HfDeepSpeedConfig(UNRESOLVED)
    streamed, found["warnings of a streamed load"] = order_warnings(load)
    found["streamed"] = partitioned(streamed), partitioned(LlamaForCausalLM.from_pretrained(path))
    found["differences"] = differences(streamed, plain, dist.get_rank(), dist.get_world_size())
    found["report"] = lowmem_load.load_report(streamed).ds_config["zero_optimization"]["reduce_bucket_size"]
    found["from_config"] = partitioned(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))
    try:
        load(device_map="auto")
    except lowmem_load.ConfigError as error:
        found["device_map"] = str(error)
    with lowmem_load.streaming(BF16):
        found["streaming in it"] = {str(p.dtype) for p in load().parameters()}
        try:
            lowmem_load.uninstall()
        except lowmem_load.ConfigError as error:
            found["uninstall in streaming"] = str(error)

    del alive
    gc.collect()
    dropped, found["warnings of a dropped config"] = order_warnings(load)
    found["dropped"] = partitioned(dropped)
    unset_hf_deepspeed_config()
    found["warnings after unset"] = order_warnings(load)[1]

    def initialize(model: Any, config: dict[str, Any]) -> list[str]:
        engine, messages = order_warnings(lambda: deepspeed.initialize(model=model, config=config)[0])
        engine.destroy()
        return messages

    found["initialize streamed"] = initialize(streamed, FP32)
    found["initialize stage 0"] = initialize(load(), {**STAGE_2, "zero_optimization": {"stage": 0}})
    found["initialize whole"] = initialize(dropped, FP32)
    found["initialize partition"] = order_warnings(
        lambda: lowmem_load.initialize(load(), FP32, partition="model", optimizer=torch.optim.AdamW)
    )[1]

    lowmem_load.uninstall()
    lowmem_load.uninstall()  # does nothing
    found["restored"] = global_state() == before and deepspeed.initialize is ordinary_initialize
    found["alive"] = HfDeepSpeedConfig(FP32)
    with lowmem_load.streaming():
        found["streaming()"] = partitioned(load())
    del found["alive"]
    found["restored by streaming()"] = global_state()[:4] == before[:4]
    return found


def test_install_follows_the_active_configuration(checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for found in run_ranks(follow, str(path)):
        assert found["warnings of a plain load"] == []
        assert found["plain"] == ({False}, {False})
        assert found["name kept"] == ("from_pretrained", "from_pretrained")
        assert found["stage 2"] == {False}
        assert found["warnings of a streamed load"] == []
        assert found["streamed"] == ({True}, {True})
        assert found["differences"] == []
        assert found["report"] == 32 * 32
        assert found["from_config"] == {True}
        assert "remove device_map" in found["device_map"]
        assert found["streaming in it"] == {"torch.bfloat16"}
        assert "call it after the block" in found["uninstall in streaming"]
        assert found["dropped"] == {False}
        [message] = found["warnings of a dropped config"]
        assert "keep it in a variable" in message
        assert found["warnings after unset"] == []
        assert found["initialize streamed"] == []
        assert found["initialize stage 0"] == []
        [message] = found["initialize whole"]
        assert "every rank holds 0.1 MiB of it whole" in message
        assert "then call from_pretrained" in message
        assert found["initialize partition"] == []
        assert found["restored"] is True
        assert found["streaming()"] == {True}
        assert found["restored by streaming()"] is True


def test_install_inside_a_streaming_block_is_refused() -> None:
    import lowmem_load

    with lowmem_load.streaming(), pytest.raises(lowmem_load.ConfigError, match="before or after the block"):
        lowmem_load.install()
    before = global_state()
    lowmem_load.install()
    assert global_state() != before
    lowmem_load.uninstall()
    assert global_state() == before


def model_before_arguments(model_path: str, out: str) -> dict[str, Any]:
    """Rank function: the mistake that Trainer's documentation warns of, then the same with the right order."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import lowmem_load
    from benchmarks.pipeline_worker import import_example

    common = import_example("common")
    lowmem_load.install()
    model = AutoModelForCausalLM.from_pretrained(model_path)
    arguments = TrainingArguments(
        out,
        deepspeed=str(common.DS_CONFIG),
        max_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        accelerator_config=common.accelerator_config(),
    )
    row = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    wrong = Trainer(model=model, args=arguments, train_dataset=[row] * 16)
    _, messages = order_warnings(wrong.train)

    right = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_path),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    import deepspeed

    config = {**FP32, "train_micro_batch_size_per_gpu": 1}
    return {"wrong": messages, "lora": order_warnings(lambda: deepspeed.initialize(model=right, config=config))[1]}


@pytest.mark.slow
def test_a_model_before_its_training_arguments_is_reported(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    for found in run_ranks(model_before_arguments, str(path), str(tmp_path)):
        [message] = found["wrong"]
        assert message.startswith("LlamaForCausalLM: every rank holds")
        assert "First make TrainingArguments(deepspeed=...)" in message
        assert found["lora"] == []
