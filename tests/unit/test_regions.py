"""What ranks hold: ranges and grids against counting one by one, cuts against torch's own, rules for all ranks."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks import weights_plan
from lowmem_load.engines.mesh import CUTS_AS_HERE
from lowmem_load.planning.regions import (
    NOTHING,
    Distribution,
    FlatRange,
    Grid,
    Mesh,
    OnFirst,
    Partitions,
    Split,
    bounding_range,
    flat_ranges,
    grid_of,
    partition_numel,
    partition_range,
)


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
def test_what_a_grid_holds(case: tuple[Grid, tuple[int, ...]]) -> None:
    """Its flat ranges are its elements in order, and the bounding range the smallest one that has them all."""
    grid, shape = case
    inside = torch.arange(math.prod(shape)).view(shape)
    for dim, runs in enumerate(grid.runs):
        indices = [index for start, end in runs for index in range(start, end)]
        inside = inside.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    found = [element for part in flat_ranges(grid, shape) for element in range(part.start, part.end)]
    assert found == inside.reshape(-1).tolist()
    assert bounding_range(grid, shape) == (FlatRange(min(found), max(found) + 1) if found else NOTHING)
    assert grid.numel == len(found)


def test_full_rows_are_one_flat_range() -> None:
    assert list(flat_ranges(Grid((((2, 4),), ((0, 5),), ((0, 3),))), (6, 5, 3))) == [FlatRange(30, 60)]
    assert list(flat_ranges(Grid((((0, 2),), ((1, 2),))), (2, 3))) == [FlatRange(1, 2), FlatRange(4, 5)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Split]]:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    splits = []
    for _ in range(draw(st.integers(0, 3))):
        num_chunks = draw(st.integers(1, 4))
        index, factor = draw(st.integers(0, num_chunks - 1)), draw(st.integers(1, 3))
        splits.append(Split(draw(st.integers(0, len(shape) - 1)), num_chunks, index, factor))
    return shape, splits


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_a_grid_has_the_elements_that_torch_cuts_out(case: tuple[tuple[int, ...], list[Split]]) -> None:
    shape, splits = case
    held = torch.arange(torch.Size(shape).numel()).view(shape)
    for split in splits:
        placement = (
            Shard(split.dim) if split.split_factor == 1 else _StridedShard(split.dim, split_factor=split.split_factor)
        )
        if held.shape[split.dim]:  # torch cannot cut nothing by a stride
            is_even = held.shape[split.dim] % (split.num_chunks * split.split_factor) == 0
            assume(is_even or split.split_factor == 1 or CUTS_AS_HERE)
            held = placement._split_tensor(held, split.num_chunks, with_padding=False)[0][split.index]
    grid = grid_of(shape, splits)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim, runs in enumerate(grid.runs):
        whole = torch.cat([whole.narrow(dim, start, end - start) for start, end in runs], dim)
    assert grid.numel == held.numel()
    assert torch.equal(whole.reshape(-1), held.reshape(-1))
    assert all(runs == ((0, 0),) or all(a < b for a, b in runs) for runs in grid.runs)


def test_neighbouring_runs_are_one() -> None:
    assert grid_of((8,), [Split(0, 1, 0, 2)]).runs == (((0, 8),),)
    assert grid_of((8,), [Split(0, 2, 1, 2)]).runs == (((2, 4), (6, 8)),)
    assert grid_of((), []).numel == 1


def test_partitions_of_all_ranks() -> None:
    # 7 elements on 3 ranks: 3, 3 and 1.
    assert Partitions(7).regions(3) == [FlatRange(0, 3), FlatRange(3, 6), FlatRange(6, 7)]
    assert OnFirst(7).regions(3) == [FlatRange(0, 7), NOTHING, NOTHING]


def test_dims_of_a_mesh_along_which_ranks_lie() -> None:
    mesh = Mesh(tuple(range(12)), (2, 3, 2))
    assert mesh.dims_along([0, 6]) == (0,) and mesh.dims_along([1, 3, 5]) == (1,)
    assert mesh.dims_along([0, 2, 4, 6, 8, 10]) == (0, 1) and mesh.dims_along(mesh.ranks) == (0, 1, 2)
    assert mesh.dims_along([4]) == ()
    assert mesh.dims_along([6, 0]) == (0,)  # a group has no order of its own
    assert mesh.dims_along([0, 4]) is mesh.dims_along([0, 3]) is None  # a part of a dim, and a diagonal


def test_ranks_that_hold_the_same_are_together() -> None:
    layout = Distribution([FlatRange(0, 4), FlatRange(4, 7), FlatRange(0, 4), NOTHING], (7,))
    assert [(each.region, list(each.ranks)) for each in layout.holders] == [
        (FlatRange(0, 4), [0, 2]),
        (FlatRange(4, 7), [1]),
    ]


def test_plans_do_not_grow_with_the_square_of_the_ranks() -> None:
    few, many = ([float(cell) for cell in row[4:]] for row in weights_plan.measure("Llama 70B", "ZeRO-3", [8, 128]))
    assert many[0] < 17 * few[0]  # KiB through the store
    assert many[2] < 64  # MiB of one rank
