"""`lazy`: whatever code does to a model that is read when it is looked at, values are those of an ordinary one."""

import concurrent.futures
import copy
import ctypes
import errno
import functools
import gc
import inspect
import io
import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from lowmem_load import CheckpointError, ConfigError, get_load_report, lazy
from lowmem_load.files import executor
from lowmem_load.files.executor import Executor
from lowmem_load.files.remote_file import MAX_IN_FLIGHT
from lowmem_load.files.source import LocalFile
from lowmem_load.load import load as stages
from lowmem_load.load.lazy import describe_lazily, reader_of
from lowmem_load.models import loader
from lowmem_load.symbolic.lazy import is_unread
from tests import builders, ranks
from tests.multi_rank.test_save import equal_folders

TOKENS = torch.arange(1, 9)[None]
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(builders.tiny_llama(tmp_path_factory.mktemp("lazy")))


def ordinary(path: str, **kwargs: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **kwargs})


def lazily(path: str, **kwargs: Any) -> Any:
    return lazy(path, **{"dtype": torch.float32, **kwargs})


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(tensor.tolist(), dtype=tensor.dtype) for name, tensor in model.state_dict().items()}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = values(ours), values(theirs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(left, nn.Parameter)
        assert left.requires_grad == right.requires_grad
    for (name, left), (_, right) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(left, right), name


def num_lazy(model: nn.Module) -> int:
    return sum(map(is_unread, model.parameters()))


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("narrow", ["lm_head.weight", "model.norm.weight"])
def test_dtype_auto_of_files_that_mix_dtypes_is_that_of_an_ordinary_load(
    path: str, tmp_path: Path, narrow: str, *, is_zip: bool
) -> None:
    """Where config.json names none, it is that of the first tensor. `save_file` puts wide dtypes first."""
    tensors = {name: tensor.float() for name, tensor in load_file(f"{path}/model.safetensors").items()}
    tensors[narrow] = tensors[narrow].bfloat16()
    if is_zip:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(path, "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal(lazily(str(tmp_path), dtype="auto"), ordinary(str(tmp_path), dtype="auto"))


@pytest.mark.parametrize("auto_class", [None, "AutoModelForCausalLM"])
@pytest.mark.parametrize(
    "keywords", [{}, {"torch_dtype": "float16"}, {"dtype": {"": torch.float16}}, {"torch_dtype": {"": torch.float16}}]
)
def test_dtypes_are_those_of_an_ordinary_load(
    path: str, tmp_path: Path, keywords: dict[str, Any], auto_class: str | None
) -> None:
    """The files have another dtype than config.json, which counts if no keyword says one."""
    transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **keywords)
    model = lazy(tmp_path, auto_class=auto_class, **keywords)
    assert (model.dtype, model.config.dtype) == (expected.dtype, expected.config.dtype)
    assert_equal(model, expected)


def test_weights_that_are_slices_of_others_keep_apart(tmp_path: Path) -> None:
    """transformers cuts one tensor of the files into three weights. Of so many, some took the place of others."""
    config = transformers.NomicBertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=60, num_attention_heads=2
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    assert "encoder.layers.0.attn.Wqkv.weight" in load_file(tmp_path / "model.safetensors")
    assert_equal(lazy(tmp_path), transformers.AutoModel.from_pretrained(tmp_path))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's calls of transformers
def test_what_looks_at_no_value_reads_nothing(path: str) -> None:
    import peft

    model = lazily(path)
    weight = model.lm_head.weight
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
    model.to(torch.bfloat16).half().float().to("cpu:1").requires_grad_(requires_grad=False).train()
    assert weight.device == torch.device("cpu")  # as of real ones, which accelerate moves to "cpu:1" on rank 1
    assert model.lm_head.weight is weight
    copied = copy.deepcopy(model)
    copied.load_state_dict({name: tensor.clone().t().t() for name, tensor in model.state_dict().items()})
    copied.load_state_dict(model.state_dict(), assign=True)
    torch.optim.AdamW(copied.parameters())
    peft.get_peft_model(copied, peft.LoraConfig(target_modules=["q_proj"]))
    torch.zeros_like(weight), weight.new_empty(3), weight[2:5].view(-1).chunk(2), weight.numel(), repr(weight)
    assert get_load_report(model).read_bytes == 0
    torch.chunk(weight.detach(), 4)[1].tolist()
    assert get_load_report(model).read_bytes == weight.numel() // 4 * 2  # in bf16, as the file has it


# -- what scripts do ---------------------------------------------------------------------------------------------------


def assign_state(model: Any) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


def drop_and_copy_layers(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    del model.model.layers[1]
    model.model.layers[1].mlp.up_proj.weight.data.zero_()


def resize(model: Any, **kwargs: Any) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(**kwargs)


def lend_to_new_modules(model: Any) -> None:
    model.lent = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    model.lent.weight.data = model.lm_head.weight.data
    model.lent.weight.data.add_(1)
    model.lm_head.weight.data.mul_(2)
    model.cloned = nn.Linear(2, 2, bias=False)
    model.cloned.weight.data = model.model.norm.weight.data.clone()


def add_heads(model: Any) -> None:
    torch.manual_seed(1)
    model.value = nn.Linear(model.config.hidden_size, 1).to(model.device)
    model.ones = nn.Parameter(torch.ones_like(model.lm_head.weight))
    model.register_buffer("mean", model.lm_head.weight.detach().mean(0))


def merge_lora(model: Any) -> None:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).merge_and_unload()


def average(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * parameter + 0.5 * parameter.flip(0))


def run_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.lm_head.weight.norm()
        model(TOKENS)
    model(TOKENS, labels=TOKENS).loss.backward()


def change_lists(model: Any) -> None:
    average = [parameter.detach().clone() for parameter in model.parameters()]
    torch._foreach_mul_(average, 0.5)  # type: ignore[no-untyped-call]
    torch._foreach_lerp_([each.data for each in model.parameters()], average, 0.1)


def write_by_out(model: Any) -> None:
    nn.init.eye_(model.lm_head.weight)


def run(model: Any) -> None:
    with torch.no_grad():
        model.logits = model(TOKENS).logits
    assert not num_lazy(model)


def generate(model: Any) -> None:
    model.tokens = model.generate(TOKENS, max_new_tokens=3, do_sample=False)


def run_compiled(model: Any) -> None:
    model.logits = torch.compile(model, backend="eager")(TOKENS).logits.detach()


def train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())  # made before the parameters are read
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_a_head_alone(model: Any) -> None:
    optimizer = torch.optim.SGD([model.lm_head.weight], 0.1)
    for _ in range(2):
        (torch.ones(2, model.config.hidden_size) @ model.lm_head.weight.t()).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        *(assign_state, drop_and_copy_layers, lend_to_new_modules, add_heads, merge_lora, average),
        *(run_in_inference_mode, change_lists, write_by_out),
        *(run, generate, run_compiled, train, train_a_head_alone),
    )
} | {
    "resize": lambda model: resize(model, new_num_tokens=140),
    "resize, smaller": lambda model: resize(model, new_num_tokens=50),
    "inner model": lambda model: model.model(TOKENS),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's calls of transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo, once DeepSpeed has replaced F.linear
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_give_the_values_of_an_ordinary_load(path: str, script: str) -> None:
    ours, theirs = lazily(path), ordinary(path)
    kept = list(ours.parameters())
    for model in (ours, theirs):
        SCRIPTS[script](model)
    assert_equal(ours, theirs)
    for name in ("logits", "tokens"):
        assert torch.equal(getattr(ours, name, torch.ones(1)), getattr(theirs, name, torch.ones(1)))
    if not script.startswith(("resize", "assign", "drop")):
        assert {id(each) for each in kept} <= {id(each) for each in ours.parameters()}  # optimizers refer to them


Action = tuple[str, int, int]


def write_row(a: nn.Parameter, b: nn.Parameter, number: int) -> None:
    a.data[number % 5] = b.data[1]


def lend(a: nn.Parameter, b: nn.Parameter, _: int) -> None:
    a.data = b.data


def halve(a: nn.Parameter, _: nn.Parameter, __: int) -> None:
    a.data = a.data * 0.5


def clone(a: nn.Parameter, b: nn.Parameter, _: int) -> None:
    a.data = b.detach().clone()


def swap(a: nn.Parameter, b: nn.Parameter, _: int) -> None:
    a.data, b.data = b.data, a.data


def draw_again(a: nn.Parameter, _: nn.Parameter, number: int) -> None:
    torch.manual_seed(number)
    nn.init.normal_(a)


ON_PARAMETERS: dict[str, Callable[[nn.Parameter, nn.Parameter, int], object]] = {
    "scale": lambda a, _, number: a.data.mul_(number + 0.5),
    "add": lambda a, b, _: a.data.add_(b.data, alpha=0.5),
    "copy": lambda a, b, _: a.data.copy_(b.data),
    "stripes": lambda a, _, number: a.data.view(-1)[:: number % 7 + 2].zero_(),
    "columns": lambda a, _, number: a.data.t()[number % 3].add_(1),
    "real": lambda a, _, __: a.data.sub_(torch.arange(a.shape[1]).float()),
    "numpy": lambda a, _, __: np.multiply(a.detach().numpy(), 2, out=a.detach().numpy()),
    "look": lambda a, _, __: torch.isfinite(a).all().item(),
    **{each.__name__: each for each in (write_row, lend, halve, clone, swap, draw_again)},
}
ON_MODELS: dict[str, Callable[[Any], Any]] = {
    "cast": lambda model: model.to(torch.bfloat16).float(),
    "deepcopy": copy.deepcopy,
    "state": lambda model: model.load_state_dict({key: each.clone() for key, each in model.state_dict().items()}),
    "tie": lambda model: setattr(model.model.layers[0].mlp.up_proj, "weight", model.model.layers[1].mlp.up_proj.weight),
}
ACTIONS = (*ON_PARAMETERS, *ON_MODELS)


def act(model: Any, action: str, first: int, second: int) -> Any:
    """Do one of the things that scripts do, with two parameters of equal shape; return the model to go on with."""
    if action in ON_MODELS:
        made = ON_MODELS[action](model)
        return made if isinstance(made, nn.Module) else model
    mlps = [layer.mlp for layer in model.model.layers]
    parameters = [each for mlp in mlps for each in (mlp.up_proj.weight, mlp.gate_proj.weight)]
    ON_PARAMETERS[action](parameters[first % len(parameters)], parameters[second % len(parameters)], second)
    return model


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=9))
def test_any_sequence_of_changes_gives_the_values_of_an_ordinary_load(path: str, actions: list[Action]) -> None:
    ours, theirs = lazily(path), ordinary(path)
    for action in actions:
        ours, theirs = act(ours, *action), act(theirs, *action)
    assert_equal(ours, theirs)


