"""`fill` proves the memory before it reads, names what it fills, and the step around it tells how far it is."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, PlanError, TruncatedFileError
from lowmem_load.files import executor as executor_module
from lowmem_load.files.executor import Executor, refuse_left
from lowmem_load.files.fill import Part, fill
from lowmem_load.files.source import LocalFile
from lowmem_load.load.execute import reading
from lowmem_load.phases import Progress, no_callback
from lowmem_load.planning import expression as ex
from lowmem_load.planning.regions import FlatRange
from tests.storage import on_network

VALUES = torch.arange(60, dtype=torch.float32)


@pytest.fixture
def leaf(tmp_path: Path) -> ex.Source:
    path = tmp_path / "data"
    path.write_bytes(VALUES.numpy().tobytes())
    return ex.Source(str(path), "stored", 0, (60,), torch.float32)


def part(leaf: ex.Source, memory: torch.Tensor, name: str = "w") -> Part:
    return Part(name, leaf, FlatRange(10, 10 + memory.numel()), memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_filled_cast_and_costed(leaf: ex.Source, dtype: torch.dtype) -> None:
    whole, begun = torch.zeros(30, dtype=dtype), []
    parts = [part(leaf, whole[10:20], "second"), part(leaf, whole[:10], "first")]
    with Executor() as executor:
        costs = fill(parts, executor, lambda: begun.append(1))
    assert torch.equal(whole, torch.cat([VALUES[10:20], VALUES[10:20], torch.zeros(10)]).to(dtype))
    assert (costs.needed_bytes, len(begun)) == (80, 2)


def test_more_threads_fill_if_most_files_are_cold(leaf: ex.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory of the host. Each file is asked for once."""
    asked, seen = list[str](), set[str]()
    monkeypatch.setattr(executor_module, "is_cached", lambda path: asked.append(path) or bool(asked[1:]))
    other = replace(leaf, path=shutil.copy(leaf.path, f"{leaf.path}2"))
    ordinary = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile, "read_into", lambda *args: (seen.add(threading.current_thread().name), ordinary(*args))
    )
    with Executor(num_if_cold=3) as executor:
        executor.have_enough_in_flight([leaf.path], on_host=False)
        assert (executor.num_threads, executor.stats.cold_files) == (1, 1)
        for number, source in enumerate((leaf, other, leaf)):
            fill([part(source, whole := torch.zeros(10))], executor)
            assert torch.equal(whole, VALUES[10:20])
            assert executor.num_threads == 3, number
        assert asked == [leaf.path, other.path] and executor.stats.cold_files == 1
    assert all(name.startswith("lowmem_load-read") for name in seen)
    with Executor(num_if_cold=3) as executor:  # now all are cached
        fill([part(leaf, torch.zeros(10))], executor)
        assert (executor.num_threads, executor.stats.cold_files) == (1, 0)


@pytest.mark.parametrize(("on_host", "is_far"), [(True, True), (False, True), (True, False)])
def test_many_threads_read_nothing_ahead_from_a_network(
    leaf: ex.Source, monkeypatch: pytest.MonkeyPatch, *, on_host: bool, is_far: bool
) -> None:
    """Other nodes need what a network file system reads ahead. Few threads need it themselves."""
    advised, ordinary = list[tuple[str, int]](), os.posix_fadvise

    def fadvise(descriptor: int, offset: int, nbytes: int, advice: int) -> None:
        advised.append((os.readlink(f"/proc/self/fd/{descriptor}"), advice))
        ordinary(descriptor, offset, nbytes, advice)

    monkeypatch.setattr(executor_module, "is_cached", lambda _: False)
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    with on_network() if is_far else contextlib.nullcontext(), Executor(num_if_cold=3) as executor:
        executor.have_enough_in_flight([leaf.path], on_host=on_host)
    assert advised == ([(leaf.path, os.POSIX_FADV_RANDOM)] if on_host and is_far else [])


def test_memory_of_two_parts_is_refused_before_a_read(leaf: ex.Source) -> None:
    whole = torch.zeros(30)
    with Executor() as executor, pytest.raises(PlanError, match="a and b: would be filled into the same memory"):
        fill([part(leaf, whole[10:20], "b"), part(leaf, whole[:11], "a")], executor)
    assert not whole.any()


