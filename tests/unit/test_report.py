"""The report: what it takes from a plan, seconds that add up, memory that is measured, and figures as text."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowmem_load import phases as phases_module
from lowmem_load import report as report_module
from lowmem_load.phases import Memory, Span, host_memory
from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import Destination, LoadPlan, PlannedFile, SlowPath, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.planning.reads import ReadCost
from lowmem_load.report import DeviceMemory, LoadReport, Overlap, device_memory

MIB = 1 << 20


def plan() -> LoadPlan:
    """One parameter of two partitions, the second of which is this rank's, padded; and one that is whole, of ints."""
    planner = Planner()
    weight = ex.Source("file", "w", 0, (5,), torch.bfloat16)
    count = ex.held(torch.arange(3))
    parameters = (
        (weight, "zero3", FlatRange(3, 5), 3, True, False, (SlowPath("w", "why", 7),)),
        (count, "replicated", FlatRange(0, 3), 3, False, True, ()),
    )
    targets = tuple(
        TargetPlan(
            names=(f"{kind}.weight", f"{kind}.tied"),
            shape=expression.shape,
            dtype=expression.dtype,
            kind=kind,
            destinations=(Destination(region, padded, True, planner.plan_fill(kind, expression, region)),),
            is_recast=is_recast,
            is_uninitialised=is_uninitialised,
            slow_paths=slow_paths,
            fingerprint="",
        )
        for expression, kind, region, padded, is_recast, is_uninitialised, slow_paths in parameters
    )
    return LoadPlan(
        name="model",
        rank=1,
        world_size=2,
        targets=targets,
        buffers=(),
        values=tuple(planner.values),
        files=(PlannedFile("a", 70, "", ""), PlannedFile("b", 30, "", "")),
        read_to_describe=(("aten.equal", 12),),
        missing_keys=("a",),
        unexpected_keys=("b",),
        mismatched_keys=(("c", (1,), (2,)),),
        costs=planner.costs(target.destinations[0].fill for target in targets),
    )


def test_a_plan_is_taken() -> None:
    report = LoadReport("model", rank=1, world_size=2)
    report.take_plan(plan(), {"zero_optimization": {"stage": 3}})
    assert report.ds_config == {"zero_optimization": {"stage": 3}}
    assert (report.num_parameters, report.num_elements) == (2, 8)  # unpadded, and once for both names
    assert report.dtype == "torch.bfloat16"  # of the parameters that are floating-point
    assert (report.partition_bytes, report.total_partition_bytes) == (
        6,
        12,
    )  # 2 elements, 1 of padding
    assert report.whole_bytes == 3 * 8
    assert report.needed_bytes == 2 * 2
    assert report.read_cost == ReadCost() and "cost of a read" not in str(report), "where there is nothing to know"
    assert report.file_bytes == 100
    assert (report.missing_keys, report.unexpected_keys) == (["a"], ["b"])
    assert report.mismatched_keys == [("c", (1,), (2,))]
    assert report.recast_parameters == ["zero3.weight"]
    assert report.uninitialised_parameters == ["replicated.weight"]
    assert report.slow_paths == [SlowPath("w", "why", 7)]
    assert report.read_to_describe == (("aten.equal", 12),)
    assert (report.read_bytes, report.num_reads) == (0, 0)  # of what was read, not of what was planned


def test_what_reads_on_the_network_were_taken_to_cost_is_said() -> None:
    report = LoadReport("model")
    report.take_plan(dataclasses.replace(plan(), read_cost=ReadCost(1e-3, 5e8, 1, "nfs4")), {})
    said = "taken as 1000 us and 500 MB/s: nfs4"
    assert f"cost of a read: {said}" in str(report) and report.figures()["cost of a read"] == said


# -- phases ----------------------------------------------------------------------------------------------------------


def clocked(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    ticks = iter(seconds)
    monkeypatch.setattr(phases_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))


def test_seconds_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, 1.0, 3.5, 10.0, 10.25, 20.0, 21.0)
    report = LoadReport("model")
    for name in ("plan", "read", "plan"):
        with report.phase(name):
            pass
    assert report.seconds == {"plan": 3.5, "read": 0.25}
    assert list(report.seconds) == ["plan", "read"]
    epoch = phases_module.EPOCH_S
    assert [(span.phase, span.begin_s - epoch, span.end_s - epoch) for span in report.spans] == [
        ("plan", pytest.approx(1.0, abs=1e-5), pytest.approx(3.5, abs=1e-5)),
        ("read", pytest.approx(10.0, abs=1e-5), pytest.approx(10.25, abs=1e-5)),
        ("plan", pytest.approx(20.0, abs=1e-5), pytest.approx(21.0, abs=1e-5)),
    ]
    assert all(isinstance(span, Span) and span.memory_bytes for span in report.spans)


def test_a_phase_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, 1.0, 3.0)
    report = LoadReport("model")
    with pytest.raises(OSError, match="gone"), report.phase("read"):
        raise OSError("gone")
    assert report.seconds == {"read": 2.0}
    assert report.peak_memory.total_bytes > 0


# -- memory ----------------------------------------------------------------------------------------------------------


def test_peaks_are_the_most_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    host = iter([Memory(5, 1), Memory(2, 9), Memory(8, 0), Memory(8, 0)])
    device = iter([DeviceMemory(3, 50), DeviceMemory(7, 50), DeviceMemory(4, 50), DeviceMemory(4, 51)])
    monkeypatch.setattr(phases_module, "host_memory", lambda: next(host))
    monkeypatch.setattr(report_module, "device_memory", lambda: next(device))
    report = LoadReport("model", start_device=DeviceMemory(2, 50))  # 50: of something before
    for peaks in ((Memory(5, 1), 3), (Memory(2, 9), 7), (Memory(2, 9), 7), (Memory(2, 9), 51)):
        report.sample_memory()
        assert (report.peak_memory, report.peak_device_bytes) == peaks