def load_lazily_and_forget(path: str) -> None:
    from torch.distributed.tensor import placement_types

    scatter = placement_types.mesh_scatter
    model = lazily(path)
    assert "data" in vars(nn.Parameter) and placement_types.mesh_scatter is not scatter
    del model
    gc.collect()
    assert "data" not in vars(nn.Parameter) and placement_types.mesh_scatter is scatter


@pytest.mark.ranks
def test_torch_is_as_before_when_the_last_lazy_weight_is_gone(path: str) -> None:
    ranks.run_ranks(load_lazily_and_forget, path, world_size=1)


# -- what looks below torch --------------------------------------------------------------------------------------------


def test_files_and_pickles_hold_the_values(path: str, tmp_path: Path) -> None:
    expected = ordinary(path).state_dict()
    save_file(lazily(path).state_dict(), tmp_path / "state.safetensors")
    buffer = io.BytesIO()
    torch.save(lazily(path).state_dict(), buffer)
    buffer.seek(0)
    tied, weight = io.BytesIO(), lazily(path).lm_head.weight
    torch.save([weight.data, weight.data], tied)
    assert tied.tell() < 1.5 * weight.nbytes + 2048  # once
    weight = pickle.loads(pickle.dumps(lazily(path).lm_head.weight))
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight, expected["lm_head.weight"])
    for state in (load_file(tmp_path / "state.safetensors"), torch.load(buffer)):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_memory_is_real_once_somebody_has_its_address(path: str) -> None:
    weight, expected = lazily(path).lm_head.weight.detach(), ordinary(path).lm_head.weight.detach()
    with pytest.raises(RuntimeError, match="data pointer"):  # of code past the dispatcher
        torch._C._to_dlpack(weight)
    assert weight.untyped_storage().data_ptr() == weight.view(-1).untyped_storage().data_ptr()  # reads nothing
    assert weight.value.memory is None
    address = weight.data_ptr()
    assert weight[1:].data_ptr() == address + weight.shape[1] * 4
    weight.add_(1)
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    found = torch.from_numpy(np.ctypeslib.as_array(pointer, (weight.numel(),)).copy())
    assert torch.equal(found.view(weight.shape), expected + 1)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_folder_is_that_of_an_ordinary_model(path: str, tmp_path: Path, dtype: torch.dtype) -> None:
    ours, theirs = lazily(path, dtype=dtype), ordinary(path, dtype=dtype)
    # diffusers passes `variant` and others to a component only where its signature has them.
    assert inspect.signature(ours.save_pretrained) == inspect.signature(theirs.save_pretrained)
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        model.lm_head.weight.data.mul_(2)
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
    assert num_lazy(ours) == len(list(ours.parameters()))  # one tensor at a time was in memory
    equal_folders(tmp_path / "ours", tmp_path / "theirs")