@pytest.mark.parametrize("memory", [torch.zeros(30)[:9], torch.zeros(40)[::2][:10]], ids=["short", "strided"])
def test_memory_that_a_part_does_not_fit_is_refused(leaf: ex.Source, memory: torch.Tensor) -> None:
    with Executor() as executor, pytest.raises(PlanError, match=r"w: 10 elements of torch[.]float32 do not fit"):
        fill([Part("w", leaf, FlatRange(0, 10), memory)], executor)
    assert not memory.any()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_error_of_a_file_names_what_is_filled(leaf: ex.Source, num_threads: int) -> None:
    os.truncate(leaf.path, 100)
    with (
        Executor(num_threads=num_threads) as executor,
        pytest.raises(TruncatedFileError, match=r"'stored' was read.*, which fills 'model\.w'"),
    ):
        fill([part(leaf, torch.zeros(40), "model.w")], executor)


# -- reads that a failed load leaves ----------------------------------------------------------------------------------


class Late(LocalFile):
    """A file whose bytes come when the storage answers; the system keeps it open until then."""

    begun, answers, num_reads = threading.Event(), threading.Event(), 0

    def read_into(self, offset: int, memory: memoryview) -> None:
        with open(self.path, "rb") as file:
            Late.num_reads += 1
            self.begun.set()
            self.answers.wait(30)
            os.preadv(file.fileno(), [memory], offset)


@pytest.fixture(autouse=True)
def _answers() -> Iterator[None]:
    Late.begun.clear()
    Late.answers.clear()
    Late.num_reads = 0
    yield
    Late.answers.set()


def fail() -> None:
    Late.begun.wait(10)
    raise RuntimeError("another rank has failed")


def leave_reading(leaf: ex.Source, memory: torch.Tensor) -> None:
    """Fail while a file is read that does not answer, as another rank that fails would have it."""
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank"), Executor(num_threads=2, open_source=Late) as executor:
        fill([part(leaf, memory)], executor, fail)
    assert time.monotonic() - began_s < 10


def replace_values(leaf: ex.Source) -> None:
    """Write other values over the file, by a new one: the read under way gets the old ones."""
    new = f"{leaf.path}.new"
    (VALUES + 100).numpy().tofile(new)
    os.replace(new, leaf.path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["direct", "staged"])
def test_memory_is_not_filled_while_a_read_of_a_failed_load_may_write_into_it(
    leaf: ex.Source, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "LEAVE_S", 0.2)
    whole = torch.zeros(40, dtype=dtype)
    leave_reading(leaf, whole[:20])
    replace_values(leaf)
    with Executor(num_threads=2) as executor:
        refused = pytest.raises(CheckpointError, match=r"w: cannot be filled.* is still reading .*data into its memory")
        with refused:
            fill([part(leaf, whole[10:30])], executor)
        with pytest.raises(CheckpointError, match="engine: cannot be filled"):
            refuse_left("engine")  # whatever is to be filled
        fill([part(leaf, whole[20:])], executor)
        assert torch.equal(whole, torch.cat([torch.zeros(20), VALUES[10:30] + 100]).to(dtype))
        Late.answers.set()
        fill([part(leaf, whole[:20])], executor)  # once that read has ended
    assert torch.equal(whole, torch.cat([VALUES[10:30], VALUES[10:30]]).to(dtype) + 100)


def test_a_failed_load_waits_for_the_reads_of_storage_that_answers(leaf: ex.Source) -> None:
    whole, timer = torch.zeros(20), threading.Timer(0.3, Late.answers.set)
    timer.start()
    leave_reading(leaf, whole)
    assert not executor_module._left
    with Executor() as executor:
        replace_values(leaf)
        fill([part(leaf, whole)], executor)
    assert torch.equal(whole, VALUES[10:30] + 100)
    timer.join()


def test_a_read_of_a_failed_load_ends_with_the_part_that_it_is_at(
    leaf: ex.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a tensor of GBs would be read to its end for nobody, and its memory could not be filled meanwhile."""
    monkeypatch.setattr(executor_module, "LEAVE_S", 0.2)
    monkeypatch.setattr(executor_module, "PART_BYTES", 16)
    leave_reading(leaf, torch.zeros(40))
    Late.answers.set()
    refuse_left("nothing is left")
    assert Late.num_reads == 1


def test_the_step_around_it_tells_how_far_it_is(leaf: ex.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that tells no progress is judged by the timeout of the process group, which kills slow loads."""
    told = []

    @contextlib.contextmanager
    def step(_: RankGroup, title: str, *, name: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        yield
        assert progress is not None
        told.append((title, name, progress()))

    monkeypatch.setattr(RankGroup, "step", step)
    with Executor() as executor:
        with reading(DistributedInterface(), "model", [executor], 160, bar="Loading") as state:
            fill([part(leaf, torch.zeros(40))], executor, state.on_part)
        assert (executor.on_bytes, executor.tasks.check) == (no_callback, no_callback)
    assert told == [("reading", "model", Progress(161, f"1 tensors begun, 0.0 of 0.0 MiB read, last from {leaf.path}"))]
