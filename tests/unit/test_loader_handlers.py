"""Who handles a from_pretrained: of which block, in which thread, and nothing left behind."""

import importlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as hf_logging

from lowmem_load import get_load_report, install, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import streaming, uninstall
from lowmem_load.llamafactory import ModelEngine
from lowmem_load.models import loader
from tests import builders

STAGE_0 = {"zero_optimization": {"stage": 0}}
STAGE_3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    def state() -> tuple[Any, ...]:
        tie_weights = PreTrainedModel.tie_weights, torch.linspace, torch.get_default_dtype()
        return (*tie_weights, is_deepspeed_zero3_enabled(), hf_logging.get_verbosity())

    before = state()
    yield
    assert state() == before


@pytest.fixture
def llama(checkpoints: Path) -> Iterator[str]:
    yield str(builders.tiny_llama(checkpoints))
    DistributedInterface().destroy()


def handler(name: str, calls: list[str]) -> loader.Handler:
    def handle(call: Any) -> tuple[nn.Module, dict[str, Any]]:
        calls.append(name)
        return call.run()

    return handle


def in_threads(*functions: Callable[[], object]) -> list[BaseException | None]:
    """Call each in a thread; return what it raised."""
    found: list[BaseException | None] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            functions[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "two threads wait for each other"
    return found


def while_built(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have the constructor of the next LlamaForCausalLM call `act` first."""
    ordinary = LlamaForCausalLM.__init__
    acts = [act]

    def init(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if acts:
            acts.pop()()
        ordinary(model, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", init)


def test_where_a_load_is_not_wanted_it_goes_as_if_the_block_were_not_there(llama: str) -> None:
    calls: list[str] = []
    with loader.intercepted(handler("never", calls), lambda _: False):
        AutoModelForCausalLM.from_pretrained(llama)
        with (
            loader.intercepted(handler("always", calls)),
            loader.intercepted(handler("", calls), lambda _: False),
        ):
            AutoModelForCausalLM.from_pretrained(llama)
    assert calls == ["always"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_loads_of_other_threads_are_handled_where_all_are_meant(llama: str, everywhere: bool) -> None:
    calls: list[str] = []
    config = LlamaConfig.from_pretrained(llama)
    with loader.intercepted(handler("any", calls), everywhere=everywhere):
        assert in_threads(lambda: AutoModelForCausalLM.from_pretrained(llama)) == [None]
        assert in_threads(lambda: AutoModelForCausalLM.from_config(config)) == [None]
    assert calls == ["any", "any"] * everywhere


def test_loads_of_a_models_own_code_are_part_of_its_load(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    while_built(monkeypatch, lambda: AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(llama)))
    with loader.intercepted(handler("one", calls)):
        AutoModelForCausalLM.from_pretrained(llama)
    assert calls == ["one"]


# -- threads ---------------------------------------------------------------------------------------------------------


def test_loads_of_several_threads_are_each_exact(llama: str) -> None:
    expected = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).state_dict()
    DistributedInterface()
    models: list[nn.Module] = []

    def load() -> None:
        for _ in range(3):
            models.append(load_model(llama, STAGE_0))

    def stream() -> None:
        with streaming(STAGE_0):
            for _ in range(3):
                models.append(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))

    assert in_threads(load, load, stream) == [None] * 3
    assert all(get_load_report(model) for model in models)
    models.append(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))
    assert len(models) == 10
    for model in models:
        for name, value in model.state_dict().items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, expected[name])


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_constructor_may_wait_for_a_thread_that_loads(
    llama: str, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """That used to hang under install(), which held a lock during ordinary loads."""
    found: list[BaseException | None] = []
    while_built(monkeypatch, lambda: found.extend(in_threads(lambda: AutoModelForCausalLM.from_pretrained(llama))))
    install()
    try:
        model = load_model(llama, STAGE_0) if is_ours else AutoModelForCausalLM.from_pretrained(llama)
    finally:
        uninstall()
    assert (type(model), found) == (LlamaForCausalLM, [None])


def test_a_module_that_is_imported_during_a_load_reads_files_afterwards(
    llama: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It used to keep what reads no data for ever."""
    (tmp_path / "imported_meanwhile.py").write_text("from transformers.modeling_utils import load_state_dict\n")
    torch.save({"weight": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    monkeypatch.syspath_prepend(tmp_path)
    while_built(monkeypatch, lambda: importlib.import_module("imported_meanwhile"))
    load_model(llama, STAGE_0)
    read = sys.modules.pop("imported_meanwhile").load_state_dict(str(tmp_path / "pytorch_model.bin"))
    assert type(read["weight"]) is torch.Tensor
    assert read["weight"].tolist() == [1.0] * 3


def test_a_configuration_is_shown_to_the_thread_of_the_block_alone(llama: str) -> None:
    engine = ModelEngine({"model": llama}, {"config_file": STAGE_3})
    heard: list[bool] = []
    for block in (engine.deepspeed_visible(), streaming(STAGE_3)):
        with block:
            assert is_deepspeed_zero3_enabled()
            assert in_threads(lambda: heard.append(is_deepspeed_zero3_enabled())) == [None]
            assert in_threads(lambda: load_model(llama, STAGE_0)) == [None]
        assert not is_deepspeed_zero3_enabled()
    assert heard == [False, False]


# -- what is asked for -----------------------------------------------------------------------------------------------


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
