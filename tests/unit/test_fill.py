"""`fill` proves the memory before it reads, names what it fills, and the step around it tells how far it is."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import PlanError, TruncatedFileError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Part, fill
from lowmem_load.load.execute import reading
from lowmem_load.phases import Progress, no_callback
from lowmem_load.planning import expression as ex
from lowmem_load.planning.regions import FlatRange

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
