"""install(): a wrong order of loading is noticed, and a release that lacks a name breaks no import."""

import contextlib
import functools
import importlib
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

import lowmem_load
from lowmem_load import FallbackWarning, LoadOrderWarning, UnsupportedError, install
from lowmem_load import foreign_names as names
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.foreign_names import ForeignName
from lowmem_load.integrations import accelerate, startup_hook, trl
from lowmem_load.integrations.install import _check_module, uninstall
from lowmem_load.integrations.trl import sync
from lowmem_load.replaced import holding, replaced, warn_of_missing
from tests import builders, ranks

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
    assert str(message.message).startswith(
        "LlamaForCausalLM was loaded before ZeRO-3 was configured, so every rank has "
    )
    assert message.filename == __file__


@pytest.mark.parametrize("ds_config", [None, {"zero_optimization": {"stage": 2}}, "no_such_file.json"])
def test_a_model_that_stays_replicated_is_not_an_order_mistake(ds_config: Any, installed: None) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert deepspeed.initialize(model=model, config=ds_config) == "engine"


class Unfillable(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drawn = np.random.random(), random.random()

    def to_empty(self, **_: Any) -> Any:
        raise UnsupportedError("its memory is its own")


@pytest.mark.parametrize(
    ("options", "of_run", "is_left"), [({}, "1", True), ({"strict": True}, "1", False), ({}, "strict", False)]
)
def test_a_sharded_load_that_is_not_supported_falls_back_to_transformers(
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
    before = np.random.get_state(), random.getstate()
    with pytest.warns(FallbackWarning, match="so transformers does: UnsupportedError: its memory is its own") as caught:
        model = Unfillable.from_pretrained(llama, distributed_config=sharding)
    assert [warning.filename for warning in caught if warning.category is FallbackWarning] == [__file__]
    uninstall()
    np.random.set_state(before[0])
    random.setstate(before[1])
    assert model.drawn == (np.random.random(), random.random()), "as if it had been built once"
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


# -- hooks on frameworks: a release that lacks a name costs one warning, which says what is lost -----------------------


AT_IMPORT = ((names.SYNC_WEIGHTS, names.ITER_NAMED_PARAMS), *((names.LLAMAFACTORY_LOAD,), (names.AXOLOTL_FILL,)))
"""What `install` replaces once a program imports it."""

Hook = tuple[ForeignName, ...]

LAZY = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return object
"""
"""Of a module that has moved its names, and finds them for whoever asks."""


def write_package(folder: Path, module: str, version: str, text: str | None) -> None:
    """Write a package with one module; without it if `text` is None."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        inner = folder.joinpath(*parts[:depth])
        inner.mkdir(parents=True, exist_ok=True)
        (inner / "__init__.py").write_text(f"__version__ = {version!r}\n")
    if text is not None:
        folder.joinpath(*parts).with_suffix(".py").write_text(text)
    metadata = folder / f"{parts[0]}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {parts[0]}\nVersion: {version}\n")


def imported(folder: Path, hook: Hook, version: str, text: str | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Import the module of a hook under `install`, of a package of our own; return the warnings."""
    package = hook[0].releases.package
    write_package(folder, hook[0].module, version, text)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    try:
        with warnings.catch_warnings(record=True) as seen, contextlib.ExitStack() as stack:
            warnings.simplefilter("always")
            install()
            stack.callback(uninstall)
            with contextlib.nullcontext() if text is not None else pytest.raises(ModuleNotFoundError):
                importlib.import_module(hook[0].module)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
    return [str(each.message) for each in seen if each.category is FallbackWarning]


@pytest.mark.parametrize("hook", AT_IMPORT, ids=lambda hook: hook[0].module)
@pytest.mark.parametrize("what", ["an empty module", "classes without methods", "lazy names", "no module"])
def test_a_name_that_moved_is_one_warning(
    hook: Hook, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {name.name.partition(".")[0] for name in hook if "." in name.name}
    texts = {
        "an empty module": "",
        "classes without methods": "".join(f"class {owner}:\n    pass\n" for owner in owners),
        "lazy names": LAZY,
        "no module": None,
    }
    seen = imported(tmp_path, hook, "99.1.2", texts[what], monkeypatch)
    of_hook = [text for text in seen if hook[0].module in text]
    assert len(of_hook) == 1, seen
    package = hook[0].releases.package
    assert of_hook[0].startswith(f"{package} 99.1.2 lacks {hook[0].module}")
    assert hook[0].loss in of_hook[0]
    if what != "no module":
        assert all(str(name) in of_hook[0] for name in hook)


@pytest.mark.parametrize("hook", [AT_IMPORT[0], (names.AXOLOTL_FILL,)], ids=lambda hook: hook[0].module)
def test_nothing_is_said_of_releases_before_the_feature(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert imported(tmp_path, hook, "0.1", "", monkeypatch) == []


def test_a_package_without_metadata_has_its_own_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axolotl", ModuleType("axolotl"))
    name = re.escape(str(names.AXOLOTL_FILL))
    expected = rf"axolotl \(of no known release\) lacks {name}, so rank 0 reads all weights"
    with pytest.warns(FallbackWarning, match=expected):
        warn_of_missing([names.AXOLOTL_FILL])
    setattr(sys.modules["axolotl"], "__version__", "0.18.0")  # noqa: B010  for mypy
    warn_of_missing([names.AXOLOTL_FILL])  # it had no such function yet


def test_a_module_in_a_zip_archive_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = names.AXOLOTL_FILL.module.split(".")[0], names.AXOLOTL_FILL.module.replace(".", "/")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for folder in Path(module).parents[:-1]:
            archive.writestr(f"{folder}/__init__.py", "")
        archive.writestr(f"{module}.py", "")
    monkeypatch.syspath_prepend(tmp_path / "all.zip")
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setitem(sys.modules, package, importlib.import_module(package))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_module([names.AXOLOTL_FILL], sys.modules[package])


def install_without_a_name() -> None:
    import deepspeed

    del deepspeed.DeepSpeedEngine._zero3_consolidated_16bit_state_dict
    with pytest.warns(FallbackWarning, match=r"lacks deepspeed\.DeepSpeedEngine\._zero3_consolidated_16") as seen:
        lowmem_load.install()
    [text] = [str(warning.message) for warning in seen if warning.category is FallbackWarning]
    assert names.INITIALIZE.loss in text, text
    with tempfile.TemporaryDirectory() as folder:  # a save is that of transformers then
        LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=8)).save_pretrained(folder)
        assert Path(folder, "model.safetensors").is_file()


@pytest.mark.ranks
def test_an_import_of_deepspeed_goes_on_without_its_private_names() -> None:
    ranks.run_ranks(install_without_a_name, world_size=1)


@pytest.mark.parametrize("name", [names.GET_STATE_DICT, names.TRAINER_SAVE], ids=str)
def test_a_save_that_moved_stays_as_it_was(name: ForeignName, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, attribute = name.name.partition(".")
    monkeypatch.delattr(getattr(importlib.import_module(name.module), owner), attribute)
    try:
        with pytest.warns(FallbackWarning, match=f"lacks {re.escape(str(name))}"):
            install()
    finally:
        uninstall()


def test_trl_gets_what_is_sent_whatever_it_asks_for() -> None:
    generation_class = importlib.import_module("trl.generation.vllm_generation").VLLMGeneration
    pairs = iter([("w", torch.zeros(1))])
    with replaced(trl.HANDLERS), holding(trl._PAIRS, pairs):
        assert generation_class._iter_named_params(SimpleNamespace(), dtype=torch.float32) is pairs


@pytest.mark.usefixtures("lone_process")
def test_a_fill_by_the_keywords_of_accelerate_is_left_to_it() -> None:
    def ordinary(accelerator: Any, model: Any, full_sd: Any, cpu_offload: bool = False) -> Any:
        return accelerator, model, full_sd, cpu_offload

    model, fill = torch.nn.Linear(1, 1), accelerate.HANDLERS[names.ACCELERATE_FILL]
    assert fill(ordinary, "a", model, full_sd={}, cpu_offload=True) == ("a", model, {}, True)


def test_trl_syncs_itself_where_it_keeps_other_metadata() -> None:
    synced: list[Any] = []
    generation = SimpleNamespace(mode="server")
    with pytest.warns(FallbackWarning, match="lacks .*VLLMGeneration._weight_metadata, so TRL gathers the weights"):
        sync(synced.append, generation)
    assert synced == [generation]
