"""The reader puts the right bytes in the right place, within its budget, and never believes a short file."""

import contextlib
import os
import threading
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import TruncatedFileError
from lowmem_load.files import executor as executor_module
from lowmem_load.files import memory as memory_module
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.files.memory import Take, Temporaries
from lowmem_load.files.source import LocalFile
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import BLOCK_NUMEL, ReadLimits
from lowmem_load.planning.regions import FlatRange, partition_range

VALUES = torch.arange(24 * 30, dtype=torch.float32).reshape(24, 30)
OFFSET = 40
LONG_S = 20.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(b"\xff" * OFFSET + VALUES.numpy().tobytes())
    return path


def leaf(path: Path) -> ex.Source:
    return ex.Source(str(path), "w", OFFSET, (24, 30), torch.float32)


def read(
    node: ex.Expression, flat_range: FlatRange, num_threads: int = 1, limits: ReadLimits | None = None
) -> tuple[torch.Tensor, Executor]:
    """Plans and executes; what is read is what was planned."""
    destination = torch.full((flat_range.numel,), float("nan")).to(node.dtype)
    planner, done = Planner(limits), []
    fill = planner.plan_fill("w", node, flat_range)
    with Executor(num_threads=num_threads) as executor:
        executor.on_bytes = done.append
        executor.fill(fill, destination, planner.values, planner.constants)
        executor.finish()
    costs = planner.costs([fill])
    assert (costs.read_bytes, costs.num_reads) == (executor.stats.read_bytes, executor.stats.num_reads)
    assert sum(done) == costs.needed_bytes, "every needed byte is counted as progress, and no other"
    return destination, executor