def fetched(step: Path, folder: Path) -> str:
    """Put a checkpoint into a folder as a download does: what was there before is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return str(shutil.copytree(step, folder))


MERGES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": lambda a, b: a.data.add_(b.data),
    "lerp": lambda a, b: a.data.lerp_(b.data, 0.3),
    "assign": lambda a, b: setattr(a, "data", (a.data + b.data) / 2),
    "copy": lambda a, b: a.data.copy_(b),
    "joined": lambda a, b: setattr(a, "data", torch.cat([a.data[:1], b.data[1:]])),
    "expanded": lambda a, b: a.data.add_(b.data.flatten()[:1].expand(a.shape)),
    "strided": lambda a, b: a.data.view(-1)[:4].add_(b.data[1:].as_strided((4,), (1,), 1)),
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(f"step{seed}") for seed in range(3)]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(folder, max_shard_size="20KB")
    return folders


@pytest.mark.parametrize(
    ("merge", "end"), [*((merge, "replaced") for merge in MERGES), ("add", "deleted"), ("add", "linked elsewhere")]
)
def test_weights_keep_the_files_they_were_made_of(steps: list[Path], tmp_path: Path, merge: str, end: str) -> None:
    def total(load: Callable[[str], Any]) -> Any:
        made = load(fetched(steps[0], tmp_path / "latest"))
        for step in steps[1:]:
            other = load(fetched(step, tmp_path / "latest"))
            for ours, theirs in zip(made.parameters(), other.parameters(), strict=True):
                if ours.dim() == 2:
                    MERGES[merge](ours, theirs)
            del other
            gc.collect()
        return made

    theirs, ours = total(ordinary), total(lazily)
    assert num_lazy(ours) == len(list(ours.parameters()))
    shutil.rmtree(tmp_path / "latest")
    if end == "replaced":
        shutil.copytree(steps[0], tmp_path / "latest")
    elif end == "linked elsewhere":
        (tmp_path / "latest").symlink_to(steps[0])
    assert_equal(ours, theirs)


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | {"num_hidden_layers": 15}))
    model.save_pretrained(folder, max_shard_size="1KB")
    return folder


def test_more_files_than_usual_may_be_deleted(many_files: Path, tmp_path: Path) -> None:
    model = lazily(fetched(many_files, tmp_path / "model"))
    shutil.rmtree(tmp_path / "model")
    assert_equal(model, ordinary(str(many_files)))


def save_over(folder: str, expected: str) -> None:
    """Rank function: a process that may open few files saves a model over the files that it is read from."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 350))
    model = lazily(folder)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert_equal(ordinary(folder), ordinary(expected))


