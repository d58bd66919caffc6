"""From copies to reads: the same elements go to the same places, in few reads that keep to their limits."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import PlanError
from lowmem_load.planning.expression import Source
from lowmem_load.planning.nest import Axis, Copy, Nest
from lowmem_load.planning.reads import Read, ReadCost, ReadLimits, plan_reads

SOURCE = Source("file", "w", 0, (10_000,), torch.float32)
ITEMSIZE = 4


def copy_of(start: int, destination: int, *loops: tuple[int, int, int], casts: tuple[torch.dtype, ...] = ()) -> Copy:
    """Loops are (size, leaf stride, destination stride)."""
    return Copy(SOURCE, Nest(start, destination, tuple(Axis(*loop) for loop in loops), casts))


def pairs(nest: Nest) -> Iterator[tuple[int, int]]:
    """Yields which element goes where, one by one."""
    for steps in itertools.product(*(range(axis.size) for axis in nest.axes)):
        moved = list(zip(steps, nest.axes, strict=True))
        yield (
            nest.source + sum(step * axis.source for step, axis in moved),
            nest.destination + sum(step * axis.destination for step, axis in moved),
        )


def moved_by(reads: Sequence[Read]) -> list[tuple[int, int]]:
    found = []
    for read in reads:
        each = list(read.iterations())
        assert len(each) == read.num_reads
        for first, shift in each:
            for source, destination in pairs(read.nest):
                assert 0 <= source < read.numel, "of what was fetched"
                found.append((first + source, destination + shift))
    return sorted(found)


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Loops in any order of strides, of which the destination's are those of a dense box, permuted."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    inside, strides = 1, []
    for size in sizes:
        strides.append(inside)
        inside *= size
    order = draw(st.permutations(range(len(sizes))))
    loops, stride = [], 1
    for loop in order:
        if draw(st.integers(0, 5)) == 0:
            loops.append((sizes[loop], 0, strides[loop]))  # repeated elements
        else:
            stride *= draw(st.integers(1, 4))
            loops.append((sizes[loop], stride, strides[loop]))
            stride *= sizes[loop]
    return copy_of(draw(st.integers(0, 50)), draw(st.integers(0, 50)), *draw(st.permutations(loops)))


@settings(max_examples=300, deadline=None)
@given(copies(), st.sampled_from([4, 16, 100, 1 << 20]), st.sampled_from([0, 4, 40, 4096]), st.booleans())
def test_reads_move_what_the_copy_says(copy: Copy, staging: int, gap: int, on_host: bool) -> None:
    limits = ReadLimits(staging_bytes=staging, direct_bytes=staging, max_gap_bytes=gap)
    reads = list(plan_reads(copy, SOURCE, limits, on_host=on_host))
    assert moved_by(reads) == sorted(pairs(copy.nest))
    for read in reads:
        assert read.numel * ITEMSIZE <= max(staging, ITEMSIZE)
        distinct = {source for source, _ in pairs(read.nest)}
        assert len(distinct) * ITEMSIZE == read.needed_bytes_each
        holes = sorted(distinct)
        assert all((b - a - 1) * ITEMSIZE <= gap for a, b in itertools.pairwise(holes)), (
            "a gap beyond the limit is read"
        )


def test_a_gap_is_read_along_where_that_costs_no_more_than_another_read() -> None:
    """68 bytes at 4 bytes per second cost 17 s, as much as a call."""
    rows = copy_of(0, 0, (100, 20, 3), (3, 1, 1))
    for call_s, num_reads in ((17.0, 1), (16.9, 100)):
        limits = ReadLimits(max_gap_bytes=ReadCost(call_s=call_s, bytes_per_s=4).max_gap_bytes)
        (read,) = plan_reads(rows, SOURCE, limits, on_host=True)
        assert read.num_reads == num_reads
    assert ReadLimits().max_gap_bytes == 125_000  # 25 us at 5 GB/s


def test_a_million_reads_are_one_step() -> None:
    (read,) = plan_reads(copy_of(0, 0, (1 << 20, 5000, 1)), SOURCE, ReadLimits(max_gap_bytes=0), on_host=True)
    assert (read.num_reads, read.numel) == (1 << 20, 1)


def test_axes_that_run_into_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="interleave"):
        list(Nest(0, 0, (Axis(3, 2, 4), Axis(4, 1, 1))).clipped(2, 5, "source"))
