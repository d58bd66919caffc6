"""Which reads the ranks of a node share, and who reads what: each byte of the union once; each rank gets its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.planning import expression as ex
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.ranges import partition_range
from lowmem_load.planning.reads import Read, ReadCost, ReadLimits, Step
from lowmem_load.planning.sharing import (
    MIN_ADVANTAGE,
    ByteRange,
    Segment,
    byte_ranges,
    nests_within,
    plan_schedule,
    read_seconds,
    shared_reads,
    touched_bytes,
)
from tests.together import NUMEL, START, VALUES, fills, leaf, move, plan_of


@settings(max_examples=80, deadline=None)
@given(
    dims=st.permutations([0, 1, 2]),
    world_size=st.integers(2, 40),
    staging=st.sampled_from([64, 700, 1 << 20]),
    gap=st.sampled_from([0, 40, 1 << 20]),
    chunk=st.sampled_from([129, 1000, 1 << 14]),
    block=st.sampled_from([1, 512, 4096]),
    data=st.data(),
)
def test_the_union_is_read_once_and_holds_what_each_rank_needs(
    dims: list[int], world_size: int, staging: int, gap: int, chunk: int, block: int, data: st.DataObject
) -> None:
    node = ex.permute(leaf(), dims)
    _, plans = fills(node, world_size, ReadLimits(staging, staging, gap))
    first = data.draw(st.integers(0, world_size - 1))
    node_plans = plans[first : data.draw(st.integers(first + 1, world_size))]
    reads = [[step for step in fill.steps if isinstance(step, Read)] for fill in node_plans]
    found = plan_schedule([byte_ranges(mine) for mine in reads], block, chunk)
    content = np.concatenate([np.full(START, 255, np.uint8), VALUES.numpy().reshape(-1).view(np.uint8)])
    times_read = np.zeros(len(content), int)
    for of_chunk in found.chunks:
        assert of_chunk[-1].place <= chunk
        for part, _ in of_chunk:
            times_read[part.start : part.end] += 1
    needed = np.zeros(len(content), bool)
    for each in (each for mine in reads for each in byte_ranges(mine)):
        needed[each.start : each.end] = True
    assert (times_read == needed).all()
    assert found.read_bytes == needed.sum()
    expected = VALUES.permute(dims).reshape(-1)
    for offset, (fill, mine) in enumerate(zip(node_plans, reads, strict=True)):
        got = torch.full((fill.numel,), -1, dtype=torch.int32)
        for segment in (segment for of_chunk in found.chunks for segment in of_chunk):
            values = torch.from_numpy(content[segment.part.start : segment.part.end].copy()).view(torch.int32)
            for nest in (nest for read in mine for nest in nests_within(read, segment)):
                assert (move(nest, values, got) == -1).all(), "an element came twice"
        own = partition_range(NUMEL, first + offset, world_size)
        assert torch.equal(got, expected[own.start : own.end])


def test_chunks_end_at_blocks_and_between_items() -> None:
    found = plan_schedule([[ByteRange("f", 5, 4, 4097, 40_005)]], 4096, 10_000)
    assert found.num_rounds == len(found.chunks) == 5
    ends = [chunk[-1].part.end for chunk in found.chunks]
    assert ends == [12_285, 20_477, 28_669, 36_861, 40_005]  # the last item that begins before 12288, and so on
    parts = [part for chunk in found.chunks for part, _ in chunk]
    assert all((part.end - 5) % 4 == 0 for part in parts)
    assert all(part.end % 4096 >= 4093 for part in parts[:-1]), "segments, too, end at blocks"


def test_ranks_that_want_little_share_it_evenly() -> None:
    """Not one of them all of it, as chunks of the usual size would have it."""
    found = plan_schedule([[ByteRange("f", 0, 1, 0, 80_000)]] * 4, 4096)
    assert [sum(part.end - part.start for part, _ in chunk) for chunk in found.chunks] == [
        20_480,
        20_480,
        20_480,
        18_560,
    ]
    assert (found.num_rounds, found.wanted_bytes, found.read_bytes) == (1, 320_000, 80_000)


def test_an_element_that_goes_to_many_places_goes_to_all_of_them() -> None:
    repeated = Nest(0, 0, (Axis(3, 0, 1), Axis(4, 1, 3)))
    read = Read(leaf(), 10, 4, (), repeated, is_direct=False)
    segment = Segment(ByteRange("data", START, 4, START + 44, START + 52), 0)  # elements 11 and 12
    (nest,) = nests_within(read, segment)
    assert nest == Nest(0, 3, (Axis(2, 1, 3), Axis(3, 0, 1)))


def test_a_block_is_touched_once() -> None:
    ranges = [ByteRange("a", 0, 1, 5, 10), ByteRange("a", 0, 1, 95, 101), ByteRange("a", 101, 1, 150, 201)]
    ranges.append(ByteRange("b", 0, 1, 7, 8))
    assert touched_bytes(ranges, 100) == 300 + 100
    assert touched_bytes(ranges, 1) == 5 + 6 + 51 + 1


def saves(read: Step, cost: ReadCost) -> bool:
    assert isinstance(read, Read)
    alone_s, together_s = read_seconds(read, cost)
    return alone_s > MIN_ADVANTAGE * together_s


def test_reads_are_shared_where_that_is_cheaper() -> None:
    """Gaps that are read along cost more than the way through shared memory; a run does not."""
    turned, run = (fills(node, 60, ReadLimits())[1][7].steps for node in (ex.permute(leaf(), (0, 2, 1)), leaf()))
    cost = ReadCost(call_s=1e-9)
    for steps, is_shared in ((turned, True), (run, False)):
        assert saves(steps[0], cost) is is_shared


def test_storage_that_is_slower_has_smaller_models_read_together() -> None:
    """100 MiB that are transposed are not worth it from a local disk, where that spares some 10 ms."""
    turned = ex.permute(ex.Source("data", "w", 0, (2, 1024, 25_600), torch.bfloat16), (0, 2, 1))
    network = ReadCost(1e-3, 5e8)
    assert not shared_reads(plan_of(turned, 16, ReadCost()))
    assert shared_reads(plan_of(turned, 16, network))
    run = ex.Source("data", "w", 0, (2, 1024, 25_600), torch.bfloat16)
    assert not shared_reads(plan_of(run, 16, network))


def test_bytes_come_through_shared_memory_as_fast_from_slow_storage() -> None:
    source = ex.Source("data", "w", 0, (1 << 24,), torch.int32)
    read = Read(source, 0, 1 << 20, (), Nest(0, 0, (Axis(1 << 20, 1, 1),)), is_direct=True)
    alone_s, shared_s = read_seconds(read, ReadCost(1e-9, 1e6))
    assert shared_s - alone_s == pytest.approx(4 * (1 << 20) / 5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("numel", "block_bytes", "is_shared"),
    [(1 << 15, 1 << 20, True), (1 << 15, 1, False), (1 << 15, 4096, False), (1 << 22, 1 << 20, False)],
)
def test_small_slices_of_large_blocks_are_shared(numel: int, block_bytes: int, is_shared: bool) -> None:
    source = ex.Source("data", "w", 0, (1 << 24,), torch.int32)
    read = Read(source, 0, numel, (), Nest(0, 0, (Axis(numel, 1, 1),)), is_direct=True)
    cost = ReadCost(block_bytes=block_bytes)
    assert saves(read, cost) is is_shared


def test_strided_reads_touch_no_more_blocks_than_there_are() -> None:
    source = ex.Source("data", "w", 0, (1 << 18,), torch.int32)
    read = Read(source, 0, 8, (Axis(256, 1 << 10, 8),), Nest(0, 0, (Axis(8, 1, 1),)), is_direct=True)
    for block_bytes, touched in ((1 << 20, 1 << 20), (1 << 12, 256 << 12), (1, read.read_bytes), (1, 256 * 32)):
        assert read_seconds(read, ReadCost(0.0, 1.0, block_bytes))[0] == touched
