"""Rules: what each rank holds, as DeepSpeed and DTensor lay it out. Their own layouts: `tests/multi_rank`."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import weights_plan
from lowmem_load.planning.ranges import FlatRange, Grid, Region
from lowmem_load.planning.rules import Cuts, Layout, Mesh, OnFirst, Partitions
from lowmem_load.planning.splits import Split, grid_of

NOTHING = FlatRange(0, 0)


def test_partitions_of_all_ranks() -> None:
    # 7 elements on 3 ranks: 3, 3 and 1.
    assert Partitions(7).regions(3) == [FlatRange(0, 3), FlatRange(3, 6), FlatRange(6, 7)]
    assert OnFirst(7).regions(3) == [FlatRange(0, 7), NOTHING, NOTHING]


def test_cuts_of_all_ranks() -> None:
    """A mesh of 2 x 2 whose ranks are not in order, and a rank that is not in it."""
    mesh = Mesh((3, 1, 0, 2), (2, 2))
    columns, rows = Split(1, 2, 0), Split(0, 2, 0)

    def held(*splits: Split) -> Region:
        return grid_of((4, 6), splits)

    found = Cuts((4, 6), mesh, (((1,), columns),)).regions(5)
    # Ranks 3 and 1 are one group, whose first is 1.
    assert found[1] == found[0] == held(columns) and found[3] == found[2] == held(replace(columns, index=1))
    assert found[4] == Grid((((0, 0),),)) and not found[4].numel
    both = Cuts((4, 6), mesh, (((0,), rows), ((1,), columns))).regions(4)
    assert both[0] == held(rows, columns)
    assert both[3] == held(replace(rows, index=1), replace(columns, index=1))
    flat = Cuts((4, 6), mesh, (((0, 1), Split(0, 4, 0)),)).regions(4)
    assert flat == [held(Split(0, 4, index)) for index in range(4)]


def test_dims_of_a_mesh_along_which_ranks_lie() -> None:
    mesh = Mesh(tuple(range(12)), (2, 3, 2))
    assert mesh.dims_along([0, 6]) == (0,) and mesh.dims_along([1, 3, 5]) == (1,)
    assert mesh.dims_along([0, 2, 4, 6, 8, 10]) == (0, 1) and mesh.dims_along(mesh.ranks) == (0, 1, 2)
    assert mesh.dims_along([4]) == ()
    assert mesh.dims_along([6, 0]) == (0,)  # a group has no order of its own
    assert mesh.dims_along([0, 4]) is mesh.dims_along([0, 3]) is None  # a part of a dim, and a diagonal


def test_ranks_that_hold_the_same_are_together() -> None:
    layout = Layout([FlatRange(0, 4), FlatRange(4, 7), FlatRange(0, 4), NOTHING], (7,))
    assert [(each.region, list(each.ranks)) for each in layout.holders] == [
        (FlatRange(0, 4), [0, 2]),
        (FlatRange(4, 7), [1]),
    ]


def test_plans_do_not_grow_with_the_square_of_the_ranks() -> None:
    few, many = ([float(cell) for cell in row[4:]] for row in weights_plan.measure("Llama 70B", "ZeRO-3", [8, 128]))
    assert many[0] < 17 * few[0]  # KiB through the store
    assert many[2] < 64  # MiB of one rank
