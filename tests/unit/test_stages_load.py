"""The stages in order, as far as one process can show it: progress, changing files, and what is warned of."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetModel

from lowmem_load import get_load_report, load_into, load_model, phases, plan
from lowmem_load.distributed.nodes import Room
from lowmem_load.errors import CheckpointError, MemoryShortageError
from lowmem_load.files import executor, source
from lowmem_load.files.executor import Executor
from lowmem_load.files.remote_file import MAX_IN_FLIGHT
from lowmem_load.files.source import LocalFile
from lowmem_load.load import checks
from lowmem_load.load import load as stages
from tests.storage import fail_once

pytestmark = pytest.mark.usefixtures("lone_process")

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
FP32 = {"zero_optimization": {"stage": 3}}


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Kept(tqdm):  # type: ignore[type-arg]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            made.append(self)

    monkeypatch.setattr(phases, "tqdm", Kept)
    return made


@pytest.mark.parametrize("config", [BF16, FP32])
def test_the_progress_bar_ends_at_its_total(
    config: dict[str, Any], bars: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of buffers, here of batch norms, are among both; so are those that are read to be cast."""
    model = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1]))
    model.save_pretrained(tmp_path)
    monkeypatch.setenv("LOWMEM_LOAD_PROGRESS", "1")
    report = get_load_report(load_model(tmp_path, config))
    (bar,) = bars
    values = [*model.parameters(), *model.buffers()]
    assert bar.n == bar.total == report.needed_bytes == sum(value.nbytes for value in values)
    assert any(buffer.dtype == torch.float32 for buffer in model.buffers())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint in several files."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    return tmp_path


@pytest.mark.parametrize(("zero", "has_part"), [({"stage": 1}, False), ({"stage": 3}, True), ({"stage": 3}, False)])
def test_no_dtype_is_that_of_an_ordinary_load(zero: dict[str, Any], has_part: bool, path: Path) -> None:
    """Under stage 3, DeepSpeed's own one makes all parameters those of the ds_config."""
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    part = {"partition": "model.layers.0"} if has_part else {}
    plain = LlamaForCausalLM.from_pretrained(path).lm_head.weight.dtype
    expected = plain if part or zero["stage"] < 3 else torch.bfloat16
    assert plain is torch.float32
    assert load_model(path, config, dtype=None, **part).lm_head.weight.dtype is expected
    assert load_model(path, config, **part).lm_head.weight.dtype is torch.bfloat16


def between_describing_and_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Has `act` done at the agreement on the bytes of the files."""
    ordinary = stages.agree_on_bytes

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return ordinary(*args, **kwargs)

    monkeypatch.setattr(stages, "agree_on_bytes", acting)


def open_below(folder: Path) -> list[str]:
    """Returns the files in a folder that this process has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [name for link in links if os.path.lexists(link) and (name := os.readlink(link)).startswith(str(folder))]


def replace_all(path: Path) -> None:
    """Renames a file of the same size and other bytes over each file of weights, and then deletes one."""
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        (path / "incoming").write_bytes(file.read_bytes()[:header] + bytes(file.stat().st_size - header))
        os.replace(path / "incoming", file)
    files[0].unlink()


@pytest.mark.parametrize("stage", [0, 3])
def test_files_replaced_after_their_headers_were_read_are_loaded_as_they_were(
    stage: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        name: value.detach().clone() for name, value in LlamaForCausalLM.from_pretrained(path).named_parameters()
    }
    between_describing_and_reading(monkeypatch, lambda: replace_all(path))
    model = load_model(path, {"zero_optimization": {"stage": stage}})
    for name, parameter in model.named_parameters():
        values = parameter.ds_tensor if stage == 3 else parameter.detach().view(-1)
        assert torch.equal(values, expected.pop(name).view(-1)), name
    assert not expected
    assert open_below(path) == []


def test_a_file_overwritten_in_place_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = max(path.glob("*.safetensors"))

    def overwrite() -> None:
        with last.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")

    between_describing_and_reading(monkeypatch, overwrite)
    with pytest.raises(CheckpointError, match=f"{last.name}: was replaced or written to after its header was read"):
        load_model(path, FP32)
    assert open_below(path) == []


def load_sharded_elsewhere(path: Path) -> LlamaForCausalLM:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
    load_into(model.to_empty(device="cpu"), path)
    return model


