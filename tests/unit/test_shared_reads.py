"""What the ranks of a node read together is read once, and every rank gets its elements; in threads, without ranks."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowmem_load.distributed.nodes import make_memory, map_memory_of
from lowmem_load.errors import LowMemLoadError, TruncatedFileError
from lowmem_load.io.executor import Executor
from lowmem_load.pipeline import shared_reads
from lowmem_load.pipeline.shared_reads import TOO_MANY_RANGES, SharedBuffer, SharedReads, decline
from lowmem_load.planning import expression as ex
from lowmem_load.planning.reads import Fill, ReadCost, ReadLimits
from lowmem_load.planning.sharing import Shared
from tests.together import CONTENT, NUMEL, VALUES, fills, in_threads, leaf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    return path


def together(
    num_ranks: int, act: Callable[[int, SharedBuffer], object], chunk_bytes: int = 1 << 13
) -> list[BaseException | object]:
    """Returns what `act` returns or raises for each rank, each in a thread with its own mappings of the same memory."""
    nbytes = mmap.PAGESIZE + 2 * chunk_bytes
    places = [make_memory(nbytes) for _ in range(num_ranks)]

    def run(rank: int) -> object:
        memories = [map_memory_of(place, nbytes) for place in places]
        return act(rank, SharedBuffer(memories, rank))

    found = in_threads(num_ranks, run)
    for place in places:
        os.close(place.descriptor)
    return found


def share(fill: Fill, result: torch.Tensor, buffer: SharedBuffer, block_bytes: int = 1) -> Shared | None:
    """Reads one rank's partition together with the others."""
    sharing = SharedReads(fill.steps, buffer, ReadCost(block_bytes=block_bytes), check=lambda: None)
    with Executor() as executor:
        sharing.take(fill, result)
        return sharing.run(executor)


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 1 << 13], ids=["many rounds", "one round"])
def test_what_is_read_together_equals_torch(file: Path, chunk_bytes: int) -> None:
    node = ex.cast(ex.permute(leaf(file), (2, 0, 1)), torch.float64)
    _, plans = fills(node, 3, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    results = [torch.full((fill.numel,), -1.0, dtype=torch.float64) for fill in plans]

    def load(place: int, buffer: SharedBuffer) -> object:
        sharing = SharedReads(plans[place].steps, buffer, ReadCost(), check=lambda: None)
        with Executor(num_threads=1 + place) as executor:
            assert sharing.take(plans[place], results[place]).steps == ()
            shared = sharing.run(executor)
            assert isinstance(shared, Shared) and executor.stats.read_bytes == shared.read_bytes
            return shared

    shared = together(3, load, chunk_bytes)
    assert torch.equal(torch.cat(results), VALUES.permute(2, 0, 1).reshape(-1).double())
    assert all(isinstance(each, Shared) for each in shared), shared
    assert sum(each.read_bytes for each in shared if isinstance(each, Shared)) == NUMEL * 4
    assert {(each.node_bytes, each.wanted_bytes > 2 * NUMEL * 4) for each in shared if isinstance(each, Shared)} == {
        (NUMEL * 4, True)
    }


def test_where_little_is_spared_each_reads_alone(file: Path) -> None:
    _, plans = fills(leaf(file), 2, ReadLimits())
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]

    found = together(2, lambda place, buffer: share(plans[place], results[place], buffer))
    assert found == [None, None]
    assert torch.equal(torch.cat(results), VALUES.reshape(-1))


@pytest.mark.parametrize("case", ["one declines", "one has too many ranges to list"])
def test_if_one_rank_cannot_share_each_reads_alone(file: Path, case: str) -> None:
    _, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 3, ReadLimits(1 << 20, 1 << 20, 0))
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]

    def load(place: int, buffer: SharedBuffer) -> object:
        if case == "one declines" and place == 1:
            decline(buffer, "rank 1 cannot open the shared memory of rank 0")
            return ""
        sharing = SharedReads(plans[place].steps, buffer, ReadCost(), check=lambda: None)
        with Executor() as executor:
            sharing.take(plans[place], results[place])
            assert sharing.run(executor) is None
        assert torch.equal(results[place], VALUES.permute(2, 0, 1).reshape(-1)[place * 600 : place * 600 + 600])
        return sharing.why_alone

    if case == "one declines":
        reason = "rank 1 cannot open the shared memory of rank 0"
        assert together(3, load) == [reason, "", reason]
    else:
        assert together(3, load, 64) == [TOO_MANY_RANGES] * 3


def test_slices_that_share_a_block_are_read_once_where_blocks_count(file: Path) -> None:
    _, plans = fills(leaf(file), 3, ReadLimits())
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]

    def load(place: int, buffer: SharedBuffer) -> object:
        block_bytes = 1 << 20 if place == 1 else 1  # of what the ranks of a node find, the largest counts
        return share(plans[place], results[place], buffer, block_bytes)

    assert all(isinstance(each, Shared) and each.node_bytes == NUMEL * 4 for each in together(3, load))
    assert torch.equal(torch.cat(results), VALUES.reshape(-1))


def test_a_rank_that_fails_is_not_waited_for(file: Path) -> None:
    """Its own error is raised there; the others raise what their check raises once they have heard of it."""
    _, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 3, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise InterruptedError

    class Failing(Executor):
        def read_range(self, *args: object) -> None:
            failed.set()
            raise TruncatedFileError("ended early")

    def load(place: int, buffer: SharedBuffer) -> object:
        sharing = SharedReads(plans[place].steps, buffer, ReadCost(), check=check)
        with Failing() if place == 1 else Executor() as executor:
            sharing.take(plans[place], torch.empty(plans[place].numel, dtype=torch.int32))
            return sharing.run(executor)

    assert [type(each) for each in together(3, load)] == [InterruptedError, TruncatedFileError, InterruptedError]


def test_a_rank_that_left_is_not_waited_for_even_if_nobody_says_why(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a rank that was stopped, given up by the others, and goes on."""
    monkeypatch.setattr(shared_reads, "LEAVE_GRACE_S", 0.05)
    _, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 2, ReadLimits(1 << 20, 1 << 20, 1 << 20))

    def load(place: int, buffer: SharedBuffer) -> object:
        def give_up() -> None:
            if place == 1:
                raise InterruptedError

        sharing = SharedReads(plans[place].steps, buffer, ReadCost(), check=give_up)
        with Executor() as executor:
            sharing.take(plans[place], torch.empty(plans[place].numel, dtype=torch.int32))
            if place == 0:
                has_left.wait(30)
            try:
                return sharing.run(executor)
            finally:
                has_left.set()

    has_left = threading.Event()
    assert [type(each) for each in together(2, load)] == [LowMemLoadError, InterruptedError]


def test_waiting_for_others_counts_as_progress(file: Path) -> None:
    """Else a heartbeat would name the ranks that wait for one that hangs."""
    _, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 2, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    has_waited = threading.Event()

    def load(place: int, buffer: SharedBuffer) -> object:
        sharing = SharedReads(
            plans[place].steps, buffer, ReadCost(), check=has_waited.set if place == 0 else lambda: None
        )
        with Executor() as executor:
            sharing.take(plans[place], torch.empty(plans[place].numel, dtype=torch.int32))
            if place == 1:
                assert has_waited.wait(30)
            sharing.run(executor)
        return sharing.waited

    assert together(2, load)[0] != 0
