"""A plan as data: what is equal, what is summed, what ranks have in common, and costs that add up."""

from dataclasses import replace

import torch

from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import (
    REPLICATED,
    BufferPlan,
    Costs,
    Destination,
    LoadPlan,
    PlannedFile,
    SlowPath,
    TargetPlan,
)
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import FlatRange

SOURCE = ex.Source("file", "w", 0, (24, 30), torch.float32)


def flipped(part: ex.Expression) -> ex.Computed:
    return ex.Computed("aten.flip", lambda values: values[0].flip(0), (part,), part.shape, part.dtype)


def test_costs_add_up_but_for_what_is_used_again() -> None:
    one, other = Costs(1, 2, 3, 40, 5), Costs(10, 20, 30, 4, 50)
    assert one.plus(other) == other.plus(one) == Costs(11, 22, 33, 40, 50)


def plan_of(kind: str, expression: ex.Expression, planner: Planner, region: FlatRange, padded: int) -> TargetPlan:
    fill = planner.plan_fill(kind, expression, region)
    return TargetPlan(
        names=(f"{kind}.weight", f"{kind}.tied"),
        shape=expression.shape,
        dtype=expression.dtype,
        kind=kind,
        destinations=(Destination(region, padded, fill),),
        is_recast=kind == "zero3",
        is_uninitialised=kind != "zero3",
        slow_paths=(SlowPath(f"{kind}.weight", "why"),),
        fingerprint=f"of {kind}",
    )


def made_plan(rank: int = 1, digest: str = "abc") -> LoadPlan:
    planner = Planner()
    targets = (
        plan_of("zero3", flipped(SOURCE), planner, FlatRange(240 * rank, 240 * rank + 240), 250),
        plan_of(REPLICATED, ex.hold(torch.ones(5)), planner, FlatRange(0, 5), 5),
    )
    of_buffer = planner.plan_fill("b", SOURCE, FlatRange(0, 3))
    buffer = BufferPlan(("norm.mean",), (3,), torch.float32, of_buffer, (), "of b")
    return LoadPlan(
        name="model",
        rank=rank,
        world_size=3,
        targets=targets,
        buffers=(buffer,),
        values=tuple(planner.values),
        files=(PlannedFile(f"/on/rank{rank}/file", 2880, digest, f"version on rank {rank}"),),
        read_to_describe=(("aten.equal", 12),),
        missing_keys=("a",),
        unexpected_keys=("b",),
        mismatched_keys=(("c", torch.Size([1]), torch.Size([2])),),
        costs=planner.costs(plan.destinations[0].fill for plan in targets),
    )


def test_the_fingerprint_is_that_of_what_ranks_have_in_common() -> None:
    plan = made_plan()
    assert plan.fingerprint == made_plan(rank=2).fingerprint  # of other elements, from the file in another folder
    others = [
        made_plan(digest="abd"),
        replace(plan, files=()),
        replace(plan, buffers=()),
        replace(plan, targets=plan.targets[:1]),
        replace(plan, targets=(replace(plan.targets[0], fingerprint="other"), plan.targets[1])),
        replace(plan, targets=(replace(plan.targets[0], kind="other"), plan.targets[1])),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    turned = replace(plan, targets=plan.targets[::-1])  # ranks read in orders of their own
    assert turned.fingerprint == plan.fingerprint