@pytest.mark.parametrize(
    "load",
    [
        lambda path: load_model(path, FP32),
        lambda path: load_model(path, {"zero_optimization": {"stage": 0}}),
        load_sharded_elsewhere,
    ],
    ids=["ZeRO-3", "stage 0", "load_into"],
)
def test_reads_that_were_tried_again_are_in_the_notes(
    load: Callable[[Path], Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "RETRY_DELAYS_S", (0.0,))
    fail_once(monkeypatch, ".safetensors")
    (note,) = get_load_report(load(path)).notes
    assert note.startswith(f"tried again after {path}/model-")
    assert note.endswith(".safetensors: Input/output error (1x)")
    assert get_load_report(load(path)).notes == [], "another load has its own"


def test_cold_files_are_read_by_more_threads_and_faults_are_met_as_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that passes is tried again; reads that give little go on; one that lasts ends the load."""
    threads, ordinary, found = set(), LocalFile.read_into, {}

    def read_into(self: LocalFile, offset: int, memory: memoryview) -> None:
        if self.path.endswith(".safetensors") and executors:
            threads.add(executors[-1].num_threads)
            if executors[-1].num_threads > 4 and faults:
                fail_once(monkeypatch, faults.pop())
        ordinary(self, offset, memory)

    def made(*args: Any) -> Executor:
        executors.append(make_executor(*args))
        return executors[-1]

    executors: list[Executor] = []
    faults: list[str] = []
    make_executor = stages.make_executor
    monkeypatch.setattr(source, "RETRY_DELAYS_S", (0.0,))
    monkeypatch.setattr(stages, "make_executor", made)
    monkeypatch.setattr(LocalFile, "read_into", read_into)
    for is_warm in (True, False):
        monkeypatch.setattr(executor, "is_cached", lambda _, is_warm=is_warm: is_warm)
        faults[:] = [] if is_warm else [".safetensors"]
        model = load_model(path, {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}})
        found[is_warm], report = model.state_dict(), get_load_report(model)
        num_files = len(list(path.glob("*.safetensors")))
        assert report.cold_files == (0 if is_warm else num_files)
        assert ("not cached" in str(report)) is not is_warm
        assert executors[-1].num_threads == (executors[0].num_threads if is_warm else MAX_IN_FLIGHT)
    assert executors[0].num_threads < MAX_IN_FLIGHT
    assert "Input/output error (1x)" in report.notes[0]
    assert all(torch.equal(found[True][name], tensor) for name, tensor in found[False].items())
    cut = os.preadv

    def ended(descriptor: int, buffers: Any, offset: int) -> int:
        return 0 if executors[-1].num_threads == MAX_IN_FLIGHT else cut(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", ended)  # the file has shrunk
    with pytest.raises(CheckpointError, match="ended at byte"):
        load_model(path, BF16)


@pytest.mark.parametrize(("spare_bytes", "goes_past"), [(1 << 30, False), (100, True)])
def test_what_the_host_has_no_room_to_cache_is_read_past_the_cache(
    spare_bytes: int, goes_past: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(rank: int, plan: Any, *_: Any) -> list[checks.Use]:
        return [checks.Use("host", "host", plan.costs.needed_bytes, plan.costs.needed_bytes + spare_bytes)]

    files, done = sorted(path.glob("*.safetensors")), list[str]()
    with contextlib.closing(LocalFile(str(files[0]))) as file:
        if not file.bypass_cache():
            pytest.skip(f"{path} cannot be read past the page cache")
    ordinary = LocalFile._read_past_cache
    monkeypatch.setattr(
        LocalFile, "_read_past_cache", lambda file, *args: done.append(file.path) or ordinary(file, *args)
    )
    monkeypatch.setattr(source, "MIN_DIRECT_BYTES", 512)
    monkeypatch.setattr(executor, "is_cached", lambda path: path == str(files[0]))
    monkeypatch.setattr(stages, "memory_uses", room)
    model = load_model(path, {"zero_optimization": {"stage": 0}})
    report, plain = get_load_report(model), LlamaForCausalLM.from_pretrained(path)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert report.direct_files == (len(files) - 1 if goes_past else 0)
    assert (f"{len(files) - 1} read past the cache" in str(report)) is goes_past is bool(done)
    assert str(files[0]) not in done


def test_shards_need_host_memory_until_they_have_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`to_empty` only maps them. What is there and used is not needed again."""
    config = LlamaConfig(
        vocab_size=17_000, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    total_bytes = sum(parameter.nbytes for parameter in model.parameters())
    ctypes.CDLL(None).malloc_trim(0)  # else the heap may give memory that has pages of earlier tests
    model.to_empty(device="cpu")
    monkeypatch.setattr(checks, "free_heap_bytes", lambda **_: 0)
    monkeypatch.setattr(checks, "rooms", lambda _: [Room("this node", "", 8 << 20)])
    with pytest.raises(MemoryShortageError, match=r"need \d+\.\d MiB, and 8\.00 MiB are free \(this node\)"):
        load_into(model, tmp_path)
    monkeypatch.setattr(checks, "rooms", lambda _: [Room("address space", "", 8 << 20, is_mapped=True)])
    load_into(model, tmp_path)
    monkeypatch.setattr(checks, "rooms", lambda _: [Room("this node", "", 8 << 20)])
    load_into(model, tmp_path)
    assert total_bytes > 20 << 20


def test_a_plan_leaves_no_file_open(path: Path) -> None:
    assert len(plan(path, FP32, rank=1, world_size=2).files) > 4
    assert open_below(path) == []