@pytest.mark.ranks
def test_old_files_go_last(many_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ranks.run_ranks(save_over, fetched(many_files, folder), str(many_files), world_size=1)
    model = lazily(fetched(many_files, folder))
    model.save_pretrained(folder)
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert_equal(model, ordinary(str(many_files)))


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_save_that_fails_leaves_the_files_that_were_there(
    many_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    folder, numbers = tmp_path / "model", iter(range(1, 1000))
    write = os.pwrite

    def pwrite(*args: Any) -> int:
        if next(numbers) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    model = lazily(fetched(many_files, folder))
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(CheckpointError, match="No space left"):
        model.save_pretrained(folder, max_shard_size="30KB")
    assert sorted(folder.rglob("*")) == before
    assert_equal(lazily(str(folder)), ordinary(str(many_files)))
    assert_equal(model, ordinary(str(many_files)))


def test_files_that_change_are_an_error(path: str, tmp_path: Path) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    model = lazily(str(folder))
    for file in folder.glob("*.safetensors"):
        os.utime(file, (1, 1))
    with pytest.raises(CheckpointError, match="was replaced or written to"):
        model.lm_head.weight.sum()


def test_files_are_closed_with_the_last_weight(path: str) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    model = lazily(path)
    kept = model.lm_head.weight.detach()
    del model
    gc.collect()
    assert torch.equal(torch.tensor(kept.tolist()), ordinary(path).lm_head.weight)
    del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_and_forked_processes_read(path: str) -> None:
    model, expected = lazily(path), list(ordinary(path).parameters())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parameters = list(model.parameters())
        assert all(pool.map(lambda at: torch.equal(parameters[at], expected[at]), list(range(len(expected))) * 3))
        run, logits = lazily(path), ordinary(path)(TOKENS).logits
        assert all(pool.map(lambda _: torch.equal(run(TOKENS).logits, logits), range(8)))
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(parameters[0], expected[0]) else 1)
    assert os.waitpid(child, 0)[1] == 0


class Failing:
    """Reads of local files, which fail while `error` is set, or do something else first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: BaseException | None = None
        self.act: Callable[[], object] = int
        read = LocalFile.read_into

        def read_into(file: LocalFile, offset: int, memory: memoryview) -> None:
            self.act()
            if self.error is not None:
                raise self.error
            read(file, offset, memory)

        monkeypatch.setattr(LocalFile, "read_into", read_into)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("error", [CheckpointError("the network is away"), KeyboardInterrupt()])
def test_a_failed_read_is_over(
    path: str, monkeypatch: pytest.MonkeyPatch, num_threads: int, error: BaseException
) -> None:
    monkeypatch.setattr(stages, "cores", lambda _: num_threads)
    model, failing, expected = lazily(path), Failing(monkeypatch), ordinary(path)
    for _ in range(3):
        failing.error = error
        for read in (model.lm_head.weight.sum, lambda: model(TOKENS)):
            with pytest.raises(type(error)):
                read()
        failing.error = None
        assert torch.equal(model.model.norm.weight.detach() + 0, expected.model.norm.weight)
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    assert_equal(model, expected)


def test_a_collection_in_a_reading_thread_waits_for_nobody(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may collect garbage at any allocation, in any thread, and then a lazy model that was dropped ends."""
    monkeypatch.setattr(stages, "cores", lambda _: 4)
    failing, expected = Failing(monkeypatch), ordinary(path)
    failing.act = gc.collect
    gc.disable()
    gc.freeze()  # so that a collection takes no time
    try:
        for _ in range(5):
            for script in (lambda model: model(TOKENS), lambda model: model.lm_head.weight.numpy(force=True)):
                dropped = lazily(path)
                del dropped
                script(model := lazily(path))
                assert_equal(model, expected)
    finally:
        gc.unfreeze()
        gc.enable()


def test_cold_files_are_read_by_more_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "is_cached", lambda _: False)
    model = lazily(path)
    assert reader_of(model.lm_head.weight).executor.num_threads < MAX_IN_FLIGHT
    assert torch.equal(model.lm_head.weight + 0, ordinary(path).lm_head.weight)
    assert reader_of(model.model.norm.weight).executor.num_threads == MAX_IN_FLIGHT
    assert get_load_report(model).cold_files == 1
    assert_equal(model, ordinary(path))