@settings(max_examples=60, deadline=None)
@given(
    dims=st.permutations([0, 1, 2]),
    shape=st.sampled_from([(24, 30, 1), (4, 6, 30), (24, 5, 6), (2, 12, 30)]),
    staging=st.sampled_from([4, 32, 256, 1 << 20]),
    gap=st.sampled_from([0, 8, 200, 1 << 20]),
    world_size=st.integers(1, 5),
)
def test_strided_reads_equal_torch(
    tmp_path_factory: pytest.TempPathFactory,
    dims: list[int],
    shape: tuple[int, int, int],
    staging: int,
    gap: int,
    world_size: int,
) -> None:
    path = tmp_path_factory.mktemp("strided") / "data"
    path.write_bytes(b"\xff" * OFFSET + VALUES.numpy().tobytes())
    node = ex.permute(ex.reshape(leaf(path), shape), dims)
    expected = VALUES.reshape(shape).permute(dims).reshape(-1)
    for rank in range(world_size):
        span = partition_range(720, rank, world_size)
        values, reader = read(node, span, limits=ReadLimits(staging_bytes=staging, max_gap_bytes=gap))
        assert torch.equal(values, expected[span.start : span.end])
        assert reader.stats.read_bytes >= span.numel * 4
        if gap == 0:
            assert reader.stats.read_bytes == span.numel * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_counted_while_a_read_goes_on(
    file: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank whose only read takes minutes seems not to get on."""
    counted = []

    class Watched(LocalFile):
        def read_into(self, offset: int, memory: memoryview) -> None:
            counted.append(executor.stats.read_bytes)
            super().read_into(offset, memory)

    monkeypatch.setattr("lowmem_load.files.executor.PART_BYTES", 1000)
    planner = Planner()
    fill = planner.plan_fill("w", ex.cast(leaf(file), dtype), FlatRange(5, 720))
    destination = torch.empty(715, dtype=dtype)
    with Executor(open_source=Watched) as executor:
        executor.fill(fill, destination, planner.values, planner.constants)
    assert counted == [0, 1000, 2000]
    assert (executor.stats.read_bytes, executor.stats.num_reads) == (2860, 1)
    assert torch.equal(destination, VALUES.reshape(-1)[5:].to(dtype))


def test_one_thread_reads_in_groups_and_leaves_nothing_waiting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MAX_DELAYED", 3)
    planner, flat_range = Planner(), FlatRange(0, 720)
    fill = planner.plan_fill("w", leaf(file), flat_range)
    destinations = [torch.full((720,), float("nan")) for _ in range(4)]
    num_reads = []
    with Executor() as executor:
        for destination in destinations:
            executor.fill(fill, destination, planner.values, planner.constants)
            num_reads.append(executor.stats.num_reads)
        executor.finish()
        num_reads.append(executor.stats.num_reads)
    assert num_reads == [0, 0, 3, 3, 4]
    assert all(torch.equal(destination, VALUES.view(-1)) for destination in destinations)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_shrank_is_an_error(file: Path, num_threads: int, dtype: torch.dtype) -> None:
    os.truncate(file, OFFSET + VALUES.nbytes - 1)
    with pytest.raises(TruncatedFileError, match=r"data: ended at byte 2919 \(1 bytes short\) \(while 'w' was read"):
        read(ex.cast(leaf(file), dtype), FlatRange(0, 720), num_threads)


# -- elementwise operations ------------------------------------------------------------------------------------------


def added(*parts: ex.Expression) -> ex.Elementwise:
    dtype = torch.float32
    return ex.Elementwise("added", lambda values: values[0].float() * 3 + values[1], parts, parts[0].shape, dtype)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_operations_within_operations_equal_torch_and_take_the_memory_that_is_planned(
    tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_taken: dict[int, int] = {}

    class Counted(Temporaries):
        """Notes the most bytes that are lent at one time, by thread."""

        num_bytes = 0

        @contextlib.contextmanager
        def frame(self) -> Iterator[Take]:
            before, thread = self.num_bytes, threading.get_ident()
            with super().frame() as take:

                def counted(numel: int, dtype: torch.dtype) -> torch.Tensor:
                    self.num_bytes += numel * dtype.itemsize
                    most_taken[thread] = max(most_taken.get(thread, 0), self.num_bytes)
                    return take(numel, dtype)

                yield counted
            self.num_bytes = before

    monkeypatch.setattr(executor_module, "Temporaries", Counted)
    numel, limits = 2 * BLOCK_NUMEL + 77, ReadLimits(staging_bytes=(BLOCK_NUMEL + 5) * 4)
    values = torch.arange(numel, dtype=torch.int32)
    (tmp_path / "data").write_bytes(values.numpy().tobytes())
    tensor = ex.Source(str(tmp_path / "data"), "w", 0, (numel,), torch.int32)
    node = ex.cast(added(tensor, added(tensor, ex.hold(values))), torch.bfloat16)
    expected = (values.float() * 3 + (values.float() * 3 + values)).bfloat16()
    found, _ = read(node, FlatRange(3, numel), num_threads, limits)
    assert torch.equal(found, expected[3:])
    assert threading.get_ident() not in most_taken  # what it computes goes to another heap
    planner = Planner(limits)
    planned = planner.costs([planner.plan_fill("w", node, FlatRange(3, numel))]).largest_temporary_bytes
    for taken in most_taken.values():
        assert taken <= planned
        assert num_threads > 1 or taken >= planned - BLOCK_NUMEL * 4


@pytest.mark.parametrize("span", [(0, 180), (0, 1), (7, 8), (3, 179), (64, 96), (178, 180), (5, 5)])
def test_groups_are_computed_whole_of_what_they_need_alone(
    file: Path, span: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three elements of a result come of twelve, which are summed up four at a time: the last three are of ten."""
    monkeypatch.setattr(memory_module, "GROUPED_NUMEL", 48)

    def sums(values: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = torch.split(values[0], 4)
        within = [index % 3 for index in range(len(parts))]
        return torch.stack([part.sum() + place for part, place in zip(parts, within, strict=True)])

    tensor = ex.Source(str(file), "w", OFFSET, (718,), torch.float32)
    node = ex.Elementwise("sums", sums, (tensor,), (180, 1), torch.float32, group=3, part_group=12)
    found, executor = read(node, FlatRange(*span), limits=ReadLimits(staging_bytes=400))
    assert torch.equal(found, sums([VALUES.view(-1)[:718]])[span[0] : span[1]])
    groups = -(-span[1] // 3) - span[0] // 3 if span[1] > span[0] else 0
    assert executor.stats.read_bytes <= groups * 48 * 1.5


@pytest.mark.parametrize("num_threads", [1, 3])
def test_operations_run_on_the_device_of_the_thread_that_asks(
    file: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Else they would all run on the first device."""

    class Device(threading.local):
        index = 0

    device, seen = Device(), set()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: device.index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(device, "index", index))

    def double(values: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.add((threading.current_thread().name.startswith("lowmem_load-read"), device.index))
        return values[0] * 2

    part = ex.Source(str(file), "w", 0, (60,), torch.float32)
    inner = ex.Elementwise("double", double, (part,), (60,), torch.float32)
    outer = ex.Elementwise("double", double, (inner,), (60,), torch.float32)
    with Executor(num_threads=num_threads) as executor:
        for index in (5, 7):  # of one executor, as of a lazy model
            device.index = index
            read_whole(executor, outer)
            assert seen == {(True, index)}
            seen.clear()


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_only_so_many_tasks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MAX_WAITING", 4)
    go_on, given = threading.Event(), []
    tasks = executor_module.Tasks(2)

    def give() -> None:
        for number in range(10):
            tasks.run(lambda: go_on.wait(LONG_S) and None)
            given.append(number)

    giver = threading.Thread(target=give)
    giver.start()
    giver.join(0.2)
    assert len(given) == 4
    go_on.set()
    giver.join(LONG_S)
    tasks.finish()
    tasks.close()
    assert len(given) == 10


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_failure_is_heard_of_while_earlier_tasks_go_on(is_waiting: bool) -> None:
    go_on, tasks = threading.Event(), executor_module.Tasks(2)
    tasks.run(lambda: go_on.wait(LONG_S) and None)
    for _ in range(executor_module.MAX_WAITING - 2):
        tasks.run(lambda: None)

    def fail() -> None:
        threading.Event().wait(0.2 if is_waiting else 0.0)  # once the calling thread waits, or before
        raise ValueError("it failed")

    tasks.run(fail)
    threading.Event().wait(0.0 if is_waiting else 0.2)
    begin_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(ValueError, match="it failed"):
            tasks.finish()
        with pytest.raises(ValueError, match="it failed"):
            tasks.run(lambda: None)
    assert time.monotonic() - begin_s < LONG_S / 2
    go_on.set()
    tasks.close()


def test_an_interrupt_while_a_task_is_given_away_does_not_hang_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = executor_module.Tasks(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(lambda: None)
    closing = threading.Thread(target=tasks.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
