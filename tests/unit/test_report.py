"""The report: what it takes from a plan, seconds that add up, memory that is measured, and figures as text."""

import contextlib
import dataclasses
import mmap
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_load import phases as phases_module
from lowmem_load.errors import ConfigError
from lowmem_load.load import report as report_module
from lowmem_load.load.report import DeviceMemory, LoadReport, device_memory
from lowmem_load.phases import Memory, host_memory, progress_bar
from lowmem_load.planning.load_plan import SlowPath
from tests.unit.test_planner import made_plan

MIB = 1 << 20


def test_a_plan_is_taken() -> None:
    report = LoadReport("model", rank=1, world_size=2)
    plan = made_plan(rank=1)
    report.take_plan(plan, {"zero_optimization": {"stage": 3}})
    assert report.ds_config == {"zero_optimization": {"stage": 3}}
    assert report.contents == "2 tensors, 725 parameters, float32"  # unpadded, and once for both names
    assert report.partition_bytes == 250 * 4  # 10 elements of padding
    assert report.whole_bytes == 5 * 4
    assert report.needed_bytes == plan.costs.needed_bytes == 2880
    assert report.file_bytes == 2880
    keys = {"missing_keys": ["a"], "unexpected_keys": ["b"], "mismatched_keys": [("c", (1,), (2,))]}
    assert report.loading_info == keys
    assert report.notes[0] == (
        "in float32, the dtype that this ds_config trains in; an ordinary load keeps another: zero3.weight"
    )
    assert report.slow_paths == [SlowPath("zero3.weight", "why"), SlowPath("replicated.weight", "why")]
    assert (report.read_bytes, report.num_reads) == (0, 0)  # of what was read, not of what was planned

    targets = tuple(dataclasses.replace(target, kind="sharded") for target in plan.targets)
    report = LoadReport("model")
    report.take_plan(dataclasses.replace(plan, targets=targets), {"zero_optimization": {"stage": 3}})
    assert report.ds_config == {}
    assert "  keeps: 1020 B of shards" in str(report).splitlines()


def test_the_dtype_does_not_depend_on_the_order_in_which_a_rank_reads() -> None:
    plan, found = made_plan(), []
    gate = dataclasses.replace(plan.targets[0], dtype=torch.bfloat16)
    for targets in permutations((*plan.targets, gate, dataclasses.replace(gate))):
        report = LoadReport("model")
        report.take_plan(dataclasses.replace(plan, targets=targets), {})
        found.append(report.contents)
    assert {*found} == {"4 tensors, 2,165 parameters, bfloat16"}


# -- phases ----------------------------------------------------------------------------------------------------------


def test_seconds_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 3.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr(phases_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    report = LoadReport("model")
    for name in ("plan", "read", "plan"):
        with contextlib.suppress(OSError), report.phase(name):
            raise OSError("a phase that fails is counted")
    assert report.seconds == {"plan": 3.5, "read": 0.25}
    assert list(report.seconds) == ["plan", "read"]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_peaks_are_the_most_that_was_seen_above_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    host = iter([Memory(5, 1), Memory(2, 9), Memory(8, 0), Memory(8, 0)])
    device = iter([DeviceMemory(3, 50), DeviceMemory(7, 50), DeviceMemory(4, 50), DeviceMemory(4, 51)])
    monkeypatch.setattr(phases_module, "host_memory", lambda: next(host))
    monkeypatch.setattr(report_module, "device_memory", lambda: next(device))
    report = LoadReport("model", _start=Memory(1, 1), _device_start=DeviceMemory(2, 50))  # 50: of something before
    for peaks in ((Memory(4, 0), 1), (Memory(1, 8), 5), (Memory(1, 8), 5), (Memory(1, 8), 49)):
        report.sample_memory()
        assert (report.peak_memory, report.peak_device_bytes) == peaks


def test_host_memory_is_what_the_kernel_says_if_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "statm"
    monkeypatch.setattr(phases_module, "STATM", file)
    assert host_memory() == Memory(0, 0)
    file.write_text("900 12\n")
    assert host_memory() == Memory(0, 0)
    file.write_text("900 123 23 7 0 200 0\n")  # pages: of the address space, resident, of files, ...
    assert host_memory() == Memory(100 * mmap.PAGESIZE, 23 * mmap.PAGESIZE)


@pytest.mark.parametrize(
    ("device", "module", "expected"),
    [
        (None, {}, (0, 0)),
        ("cuda", {"is_initialized": lambda: False}, (0, 0)),
        ("cuda", {"is_initialized": lambda: True}, (12, 34)),
    ],
)
def test_device_memory_is_that_of_tensors(
    device: str | None, module: dict[str, Any], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"memory_allocated": lambda: 12, "max_memory_allocated": lambda: 34}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(str(device)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**figures, **module))
    assert device_memory() == DeviceMemory(*expected)


