"""What the ranks of a node read together is read once, and every rank gets its elements; in threads, without ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.distributed.shared_memory import make_memory, memory_of, new_name
from lowmem_load.errors import TruncatedFileError
from lowmem_load.io.executor import Executor
from lowmem_load.io.shared_reads import SharedReads
from lowmem_load.io.windows import Windows
from lowmem_load.planning import cooperative
from lowmem_load.planning import expression as ex
from lowmem_load.planning.cooperative import (
    Segment,
    Shared,
    Wanted,
    pieces_of,
    reads_of,
    schedule,
    shared_steps,
    wanted,
    within,
)
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.ranges import partition_range
from lowmem_load.planning.reads import Apply, Read, ReadLimits
from tests.together import CONTENT, NUMEL, START, VALUES, fills, in_threads, leaf, move, plan_of

WINDOW_BYTES = 1 << 14


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    return path


@settings(max_examples=80, deadline=None)
@given(
    dims=st.permutations([0, 1, 2]),
    world_size=st.integers(2, 40),
    staging=st.sampled_from([64, 700, 1 << 20]),
    gap=st.sampled_from([0, 40, 1 << 20]),
    band=st.sampled_from([129, 1000, 1 << 14]),
    block=st.sampled_from([1, 512, 4096]),
    data=st.data(),
)
def test_the_union_is_read_once_and_holds_what_each_rank_needs(
    dims: list[int], world_size: int, staging: int, gap: int, band: int, block: int, data: st.DataObject
) -> None:
    node = ex.permute(leaf(), dims)
    _, plans = fills(node, world_size, ReadLimits(staging, staging, gap))
    first = data.draw(st.integers(0, world_size - 1))
    node_plans = plans[first : data.draw(st.integers(first + 1, world_size))]
    reads = [[read for step in fill.steps for read in reads_of(step)] for fill in node_plans]
    found = schedule([wanted(mine) for mine in reads], block, band)
    content = np.concatenate([np.full(START, 255, np.uint8), VALUES.numpy().reshape(-1).view(np.uint8)])
    times_read = np.zeros(len(content), int)
    for of_band in found.bands:
        assert sum(-(-(part.end - part.start) // 64) * 64 for part, _ in of_band[:-1]) <= band
        for part, _ in of_band:
            times_read[part.start : part.end] += 1
    needed = np.zeros(len(content), bool)
    for each in (each for mine in reads for each in wanted(mine)):
        needed[each.start : each.end] = True
    assert (times_read == needed).all()
    assert found.read_bytes == needed.sum()
    expected = VALUES.permute(dims).reshape(-1)
    for offset, (fill, mine) in enumerate(zip(node_plans, reads, strict=True)):
        got = torch.full((fill.numel,), -1, dtype=torch.int32)
        for segment in (segment for of_band in found.bands for segment in of_band):
            values = torch.from_numpy(content[segment.wanted.start : segment.wanted.end].copy()).view(torch.int32)
            for nest in (nest for read in mine for nest in within(read, segment)):
                assert (move(nest, values, got) == -1).all(), "an element came twice"
        own = partition_range(NUMEL, first + offset, world_size)
        assert torch.equal(got, expected[own.start : own.end])


def test_bands_end_at_blocks_and_between_items() -> None:
    found = schedule([[Wanted("f", 5, 4, 4097, 40_005)]], 4096, 10_000)
    assert found.num_rounds == len(found.bands) == 5
    ends = [part.end for band in found.bands for part, _ in band]
    assert ends == [12_285, 20_477, 28_669, 36_861, 40_005]  # the last item that begins before 12288, and so on
    assert all((end - 5) % 4 == 0 for end in ends)


def test_ranks_that_want_little_share_it_evenly() -> None:
    """Not one of them all of it, as bands of the usual size would have it."""
    found = schedule([[Wanted("f", 0, 1, 0, 80_000)]] * 4, 4096)
    assert [sum(part.end - part.start for part, _ in band) for band in found.bands] == [20_480, 20_480, 20_480, 18_560]
    assert (found.num_rounds, found.wanted_bytes, found.read_bytes) == (1, 320_000, 80_000)


def test_an_element_that_goes_to_many_places_goes_to_all_of_them() -> None:
    repeated = Nest(0, 0, (Axis(3, 0, 1), Axis(4, 1, 3)))
    read = Read(leaf(), 10, 4, (), repeated, is_direct=False)
    segment = Segment(Wanted("data", START, 4, START + 44, START + 52), 0)  # elements 11 and 12
    (nest,) = within(read, segment)
    assert nest == Nest(0, 3, (Axis(2, 1, 3), Axis(3, 0, 1)))


# -- in threads --------------------------------------------------------------------------------------------------------


def together(num_ranks: int, act: Callable[[int, Windows], object]) -> list[BaseException | object]:
    """Returns what `act` returns or raises for each rank, each in a thread with its own mapping of the same memory."""
    nbytes = Windows.nbytes_of(num_ranks, WINDOW_BYTES)
    name = new_name()
    descriptor = make_memory(name, nbytes)

    def run(place: int) -> object:
        memory = memory_of(os.getpid(), descriptor, name, nbytes)
        return act(place, Windows(memory, place, num_ranks, WINDOW_BYTES))

    found = in_threads(num_ranks, run)
    os.close(descriptor)
    return found


@settings(max_examples=60, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=4),
    num_threads=st.integers(1, 5),
    block=st.sampled_from([1, 512, 4096]),
)
def test_a_band_is_cut_for_threads_and_stays_where_it_was(
    ranges: list[tuple[int, int]], num_threads: int, block: int
) -> None:
    band, place, start = [], 0, 3
    for gap, nbytes in ranges:
        start += gap
        band.append(Segment(Wanted("f", 3, 4, start, start + nbytes), place))
        start, place = start + nbytes, place + -(-nbytes // 64) * 64
    share = max(-(-sum(nbytes for _, nbytes in ranges) // num_threads), block, 64)
    pieces = list(pieces_of(tuple(band), num_threads, block))
    assert all(0 < part.end - part.start <= share for part, _ in pieces)
    byte_of = {place + at: part.start + at for part, place in pieces for at in range(part.end - part.start)}
    assert byte_of == {place + at: part.start + at for part, place in band for at in range(part.end - part.start)}
    ends = {part.end for part, _ in band}
    if block >= 512:  # cuts lie at ends of blocks, but for at most an item
        assert all(part.end in ends or part.end % block > block - 4 or part.end % block == 0 for part, _ in pieces)


def test_what_is_read_together_equals_torch(file: Path) -> None:
    node = ex.cast(ex.permute(leaf(file), (2, 0, 1)), torch.float64)
    planner, plans = fills(node, 3, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    results = [torch.full((fill.numel,), -1.0, dtype=torch.float64) for fill in plans]

    def load(place: int, windows: Windows) -> object:
        sharing = SharedReads(plans[place].steps, windows, 1, check=lambda: None)
        with Executor(num_threads=1 + place) as executor:
            assert sharing.take(plans[place], results[place], planner.material).steps == ()
            shared = sharing.run(executor, planner.values, planner.material)
            assert isinstance(shared, Shared) and executor.stats.read_bytes == shared.read_bytes
            return shared

    shared = together(3, load)
    assert torch.equal(torch.cat(results), VALUES.permute(2, 0, 1).reshape(-1).double())
    assert all(isinstance(each, Shared) for each in shared), shared
    assert sum(each.read_bytes for each in shared if isinstance(each, Shared)) == NUMEL * 4
    assert {(each.node_bytes, each.wanted_bytes > 2 * NUMEL * 4) for each in shared if isinstance(each, Shared)} == {
        (NUMEL * 4, True)
    }


def test_an_operation_is_computed_once_its_inputs_have_come(file: Path) -> None:
    turned = ex.permute(leaf(file), (2, 0, 1))
    parts = (turned, ex.expand(ex.reshape(ex.slice_dim(turned, 2, 3, 1, 1), (30, 5, 1)), (30, 5, 12)))
    node = ex.Elementwise("sum", lambda inputs: inputs[0] + inputs[1], parts, (30, 5, 12), torch.int32)
    planner, plans = fills(node, 2, ReadLimits(1 << 12, 1 << 12, 1 << 20))
    assert all(isinstance(step, Apply) for fill in plans for step in fill.steps)
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]

    def load(place: int, windows: Windows) -> object:
        sharing = SharedReads(plans[place].steps, windows, 1, check=lambda: None)
        with Executor() as executor:
            sharing.take(plans[place], results[place], planner.material)
            return sharing.run(executor, planner.values, planner.material)

    assert all(isinstance(each, Shared) for each in together(2, load))
    expected = VALUES.permute(2, 0, 1)
    assert torch.equal(torch.cat(results), (expected + expected[:, :, 3:4]).reshape(-1))


def test_where_little_is_spared_each_reads_alone(file: Path) -> None:
    planner, plans = fills(leaf(file), 2, ReadLimits())
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]

    def load(place: int, windows: Windows) -> object:
        sharing = SharedReads(plans[place].steps, windows, 1, check=lambda: None)
        with Executor() as executor:
            sharing.take(plans[place], results[place], planner.material)
            return sharing.run(executor, planner.values, planner.material)

    assert together(2, load) == [None, None]
    assert torch.equal(torch.cat(results), VALUES.reshape(-1))


def test_slices_that_share_a_block_are_read_once_where_blocks_count(file: Path) -> None:
    planner, plans = fills(leaf(file), 3, ReadLimits())
    results = [torch.full((fill.numel,), -1, dtype=torch.int32) for fill in plans]

    def load(place: int, windows: Windows) -> object:
        block_bytes = 1 << 20 if place == 1 else 1  # of what the ranks of a node find, the largest counts
        sharing = SharedReads(plans[place].steps, windows, block_bytes, check=lambda: None)
        with Executor() as executor:
            sharing.take(plans[place], results[place], planner.material)
            return sharing.run(executor, planner.values, planner.material)

    assert all(isinstance(each, Shared) and each.node_bytes == NUMEL * 4 for each in together(3, load))
    assert torch.equal(torch.cat(results), VALUES.reshape(-1))


def test_a_block_is_touched_once() -> None:
    ranges = [Wanted("a", 0, 1, 5, 10), Wanted("a", 0, 1, 95, 101), Wanted("a", 101, 1, 150, 201)]
    ranges.append(Wanted("b", 0, 1, 7, 8))
    assert cooperative.touched_bytes(ranges, 100) == 300 + 100
    assert cooperative.touched_bytes(ranges, 1) == 5 + 6 + 51 + 1


def test_a_rank_that_fails_is_not_waited_for(file: Path) -> None:
    """Its own error is raised there; the others raise what their check raises once they have heard of it."""
    planner, plans = fills(ex.permute(leaf(file), (2, 0, 1)), 3, ReadLimits(1 << 20, 1 << 20, 1 << 20))
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise InterruptedError

    class Failing(Executor):
        def read_range(self, *args: object) -> None:
            failed.set()
            raise TruncatedFileError("ended early")

    def load(place: int, windows: Windows) -> object:
        sharing = SharedReads(plans[place].steps, windows, 1, check=check)
        with Failing() if place == 1 else Executor() as executor:
            sharing.take(plans[place], torch.empty(plans[place].numel, dtype=torch.int32), planner.material)
            return sharing.run(executor, planner.values, planner.material)

    assert [type(each) for each in together(3, load)] == [InterruptedError, TruncatedFileError, InterruptedError]


def test_a_rank_that_waits_for_others_gets_on_and_one_that_reads_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the life signs would name those that wait for a rank that hangs."""
    clock = iter([100.0, 101.1, 102.2, 103.3, 104.4])
    monkeypatch.setattr("lowmem_load.io.shared_reads.time.monotonic", lambda: next(clock))
    (windows,) = together(1, lambda _, windows: windows)
    assert isinstance(windows, Windows)
    sharing = SharedReads((), windows, 1, check=lambda: None)
    waits = []
    for missing in ([1], [1], [1], [0, 1], [0, 1]):
        sharing._check_others(missing)
        waits.append(sharing.waited)
    assert waits == [0, 1, 2, 2, 2]


