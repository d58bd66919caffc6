"""install(): when it takes effect, what it leaves alone, the order mistakes it reports, and uninstall()."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

import lowmem_load
from lowmem_load import LoadOrderWarning
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.integrations.install import streaming, uninstall
from tests import builders
from tests.multi_rank.test_load_model import global_state
from tests.parity import BF16, FP32, differences
from tests.ranks import run_ranks

STAGE_2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
UNRESOLVED = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}


def order_warnings(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(warning.message) for warning in caught if warning.category is LoadOrderWarning]


def follow(path: str) -> None:
    def load(**kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)

    def partitioned(model: Any) -> set[bool]:
        return {is_partitioned(parameter) for parameter in model.parameters()}

    before = global_state()
    lowmem_load.install()
    lowmem_load.install()  # does nothing
    plain, messages = order_warnings(load)
    assert messages == []
    assert partitioned(plain) == {False}
    assert partitioned(AutoModelForCausalLM.from_config(plain.config)) == {False}
    assert AutoModelForCausalLM.from_pretrained.__name__ == "from_pretrained"
    assert LlamaForCausalLM.from_pretrained.__name__ == "from_pretrained"

    alive = HfDeepSpeedConfig(STAGE_2)
    assert partitioned(load()) == {False}
    alive = HfDeepSpeedConfig(UNRESOLVED)
    ours, messages = order_warnings(load)
    assert messages == []
    assert partitioned(ours) == {True}
    assert partitioned(LlamaForCausalLM.from_pretrained(path)) == {True}
    assert differences(ours, plain) == []
    assert lowmem_load.get_load_report(ours).ds_config["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert partitioned(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))) == {True}
    with pytest.raises(lowmem_load.ConfigError, match="remove device_map"):
        load(device_map="auto")
    with streaming(BF16):
        assert {p.dtype for p in load().parameters()} == {torch.bfloat16}
    ours.resize_token_embeddings(1280)
    whole = [parameter for parameter in ours.parameters() if not is_partitioned(parameter)]
    assert sum(parameter.numel() for parameter in whole) == 2 * 1280 * 32, "the new embeddings, most of the model"

    del alive
    gc.collect()
    dropped, messages = order_warnings(load)
    assert partitioned(dropped) == {False}
    assert messages == [], "it served a load before"
    HfDeepSpeedConfig(FP32)
    gc.collect()
    _, messages = order_warnings(load)
    assert len(messages) == 1
    assert "keep it in a variable" in messages[0]
    unset_hf_deepspeed_config()
    assert order_warnings(load)[1] == []

    def initialize(model: Any, config: dict[str, Any]) -> list[str]:
        engine, messages = order_warnings(lambda: deepspeed.initialize(model=model, config=config)[0])
        engine.destroy()
        return messages

    assert initialize(ours, FP32) == []
    assert initialize(load(), {**STAGE_2, "zero_optimization": {"stage": 0}}) == []
    messages = initialize(dropped, FP32)
    assert len(messages) == 1
    assert "every rank has the full model (" in messages[0]
    assert "then call from_pretrained" in messages[0]
    _, messages = order_warnings(
        lambda: lowmem_load.initialize_partial(load(), FP32, partition="model", optimizer=torch.optim.AdamW)
    )
    assert messages == []

    uninstall()
    uninstall()  # does nothing
    assert global_state() == before


def test_install_follows_the_active_configuration(checkpoints: Path) -> None:
    run_ranks(follow, str(builders.tiny_llama(checkpoints, torch.float32)))