def test_host_memory_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "statm").write_text("900 123 23 7 0 200 0\n")  # pages: of the address space, resident, of files, ...
    monkeypatch.setattr(phases_module, "STATM", tmp_path / "statm")
    assert host_memory() == Memory(100 * mmap.PAGESIZE, 23 * mmap.PAGESIZE)
    assert host_memory().total_bytes == 123 * mmap.PAGESIZE


@pytest.mark.parametrize("text", [None, "", "900 12\n"])
def test_host_memory_is_zero_where_it_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "statm").write_text(text)
    monkeypatch.setattr(phases_module, "STATM", tmp_path / "statm")
    assert host_memory() == Memory(0, 0)


@pytest.mark.skipif(not phases_module.STATM.exists(), reason="the system has no /proc")
def test_host_memory_grows_by_what_is_written() -> None:
    before = host_memory()
    assert before.anonymous_bytes > MIB  # of a process that imported torch
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    grown = host_memory().anonymous_bytes - before.anonymous_bytes
    assert 56 * MIB < grown < 128 * MIB
    assert block.numel() == 64 * MIB


def test_device_memory_is_zero_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert device_memory() == DeviceMemory(0, 0)


@pytest.mark.parametrize(("is_initialized", "expected"), [(True, (12, 34)), (False, (0, 0))])
def test_device_memory_is_that_of_tensors(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool, expected: tuple[int, int]
) -> None:
    module = SimpleNamespace(
        memory_allocated=lambda: 12, max_memory_allocated=lambda: 34, is_initialized=lambda: is_initialized
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert device_memory() == DeviceMemory(*expected)


def test_spans_of_time_overlap_once() -> None:
    reads, copies = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], [(2.5, 5.5), (2.75, 3.0)]
    assert Overlap.of(reads, copies) == Overlap(4.0, 3.0, 1.0)
    assert Overlap.of(reads, []) == Overlap(4.0, 0.0, 0.0)


# -- as text ---------------------------------------------------------------------------------------------------------


def test_the_text_holds_the_figures() -> None:
    report = LoadReport(
        "some/model",
        rank=3,
        world_size=8,
        dtype="torch.bfloat16",
        num_parameters=291,
        num_elements=6_738_415_616,
        persistent_parameters=65,
        persistent_elements=266_240,
        partition_bytes=3 * MIB // 2,
        total_partition_bytes=12 * MIB,
        needed_bytes=MIB,
        read_bytes=5 * MIB // 2,
        num_reads=17,
        num_opens=9,
        headers_from=2,
        seconds={"describe": 1.234, "plan": 0.5},
        start_memory=Memory(MIB, MIB),
        peak_memory=Memory(5 * MIB, 2 * MIB),
    )
    assert str(report).splitlines() == [
        "some/model: 291 parameters, 6.738 B elements, torch.bfloat16, rank 3 of 8",
        "  partition 1.5 MiB here, 12.0 MiB in all",
        "  kept whole between steps: 65 small parameters, 0.266 M elements",
        "  read 2.5 MiB in 17 reads for 1.0 MiB needed",
        "  9 opens of files; headers read by rank 2, of the same node",
        "  peak 5.0 MiB above the start",
        "  describe 1.23 s, plan 0.50 s",
    ]


def test_the_text_names_at_most_five_of_a_list() -> None:
    report = LoadReport("model", whole_bytes=MIB)
    report.missing_keys = list("abcde")
    report.unexpected_keys = list("uvwxyz")
    report.slow_paths = [SlowPath("slow.weight", "why", 7)]
    lines = str(report).splitlines()
    assert lines[1] == "  partition 0.0 MiB here, 0.0 MiB in all; 1.0 MiB whole on every rank"
    assert lines[-3:] == [
        "  missing_keys: 5: a, b, c, d, e",
        "  unexpected_keys: 6: u, v, w, x, y, ...",
        "  slow_paths: 1: slow.weight",
    ]


def test_savings_are_what_is_known_in_one_line() -> None:
    report = LoadReport("model", rank=1, world_size=4, start_memory=Memory(3 * MIB, 0), peak_memory=Memory(8 * MIB, 0))
    report.file_bytes, report.read_bytes = 16 * MIB, 4 * MIB
    report.partition_bytes, report.total_partition_bytes, report.whole_bytes = 2 * MIB, 8 * MIB, MIB
    assert report.savings() == (
        "model: rank 1 of 4 read 4.0 of 16.0 MiB in the files (75% not read), holds 3.0 of 9.0 MiB of parameters, "
        "and took at most 5.0 MiB of host memory for it"
    )
    report.read_bytes = 17 * MIB  # some operations read twice
    assert "(0% not read)" in report.savings()
    report.file_bytes = report.read_bytes = 0  # from_config
    assert "read 0.0 of 0.0 MiB in the files, holds" in report.savings()


def test_known_differences_from_stock_are_told_of_what_is_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def known(names: Iterable[str]) -> list[str]:
        asked.append(set(names))
        return ["stock rounds"]

    monkeypatch.setattr(report_module, "known_differences", known)
    report = LoadReport("model")
    report.take_plan(plan(), {})
    assert report.differences_from_stock == ["stock rounds"]
    assert asked == [{"zero3.weight", "zero3.tied", "replicated.weight", "replicated.tied"}]
    assert str(report).endswith("\n  known: stock rounds")
    assert report.savings().endswith(" MiB of host memory for it; known: stock rounds")
    whole = LoadReport("model")
    whole.take_plan(dataclasses.replace(plan(), targets=plan().targets[1:]), {})
    assert whole.differences_from_stock == []