def test_on_load_is_called_once_the_weights_are_read(path: str) -> None:
    # Never by a finalizer, which may run in a thread that others wait for.
    seen: list[Any] = []
    for forward in (False, True):
        call = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32)
        with loader.intercepted(lambda call: describe_lazily(call, Executor(), on_load=seen.append)):
            model = call()
        copied = copy.deepcopy(model)
        copied(TOKENS)
        if forward:
            model.model(TOKENS)
            assert not seen
            model(TOKENS)
            model(TOKENS)
            assert seen == [get_load_report(model)]
        del model, copied
        gc.collect()
        assert len(seen) == forward


def read_in_a_thread(path: str, what: str) -> None:
    """Rank function: a child reads, whatever a thread of its parent was at when it was forked off."""
    model, expected = lazily(path), ordinary(path)
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            other = lazily(path)
            if what == "forward":
                other(TOKENS)
            else:
                other.lm_head.weight.detach().numpy()

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(12):
        child = os.fork()
        if child == 0:
            read = torch.equal(model.lm_head.weight.detach() + 0, expected.lm_head.weight)
            made = copy.deepcopy(model)
            os._exit(0 if read and torch.equal(made(TOKENS).logits, expected(TOKENS).logits) else 1)
        assert os.waitpid(child, 0)[1] == 0
    stopped.set()
    thread.join()


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["forward", "memory"])
def test_a_fork_during_a_read(path: str, what: str) -> None:
    ranks.run_ranks(read_in_a_thread, path, what, world_size=1, timeout_s=180)


