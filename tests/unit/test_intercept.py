"""Who handles a from_pretrained: blocks in any order, threads in turns, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations import deepspeed as integration
from transformers.utils import logging as hf_logging

from lowmem_load import DistributedInterface, ModelEngine, load_model, streaming
from lowmem_load.errors import ConfigError, ModelBuildError
from lowmem_load.hf import intercept
from tests import builders

STAGE_0 = {"zero_optimization": {"stage": 0}}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    names = ("from_pretrained", "_from_config", "get_init_context")
    before = {name: PreTrainedModel.__dict__[name] for name in names}
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
    """A load by transformers itself, in a thread, which stands in the middle of making its model until `go` is set.

    Then it calls `act`.
    """

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        self.go, inside, ordinary = threading.Event(), threading.Event(), LlamaForCausalLM.__init__
        self.error: BaseException | None = None

        def init(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            if threading.current_thread() is self.thread and not inside.is_set():
                inside.set()
                assert self.go.wait(60)
                act()
            ordinary(model, *args, **kwargs)

        def load() -> None:
            try:
                AutoModelForCausalLM.from_pretrained(name)
            except BaseException as error:
                self.error = error

        monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
        self.thread = threading.Thread(target=load, name="theirs", daemon=True)
        self.thread.start()
        assert inside.wait(60)

    def end(self) -> None:
        self.go.set()
        self.thread.join(60)
        assert not self.thread.is_alive(), "two threads wait for each other"


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_load_that_began_before_in_another_thread_is_waited_for(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_installed: bool
) -> None:
    """Both replace PreTrainedModel.tie_weights; where they overlapped, no later model was tied any more."""
    DistributedInterface()
    monkeypatch.setattr(intercept, "SAID_AFTER_S", 0.0)
    # As models that are made of models do; it is part of their load, even if somebody asked for all since.
    theirs = Paused(llama, monkeypatch, lambda: AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(llama)))
    loaded: list[nn.Module] = []
    calls: list[str] = []
    ours = threading.Thread(target=lambda: loaded.append(load_model(llama, STAGE_0)), daemon=True)
    with intercept.intercepted(handler("installed", calls)) if is_installed else contextlib.nullcontext():
        ours.start()
        while "waiting for from_pretrained in thread theirs" not in caplog.text:
            assert theirs.thread.is_alive()
            ours.join(0.01)
            assert ours.is_alive()
        assert not loaded
        theirs.end()
        ours.join(60)
    assert not ours.is_alive(), "two threads wait for each other"
    assert (len(loaded), calls, theirs.error) == (1, [], None)


def test_a_load_does_not_wait_for_a_turn_inside_another_one(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the turn may wait for that one."""
    theirs = Paused(llama, monkeypatch, lambda: load_model(llama, STAGE_0))
    with intercept.in_turn(open_ended=False):
        theirs.end()
    assert isinstance(theirs.error, ModelBuildError | ConfigError)
    assert "another thread of this process is loading" in str(theirs.error)


def test_a_load_inside_another_one_is_handled(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def inner() -> None:
        with intercept.intercepted(handler("inner", calls)):
            AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(llama))

    theirs = Paused(llama, monkeypatch, inner)
    theirs.end()
    assert (calls, theirs.error) == (["inner"], None)


@pytest.mark.parametrize("ordinarily", ["from_pretrained", "looked up before", "from_config"])
def test_a_load_that_begins_meanwhile_in_another_thread_waits(llama: str, ordinarily: str) -> None:
    ended: list[str] = []
    config, from_pretrained = LlamaConfig.from_pretrained(llama), LlamaForCausalLM.from_pretrained
    loads: dict[str, Callable[[], object]] = {
        "from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(llama),
        "looked up before": lambda: from_pretrained(llama),  # as before its arguments are made
        "from_config": lambda: AutoModelForCausalLM.from_config(config),
    }

    def theirs() -> None:
        loads[ordinarily]()
        ended.append("theirs")

    def handle(call: Any) -> tuple[nn.Module, dict[str, Any]]:
        thread.start()
        thread.join(0.3)  # seconds; it takes some 10 ms where it does not wait
        found = call.run()
        ended.append("ours")
        return found

    thread = threading.Thread(target=theirs, daemon=True)
    with intercept.intercepted(handle, any_thread=False):
        AutoModelForCausalLM.from_pretrained(llama)
    thread.join(60)
    assert ended == ["ours", "theirs"]


def test_others_hear_warnings_while_a_load_from_a_configuration_waits(llama: str) -> None:
    calls: list[str] = []
    before, config = hf_logging.get_verbosity(), LlamaConfig.from_pretrained(llama)
    thread = threading.Thread(target=AutoModelForCausalLM.from_config, args=[config], daemon=True)
    with intercept.intercepted(handler("any", calls)):
        with intercept.alone():
            thread.start()
            thread.join(0.1)
            assert (calls, hf_logging.get_verbosity()) == ([], before)
        thread.join(60)
    assert (calls, hf_logging.get_verbosity()) == (["any"], before)


def test_a_thread_that_is_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with intercept.alone():
        monkeypatch.setattr(intercept, "_begun_before", lambda: {1})  # it came between, and stands where it must wait
        with intercept.alone():
            pass


def test_a_function_that_cannot_be_replaced_leaves_others_to_be(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", print)
        with pytest.raises(AttributeError), intercept.intercepted(handler("", calls)):
            pass
    with intercept.intercepted(handler("later", calls)):
        AutoModelForCausalLM.from_pretrained(llama)
    assert calls == ["later"]


def test_open_ended_turns_end_in_any_order() -> None:
    first, second = (intercept.in_turn(open_ended=True) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    with intercept.in_turn(open_ended=False):

        def wait() -> None:
            waits.set()
            with intercept.in_turn(open_ended=False):
                pass

        waits, found = threading.Event(), list[BaseException | None]()
        thread = threading.Thread(target=lambda: found.extend(in_threads(wait)), daemon=True)
        thread.start()
        assert waits.wait(60)
        thread.join(0.1)
    thread.join(60)
    assert found == [None]


def test_an_engine_shows_its_configuration_in_its_turn_alone(llama: str) -> None:
    engine = ModelEngine({"model": llama}, {"config_file": STAGE_0})

    def show() -> None:
        with engine.deepspeed_visible():
            pass

    show()
    with streaming(STAGE_0):
        show()
        errors = in_threads(show, lambda: ModelEngine({"model": llama}, {"config_file": STAGE_0}))
    assert all("another thread of this process is loading" in str(error) for error in errors)


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
