"""Flat ranges and rectangles, and ZeRO-3's partition, against counting elements one by one."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.planning.ranges import FlatRange, Grid, bounding_range, flat_ranges, partition_numel, partition_range


@given(st.integers(0, 300), st.integers(1, 20))
def test_a_partition_is_a_row_of_the_padded_parameter(numel: int, world_size: int) -> None:
    """As DeepSpeed cuts: padded to a multiple of the ranks, then split evenly."""
    padded = torch.arange(-(-numel // world_size) * world_size).view(world_size, -1)
    for rank in range(world_size):
        span, row = partition_range(numel, rank, world_size), padded[rank]
        assert partition_numel(numel, world_size) == row.numel()
        assert list(range(span.start, span.end)) == row[row < numel].tolist()


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    cuts = [sorted(draw(st.lists(st.integers(0, size), min_size=4, max_size=4))) for size in shape]
    return Grid(tuple(((c, d), (a, b)) for a, b, c, d in cuts)), shape


@settings(max_examples=200)
@given(grids())
def test_a_hull_is_the_smallest_range_with_all_elements(case: tuple[Grid, tuple[int, ...]]) -> None:
    grid, shape = case
    inside = torch.arange(math.prod(shape)).view(shape)
    for dim, runs in enumerate(grid.runs):
        inside = inside.index_select(
            dim, torch.tensor([i for start, end in runs for i in range(start, end)], dtype=torch.int64)
        )
    assert grid.numel == inside.numel()
    found = bounding_range(grid, shape)
    if inside.numel():
        assert found == FlatRange(int(inside.min()), int(inside.max()) + 1)
    else:
        assert found.numel == 0


@settings(max_examples=200)
@given(grids())
def test_flat_ranges_are_the_elements_of_a_grid_in_order(case: tuple[Grid, tuple[int, ...]]) -> None:
    grid, shape = case
    inside = torch.arange(math.prod(shape)).view(shape)
    for dim, runs in enumerate(grid.runs):
        indices = [index for start, end in runs for index in range(start, end)]
        inside = inside.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    found = [element for part in flat_ranges(grid, shape) for element in range(part.start, part.end)]
    assert found == inside.reshape(-1).tolist()


def test_full_rows_are_one_flat_range() -> None:
    assert list(flat_ranges(Grid((((2, 4),), ((0, 5),), ((0, 3),))), (6, 5, 3))) == [FlatRange(30, 60)]
    assert list(flat_ranges(Grid((((0, 2),), ((1, 2),))), (2, 3))) == [FlatRange(1, 2), FlatRange(4, 5)]
