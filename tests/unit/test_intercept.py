"""Who handles a from_pretrained: blocks in any order, threads in turns, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations import deepspeed as integration

from lowmem_load import DistributedInterface, load_model, streaming
from lowmem_load.errors import ConfigError
from lowmem_load.hf import intercept
from tests import builders

STAGE_0 = {"zero_optimization": {"stage": 0}}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {name: PreTrainedModel.__dict__[name] for name in ("from_pretrained", "_from_config")}
    config = integration._hf_deepspeed_config_weak_ref
    theirs = PreTrainedModel.tie_weights, torch.linspace, torch.get_default_dtype()
    yield
    assert (PreTrainedModel.tie_weights, torch.linspace, torch.get_default_dtype()) == theirs
    assert {name: PreTrainedModel.__dict__[name] for name in before} == before
    assert integration._hf_deepspeed_config_weak_ref is config
    assert not intercept.is_intercepted()


@pytest.fixture
def llama(checkpoints: Path) -> Iterator[str]:
    yield str(builders.tiny_llama(checkpoints))
    DistributedInterface().destroy()


def handler(name: str, calls: list[str]) -> intercept.Handler:
    def handle(call: Any) -> tuple[nn.Module, dict[str, Any]]:
        calls.append(name)
        return call.run()

    return handle


def test_the_innermost_block_counts_and_blocks_end_in_any_order(llama: str) -> None:
    calls: list[str] = []
    first, second = (intercept.intercepted(handler(name, calls)) for name in ("first", "second"))
    first.__enter__()
    AutoModelForCausalLM.from_pretrained(llama)
    second.__enter__()
    AutoModelForCausalLM.from_pretrained(llama)
    first.__exit__(None, None, None)
    AutoModelForCausalLM.from_pretrained(llama)
    second.__exit__(None, None, None)
    AutoModelForCausalLM.from_pretrained(llama)
    assert calls == ["first", "second", "second"]


def in_threads(*functions: Any) -> list[BaseException | None]:
    found: list[BaseException | None] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            functions[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "two threads wait for each other"
    return found


def test_loads_of_several_threads_are_each_exact(llama: str) -> None:
    """Their hooks used to stay behind, so that a later ordinary load was not exact."""
    expected = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).state_dict()
    DistributedInterface()
    models: list[nn.Module] = []

    def load() -> None:
        for _ in range(3):
            models.append(load_model(llama, STAGE_0))

    def load_ordinarily() -> None:
        for _ in range(3):
            models.append(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))

    assert in_threads(load, load, load_ordinarily) == [None] * 3
    models.append(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))
    assert len(models) == 10
    for model in models:
        for name, value in model.state_dict().items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, expected[name])


class Paused:
    """A load by transformers itself, in a thread, which stands in the middle of making its model until `go` is set."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, inside, ordinary = threading.Event(), threading.Event(), LlamaForCausalLM.__init__

        def init(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            if threading.current_thread() is self.thread and not inside.is_set():
                inside.set()
                assert self.go.wait(60)
                AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(name))  # as models made of models do
            ordinary(model, *args, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
        self.thread = threading.Thread(target=AutoModelForCausalLM.from_pretrained, args=[name], name="theirs")
        self.thread.start()
        assert inside.wait(60)


def test_a_load_that_began_before_in_another_thread_is_waited_for(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both replace PreTrainedModel.tie_weights; where they overlapped, no later model was tied any more."""
    DistributedInterface()
    monkeypatch.setattr(intercept, "SAID_AFTER_S", 0.0)
    theirs = Paused(llama, monkeypatch)
    loaded: list[nn.Module] = []
    ours = threading.Thread(target=lambda: loaded.append(load_model(llama, STAGE_0)))
    ours.start()
    while "waiting for from_pretrained in thread theirs" not in caplog.text:
        assert theirs.thread.is_alive()
        ours.join(0.01)
        assert ours.is_alive()
    assert not loaded
    theirs.go.set()
    for thread in (theirs.thread, ours):
        thread.join(60)
        assert not thread.is_alive(), "two threads wait for each other"
    assert len(loaded) == 1


@pytest.mark.parametrize("ordinarily", ["from_pretrained", "from_config"])
def test_a_load_that_begins_meanwhile_in_another_thread_waits(llama: str, ordinarily: str) -> None:
    ended: list[str] = []

    def theirs() -> None:
        name = llama if ordinarily == "from_pretrained" else LlamaConfig.from_pretrained(llama)
        getattr(AutoModelForCausalLM, ordinarily)(name)
        ended.append("theirs")

    def handle(call: Any) -> tuple[nn.Module, dict[str, Any]]:
        thread.start()
        thread.join(0.3)  # seconds; it takes some 10 ms where it does not wait
        found = call.run()
        ended.append("ours")
        return found

    thread = threading.Thread(target=theirs)
    with intercept.intercepted(handle, any_thread=False):
        AutoModelForCausalLM.from_pretrained(llama)
    thread.join(60)
    assert ended == ["ours", "theirs"]


def test_a_load_of_another_thread_is_refused_inside_streaming(llama: str) -> None:
    with streaming(STAGE_0):
        (error,) = in_threads(lambda: load_model(llama, STAGE_0))
        load_model(llama, STAGE_0)  # the thread of the block may
    assert isinstance(error, ConfigError)
    assert "another thread of this process" in str(error)
    load_model(llama, STAGE_0)


def test_a_configuration_in_which_the_dtype_has_its_other_name_loads(llama: str, tmp_path: Path) -> None:
    """As transformers before and since 4.56 write it: the keyword of a load must not end up in the configuration."""
    folder = tmp_path / "other"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    for name in ("dtype", "torch_dtype"):
        (folder / "config.json").write_text(json.dumps({**config, name: "bfloat16"}))
        model = load_model(str(folder), STAGE_0, auto_class="AutoModelForTokenClassification", num_labels=1)
        assert model.dtype == torch.float32


@pytest.mark.parametrize("name", [None, 7, ""])
def test_a_name_that_is_none_is_refused(name: Any, llama: str) -> None:
    with pytest.raises(ConfigError, match="name: expected a local folder or a Hub id"):
        load_model(name, STAGE_0)
