"""install(): the order mistake is seen however deepspeed.initialize is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_load import LoadOrderWarning, install, uninstall

CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
BETWEEN = (None, None, None, None, 29500, None, None, None)
"""Positional arguments of deepspeed.initialize between the model and the ds_config."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deepspeed, "initialize", lambda *args, **kwargs: "engine")
    install()
    yield
    uninstall()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"config": CONFIG}),
        ((), {"config_params": CONFIG}),
        ((None, "model", *BETWEEN, CONFIG), {}),
        ((None, "model", *BETWEEN, None, None, CONFIG), {}),
        ((SimpleNamespace(deepspeed_config=CONFIG),), {}),
    ],
)
def test_a_model_that_comes_whole_is_reported(args: tuple[Any, ...], kwargs: dict[str, Any], installed: None) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    )
    if len(args) > 1:
        args = (args[0], model, *args[2:])
    else:
        kwargs = {**kwargs, "model": model}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert deepspeed.initialize(*args, **kwargs) == "engine"
    [message] = [warning for warning in caught if warning.category is LoadOrderWarning]
    assert str(message.message).startswith("LlamaForCausalLM: every rank holds")
    assert message.filename == __file__
