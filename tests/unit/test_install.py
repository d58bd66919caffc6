"""install(): a wrong order of loading is noticed, however deepspeed.initialize is called."""

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from lowmem_load import FallbackWarning, LoadOrderWarning, UnsupportedError, install
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations import startup_hook
from lowmem_load.integrations.install import uninstall
from tests import builders

SMALL = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
BETWEEN = (None, None, None, None, 29500, None, None, None)
"""Positional arguments of deepspeed.initialize between the model and the ds_config."""


@pytest.fixture
def llama(checkpoints: Path) -> Iterator[str]:
    yield str(builders.tiny_llama(checkpoints))
    uninstall()
    unset_hf_deepspeed_config()
    DistributedInterface().destroy()


def is_ours(path: str) -> bool:
    return hasattr(LlamaForCausalLM.from_pretrained(path), "lowmem_load_report")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @functools.wraps(deepspeed.initialize)
    def initialize(*_: Any, **__: Any) -> str:
        return "engine"

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    install()
    yield
    uninstall()


@pytest.mark.parametrize(
    "initialize",
    [
        lambda model: deepspeed.initialize(model=model, config_params=CONFIG),
        lambda model: deepspeed.initialize(None, model, *BETWEEN, None, None, CONFIG),
        lambda model: deepspeed.initialize(SimpleNamespace(deepspeed_config=CONFIG), model=model),
    ],
)
def test_a_model_that_comes_replicated_is_reported(initialize: Callable[[Any], Any], installed: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert initialize(LlamaForCausalLM(LlamaConfig(**SMALL))) == "engine"
    [message] = [warning for warning in caught if warning.category is LoadOrderWarning]
    assert str(message.message).startswith("LlamaForCausalLM: every rank has all ")
    assert message.filename == __file__


@pytest.mark.parametrize("ds_config", [None, {"zero_optimization": {"stage": 2}}, "no_such_file.json"])
def test_a_model_that_stays_replicated_is_not_an_order_mistake(ds_config: Any, installed: None) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert deepspeed.initialize(model=model, config=ds_config) == "engine"


class Unfillable(LlamaForCausalLM):  # type: ignore[misc]
    def to_empty(self, **_: Any) -> Any:
        raise UnsupportedError("its memory is its own")


@pytest.mark.parametrize(
    ("options", "of_run", "is_left"), [({}, "1", True), ({"strict": True}, "1", False), ({}, "strict", False)]
)
def test_a_sharded_load_that_cannot_be_streamed_is_left_to_transformers(
    options: dict[str, Any], of_run: str, is_left: bool, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("transformers.distributed")
    monkeypatch.setenv(startup_hook.SWITCH, of_run)
    install(**options)
    sharding = distributed.DistributedConfig(fsdp_size=1)
    if not is_left:
        with pytest.raises(UnsupportedError, match="its memory is its own"):
            Unfillable.from_pretrained(llama, distributed_config=sharding)
        return
    with pytest.warns(FallbackWarning, match="so transformers does: UnsupportedError: its memory is its own") as caught:
        model = Unfillable.from_pretrained(llama, distributed_config=sharding)
    assert [warning.filename for warning in caught if warning.category is FallbackWarning] == [__file__]
    uninstall()
    expected = LlamaForCausalLM.from_pretrained(llama).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")  # of DeepSpeed's own load
def test_install_ends_with_its_block_and_not_with_that_of_a_second_call(llama: str) -> None:
    kept = HfDeepSpeedConfig(CONFIG)
    with install():
        with install(strict=True):
            assert is_ours(llama)
        assert is_ours(llama)
    assert not is_ours(llama)
    with pytest.raises(ValueError, match="mine"), install():
        raise ValueError("mine")
    handle = install()
    assert is_ours(llama)
    handle.close()
    handle.close()
    assert not is_ours(llama)
    del kept


def test_a_process_with_fsdp2_ends_silently(llama: str, tmp_path: Path) -> None:
    """Python takes down what imports are awaited by before the hooks that await them."""
    source = f"""
import torch.distributed, transformers, lowmem_load
torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1)
lowmem_load.install()
model = transformers.LlamaForCausalLM.from_pretrained({llama!r})
from lowmem_load.symbolic.lazy import is_unread
assert all(map(is_unread, model.parameters()))
torch.distributed.destroy_process_group()
"""
    env = {**os.environ, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    command = [sys.executable, "-W", "ignore", "-c", source]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr) == (0, "")
