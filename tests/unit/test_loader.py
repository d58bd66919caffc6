"""What stands in for what transformers has: alike to it, and gone afterwards."""

import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading as loading
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, modeling_utils
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as hf_logging

from lowmem_load import get_load_report, install, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import HeaderError
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.files.source import LocalFile, OpenSources
from lowmem_load.integrations.install import streaming, uninstall
from lowmem_load.llamafactory import ModelEngine
from lowmem_load.models import loader
from lowmem_load.models.loader import SymbolicFile, collecting_handlers
from lowmem_load.planning.expression import Expression
from lowmem_load.replaced import replaced
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.initialise import Initialiser
from tests import builders


def read_nothing(expression: Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason} read {expression}")


# -- imports ---------------------------------------------------------------------------------------------------------

NEEDED_BY_SOME = ("engines.partition", "resume", "partial", "integrations.llamafactory", "cli")


PROGRAM = """
import sys, lowmem_load
lowmem_load.load_model, lowmem_load.install
print(*sys.modules)
import torch, transformers.modeling_utils
ds_config = {"zero_optimization": {"stage": 3}}
if lowmem_load.engines.zero3_target.fp32_rules():  # older releases of DeepSpeed do not know the setting
    ds_config["data_types"] = {"keep_in_fp32_modules": ["rotary_emb"]}
planned = lowmem_load.plan(sys.argv[1], ds_config, rank=511, world_size=512)
assert planned.costs.read_bytes == planned.costs.needed_bytes < 1000
lowmem_load.install()
assert not torch.distributed.is_initialized()
if hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):  # else transformers shards no model
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    lowmem_load.load_model(sys.argv[1], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
assert "deepspeed" not in sys.modules, "deepspeed was imported"
import deepspeed
assert deepspeed.initialize.__code__.co_filename == lowmem_load.replaced.__file__, "deepspeed is not hooked"
"""