def test_reads_are_shared_where_that_is_cheaper() -> None:
    """Gaps that are read along cost more than the way through shared memory; a run does not."""
    turned, run = (fills(node, 60, ReadLimits())[1][7].steps for node in (ex.permute(leaf(), (0, 2, 1)), leaf()))
    cost = cooperative.ReadCost(call_s=1e-9)
    for steps, is_shared in ((turned, True), (run, False)):
        assert cooperative._pays(*cooperative._seconds(reads_of(steps[0]), cost)) is is_shared


def test_storage_that_is_slower_has_smaller_models_read_together() -> None:
    """100 MiB that are transposed are not worth it from a local disk, where that spares some 10 ms."""
    turned = ex.permute(ex.Source("data", "w", 0, (2, 1024, 25_600), torch.bfloat16), (0, 2, 1))
    network = cooperative.ReadCost(1e-3, 5e8)
    assert not shared_steps(plan_of(turned, 16, cooperative.ReadCost()))
    assert shared_steps(plan_of(turned, 16, network))
    run = ex.Source("data", "w", 0, (2, 1024, 25_600), torch.bfloat16)
    assert not shared_steps(plan_of(run, 16, network))


def test_bytes_come_through_shared_memory_as_fast_from_slow_storage() -> None:
    source = ex.Source("data", "w", 0, (1 << 24,), torch.int32)
    read = Read(source, 0, 1 << 20, (), Nest(0, 0, (Axis(1 << 20, 1, 1),)), is_direct=True)
    alone_s, shared_s = cooperative._seconds([read], cooperative.ReadCost(1e-9, 1e6))
    assert shared_s - alone_s == pytest.approx(4 * (1 << 20) / 5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("numel", "block_bytes", "is_shared"),
    [(1 << 15, 1 << 20, True), (1 << 15, 1, False), (1 << 15, 4096, False), (1 << 22, 1 << 20, False)],
)
def test_small_slices_of_large_blocks_are_shared(numel: int, block_bytes: int, is_shared: bool) -> None:
    source = ex.Source("data", "w", 0, (1 << 24,), torch.int32)
    read = Read(source, 0, numel, (), Nest(0, 0, (Axis(numel, 1, 1),)), is_direct=True)
    cost = cooperative.ReadCost(block_bytes=block_bytes)
    assert cooperative._pays(*cooperative._seconds([read], cost)) is is_shared


def test_strided_reads_touch_no_more_blocks_than_there_are() -> None:
    source = ex.Source("data", "w", 0, (1 << 18,), torch.int32)
    read = Read(source, 0, 8, (Axis(256, 1 << 10, 8),), Nest(0, 0, (Axis(8, 1, 1),)), is_direct=True)
    assert cooperative._block_bytes(read, 1 << 20) == 1 << 20
    assert cooperative._block_bytes(read, 1 << 12) == 256 << 12
    assert cooperative._block_bytes(read, 1) == read.read_bytes == 256 * 32