# -- calls that cannot be --------------------------------------------------------------------------------------------


def test_what_places_or_shards_and_what_is_not_there_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        lazy("/nowhere/at/all")
    for keyword in ("device_map", "quantization_config", "tp_plan"):
        with pytest.raises(ConfigError, match=f"remove {keyword}"):
            lazy(path, **{keyword: "auto"})


def test_packed_weights_are_lazy(path: str, tmp_path: Path) -> None:
    kind = pytest.importorskip("bitsandbytes").nn.Params4bit
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    default = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    default(path, quantization_config=bits).save_pretrained(tmp_path)
    tokens = torch.arange(10)[None]
    for name, kwargs in ((path, {"quantization_config": bits}), (str(tmp_path), {})):
        model, expected = lazy(name, dtype=torch.bfloat16, **kwargs).train(), default(name, **kwargs).train()
        packed = [parameter for parameter in model.parameters() if isinstance(parameter, kind)]
        assert packed and all(map(is_unread, packed)) and {weight.__class__ for weight in packed} == {kind}
        copied = copy.deepcopy(model)
        assert all(map(is_unread, packed))
        for ours in (copied, model):
            assert torch.equal(ours(tokens).logits, expected(tokens).logits)
            found = ours.state_dict()
            assert found.keys() == expected.state_dict().keys()
            assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
        assert {type(weight) for weight in packed} == {kind}
    with pytest.raises(ConfigError, match="lazy: remove quantization_config"):
        lazy(path, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))