def test_a_plain_process_imports_only_what_it_needs(tmp_path: Path) -> None:
    """DeepSpeed takes a second to import. Digests and plans need no group either."""
    command = [sys.executable, "-c", PROGRAM, str(builders.tiny_llama(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    ours = {name for name in run.stdout.splitlines()[0].split() if name.startswith("lowmem_load.")}
    assert not ours & {f"lowmem_load.{name}" for name in NEEDED_BY_SOME}


# -- what collects tensors, and describes files ------------------------------------------------------------------------


def converter() -> object:
    return loading.WeightConverter("experts.*.up", "experts.up", [loading.MergeModulelist(0)])


def test_a_copy_that_has_collected_nothing_is_handed_out_again() -> None:
    one, other = converter(), converter()
    with replaced(collecting_handlers()):
        first = loading.deepcopy(one)
        assert first is not one
        assert loading.deepcopy(one) is first
        assert loading.deepcopy(other) is not first
        first.add_tensor("model.experts.up", "experts.0.up", "experts.*.up", list)
        second = loading.deepcopy(one)
        assert second is not first
        assert second.collected_tensors == one.collected_tensors == {}
        assert first.materialize_tensors() == {"experts.*.up": [[]]}  # what the job gives when it is called
        assert first.layer_targets == {"model.experts.up": {"experts.0.up"}}


def test_names_are_sorted_by_keys_that_share_their_parts() -> None:
    names = ["layers.10.experts.2.up", "layers.9.experts.2.up", "layers.9.shard_3"]
    ordinary = [loading.dot_natural_key(name) for name in names]
    with replaced(collecting_handlers()):
        keys = [loading.dot_natural_key(name) for name in names]
    assert keys == ordinary
    assert keys[0][2] is keys[1][2]


def test_tensors_are_made_without_threads() -> None:
    tensor = torch.arange(3.0)
    with replaced(collecting_handlers()):
        pool: Any = object()  # of which nothing is asked
        job = loading.spawn_materialize(pool, tensor, "cpu", torch.bfloat16)
        assert torch.equal(job(), loading._materialize_copy(tensor, "cpu", torch.bfloat16))
        assert job().dtype == torch.bfloat16


@pytest.fixture
def context() -> Iterator[Context]:
    sources = OpenSources(LocalFile)
    yield Context(read_nothing, Initialiser(read_nothing), pytest.fail, lambda model: None, sources.opened)
    sources.close()


def test_a_file_is_described_once_unless_that_fails(context: Context, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    for number, path in enumerate(paths):
        save_file({f"w{number}": torch.ones(3)}, path)
    found = [context.file(path, Safetensors()) for path in (*paths, *paths)]
    assert [file.names for file in found] == [("w0",), ("w1",)] * 2
    assert found[0] is found[2] and found[1] is found[3]
    (tmp_path / "c.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00[]")
    with pytest.raises(HeaderError):
        context.file(str(tmp_path / "c.safetensors"), Safetensors())
    assert context.files == {paths[0]: found[0], paths[1]: found[1]}


def test_headers_are_read_at_the_same_time_and_the_first_bad_file_counts(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.safetensors") for name in "dbca"]
    for path in paths:
        save_file({f"w {path}": torch.ones(300)}, path)
    others_are_read = threading.Barrier(len(paths))

    class Late(LocalFile):
        def read_into(self, offset: int, memory: memoryview) -> None:
            if offset == 0:
                others_are_read.wait(10)  # breaks, and each file fails, unless all are read at the same time
            super().read_into(offset, memory)

    sources = OpenSources(Late)
    context = Context(read_nothing, Initialiser(read_nothing), pytest.fail, lambda model: None, sources.opened)
    context.read_ahead(dict.fromkeys(paths, Safetensors()))
    assert list(context.files) == paths  # which ranks compare
    sources.close()
    for path in paths[1:3]:
        Path(path).write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00[]")
    sources = OpenSources(LocalFile)
    context = Context(read_nothing, Initialiser(read_nothing), pytest.fail, lambda model: None, sources.opened)
    formats = dict.fromkeys(paths, Safetensors())
    context.read_ahead(formats)
    assert list(context.files) == [paths[0], paths[3]]
    for path in paths:
        os.remove(path)  # a store that fails would be waited for again
    with pytest.raises(HeaderError, match=r"b\.safetensors"):
        [context.file(path, format_) for path, format_ in formats.items()]
    sources.close()


# -- what safe_open of safetensors 0.9 returns, and transformers' loader with its prefetch -----------------------------

OF_0_9 = {"get_slice", "get_tensor", "get_tensor_meta", "get_tensors", "keys", "metadata", "offset_keys", "prefetch"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_symbolic_file_has_what_the_file_of_safetensors_has(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.ones(2, 3), "c": torch.ones(2, dtype=torch.int64), "a": torch.ones(5).bfloat16()}
    save_file(tensors, path, {"format": "pt"})
    assert public(SymbolicFile) - {"expression"} == OF_0_9 >= public(safe_open)
    with safe_open(path, "pt") as theirs, SymbolicFile(context.file(str(path), Safetensors()), read_nothing) as ours:
        assert (ours.keys(), ours.metadata()) == (theirs.keys(), theirs.metadata())
        assert ours.offset_keys() == theirs.offset_keys() == list(ours.get_tensors()) != ours.keys()
        end = 0
        for name in ours.offset_keys():
            meta, part, expected = ours.get_tensor_meta(name), ours.get_slice(name), theirs.get_slice(name)
            of_both = ours.get_tensors()[name], ours.get_tensor(name), part[...], tensors[name]
            assert len({(tensor.shape, tensor.dtype) for tensor in of_both}) == 1
            assert (meta.shape, meta.dtype) == (part.get_shape(), part.get_dtype())
            assert (meta.shape, meta.dtype) == (expected.get_shape(), expected.get_dtype())
            assert meta.data_offsets == (end, end := end + tensors[name].nbytes)
            if hasattr(theirs, "get_tensor_meta"):
                assert meta.data_offsets == theirs.get_tensor_meta(name).data_offsets


def test_prefetched_tensors_are_given_once(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"b": torch.ones(4, 3), "c": torch.ones(2), "a": torch.ones(5)}, path)
    file = SymbolicFile(context.file(str(path), Safetensors()), read_nothing)
    with file.prefetch({"a": None, "b": slice(1, 3)}, device="cuda", threads=2) as loader:
        assert (loader.names(), len(loader)) == (["a", "b"], 2)
        assert loader.take("b").shape == (2, 3)
        with pytest.raises(KeyError):
            loader.take("b")
        assert [(name, tensor.shape) for name, tensor in loader] == [("a", (5,))]
    loader = file.prefetch()
    assert loader.names() == file.offset_keys()
    loader.close()
    assert not loader.names()


def through_loader(file: Any, name: str, loaders: dict[Any, Any]) -> torch.Tensor:
    """As in safetensors 0.9."""
    if file not in loaders:
        loaders[file] = file.prefetch()
    return loaders[file].take(name)


def through_file(file: Any, name: str, loaders: dict[Any, Any]) -> torch.Tensor:
    """As in the pull request, before `prefetch` returned anything."""
    if file not in loaders:
        loaders[file] = file.prefetch()
    return file.get_tensor(name)


@pytest.fixture(params=[through_loader, through_file])
def prefetched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have transformers' loader take tensors as its pull request 48930 does on a GPU. Returns what it has taken."""
    take: Callable[[Any, str, dict[Any, Any]], torch.Tensor] = request.param
    loaders: dict[Any, Any] = {}
    taken: list[str] = []

    class Prefetched:
        def __init__(self, file: Any, name: str) -> None:
            self.file, self.name, self.meta = file, name, file.get_tensor_meta(name)

        def get_dtype(self) -> str:
            return str(self.meta.dtype)

        def get_shape(self) -> list[int]:
            return list(self.meta.shape)

        def __getitem__(self, index: Any) -> torch.Tensor:
            taken.append(self.name)
            tensor = take(self.file, self.name, loaders)
            part = tensor[index]
            return part.clone() if part.numel() < tensor.numel() else part

    text = textwrap.dedent(inspect.getsource(inspect.unwrap(PreTrainedModel._load_pretrained_model)))
    assert text.count("file_pointer.get_slice(k)") == 1
    names: dict[str, Any] = {}
    exec(text.replace("file_pointer.get_slice(k)", "_Prefetched(file_pointer, k)"), vars(modeling_utils), names)
    monkeypatch.setattr(modeling_utils, "_Prefetched", Prefetched, raising=False)
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", names["_load_pretrained_model"])
    return taken


@pytest.mark.parametrize("build", [builders.tiny_llama, builders.tiny_mixtral])
def test_a_loader_that_prefetches_loads_the_same(
    build: Callable[[Path], Path], prefetched: list[str], checkpoints: Path
) -> None:
    path = str(build(checkpoints))
    try:
        model = load_model(path, {"zero_optimization": {"stage": 0}})
    finally:
        DistributedInterface().destroy()
    assert len(prefetched) == len(set(prefetched)) > 0
    expected = AutoModelForCausalLM.from_pretrained(path, dtype="auto", disable_mmap=True).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# -- who handles a from_pretrained: of which block, in which thread, and nothing left behind ---------------------------


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
        with loader.intercepted(handler("always", calls)), loader.intercepted(handler("", calls), lambda _: False):
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