# -- as text ---------------------------------------------------------------------------------------------------------


def test_the_text_holds_the_figures() -> None:
    report = LoadReport(
        "some/model",
        rank=3,
        world_size=8,
        contents="291 tensors, 6.74 B parameters, bfloat16",
        partition_bytes=3 * MIB // 2,
        file_bytes=12 * MIB,
        needed_bytes=MIB,
        read_bytes=5 * MIB // 2,
        num_reads=17,
        seconds={"describe": 1.234, "plan": 0.5},
        peak_memory=Memory(4 * MIB, MIB),
        ds_config={"zero_optimization": {"stage": 3}},
    )
    assert str(report).splitlines() == [
        "some/model: rank 3 of 8",
        "  model: 291 tensors, 6.74 B parameters, bfloat16",
        "  keeps: 1.50 MiB of 12.0 MiB partitioned",
        "  read: 2.50 MiB of 12.0 MiB in the files, 1.00 MiB needed, 17 reads",
        "  host memory: peak 5.00 MiB above the start",
        "  seconds: describe 1.23, plan 0.50",
    ]


def test_what_only_some_loads_have_is_said_of_those() -> None:
    report = LoadReport("model", whole_bytes=MIB, num_quantized=14, notes=["it rounds", "3 reads again"])
    report.peak_device_bytes = 5 * MIB
    report.loading_info = {"missing_keys": ["a", "b"], "unexpected_keys": list("rstuvwxyz"), "mismatched_keys": []}
    report.slow_paths = [SlowPath("slow.weight", "why")]
    assert str(report).splitlines() == [
        "model: rank 0 of 1",
        "  model: 0 tensors, 0 parameters; 14 tensors are quantized",
        "  keeps: 1.00 MiB full on every rank",
        "  read: nothing: built from its configuration",
        "  host memory: peak 0 B above the start",
        "  device memory: peak 5.00 MiB above the start",
        "  missing keys: a, b",
        "  unexpected keys: r, s, t, u, v, w, x, y, ... (9 in all)",
        "  slow paths: slow.weight",
        "  notes: it rounds; 3 reads again",
    ]


def test_a_bar_in_a_log_is_rare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[dict[str, Any]] = []
    ordinary = phases_module.tqdm

    def noted(**kwargs: Any) -> Any:
        made.append(kwargs)
        return ordinary(**kwargs)

    monkeypatch.setattr(phases_module, "tqdm", noted)

    def show(rank: int, setting: str = "") -> None:
        monkeypatch.setenv("LOWMEM_LOAD_PROGRESS", setting)
        with progress_bar(1 << 30, "Loading partitions", rank) as update:
            update(1 << 29)

    show(rank=0)
    assert made[0]["delay"] == made[0]["mininterval"] == phases_module.LINE_S
    show(rank=1)
    show(rank=0, setting="0")
    assert capsys.readouterr().err == "" and len(made) == 1
    show(rank=0, setting="1")
    assert "Loading partitions of rank 0:  50%" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="'no', expected 0 or 1"):
        show(rank=1, setting="no")
