"""The planner: fills that are proved, values that are shared, costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import PlanError
from lowmem_load.files.executor import Executor
from lowmem_load.planning import expression as ex
from lowmem_load.planning import nest, planner
from lowmem_load.planning.load_plan import (
    REPLICATED,
    BufferPlan,
    ComputedValue,
    Costs,
    Destination,
    HeldValue,
    LoadPlan,
    PlannedFile,
    SlowPath,
    TargetPlan,
)
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import Apply, ReadLimits
from lowmem_load.planning.regions import FlatRange, Grid, partition_range
from tests.memory_source import MemorySource
from tests.unit.test_copies import expressions, value_of

VALUES = torch.arange(24 * 30, dtype=torch.float32).reshape(24, 30)
SOURCE = ex.Source("file", "w", 0, (24, 30), torch.float32)


def filled(planner: Planner, fill: Any) -> torch.Tensor:
    memory = torch.full((fill.numel,), -1, dtype=fill.dtype)
    with Executor(open_source=lambda path: MemorySource(path, VALUES.numpy().tobytes())) as executor:
        executor.fill(fill, memory, planner.values, planner.constants)
        executor.finish()
        costs = planner.costs([fill])
        assert (costs.read_bytes, costs.num_reads) == (executor.stats.read_bytes, executor.stats.num_reads)
    return memory


def doubled(part: ex.Expression) -> ex.Elementwise:
    return ex.Elementwise("aten.mul", lambda values: values[0] * 2, (part,), part.shape, part.dtype)


def flipped(part: ex.Expression) -> ex.Computed:
    return ex.Computed("aten.flip", lambda values: values[0].flip(0), (part,), part.shape, part.dtype)


# -- regions ---------------------------------------------------------------------------------------------------------


def rectangle(starts: tuple[int, ...], sizes: tuple[int, ...]) -> Grid:
    """Returns a grid with one run along each dim."""
    return Grid(tuple(((start, start + size),) for start, size in zip(starts, sizes, strict=True)))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (((0, 24),), ((0, 30),)),
        (((3, 8),), ((10, 20),)),
        (((0, 24),), ((29, 30),)),
        (((4, 4),), ((4, 7),)),
        (((6, 12), (18, 23)), ((25, 30), (0, 5), (9, 10))),
    ],
)
@pytest.mark.parametrize("of", [lambda part: part, doubled, flipped, lambda part: ex.cast(part, torch.bfloat16)])
def test_the_runs_of_a_grid_follow_each_other_row_by_row(
    rows: tuple[tuple[int, int], ...],
    columns: tuple[tuple[int, int], ...],
    of: Callable[[ex.Expression], ex.Expression],
) -> None:
    planner, expression = Planner(), of(SOURCE)
    whole = filled(planner, planner.plan_fill("w", expression, FlatRange(0, 720))).view(24, 30)
    fill = planner.plan_fill("w", expression, Grid((rows, columns)))
    chosen = [[index for run in runs for index in range(*run)] for runs in (rows, columns)]
    assert torch.equal(filled(planner, fill), whole[chosen[0]][:, chosen[1]].reshape(-1))


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (rectangle((0, 20), (24, 11)), r"w: Grid\(.*\) of a tensor of shape \(24, 30\)"),
        (rectangle((-1, 0), (2, 2)), "of a tensor of shape"),
        (rectangle((0, 0), (-1, 2)), "of a tensor of shape"),
        (FlatRange(700, 721), r"w: elements \[700, 721\) of 720"),
        (FlatRange(-1, 5), r"w: elements \[-1, 5\) of 720"),
        (FlatRange(5, 4), r"w: elements \[5, 4\) of 720"),
    ],
)
def test_a_region_outside_of_the_tensor_is_refused(region: FlatRange | Grid, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Planner().plan_fill("w", SOURCE, region)


def test_what_would_take_too_many_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_COPIES", 3)
    parts = [ex.Source("file", str(number), 0, (1, 2), torch.float32) for number in range(4)]
    with pytest.raises(PlanError, match="w: more than 3 copies are needed for 8 elements"):
        Planner().plan_fill("w", ex.concat(parts, 0), FlatRange(0, 8))
    Planner().plan_fill("w", ex.concat(parts[:3], 0), FlatRange(0, 6))


@pytest.mark.parametrize(
    "region", [rectangle((0, 3), (2, 3)), rectangle((2, 0), (3, 1)), FlatRange(9, 11), FlatRange(19, 21)]
)
def test_a_value_that_is_not_kept_whole_must_be_kept_where_it_is_needed(region: FlatRange | Grid) -> None:
    kept = ex.Held(torch.arange(10, 20), 10, (5, 6), torch.int64, "initialised here")
    with pytest.raises(
        PlanError, match=r"w: elements \[.*\) of a value that is initialised here are needed, \[10, 20\) are in memory"
    ):
        Planner().plan_fill("w", kept, region)


@pytest.mark.parametrize("region", [rectangle((2, 0), (1, 6)), rectangle((1, 4), (2, 2)), FlatRange(10, 20)])
def test_a_value_is_moved_from_what_is_kept(region: FlatRange | Grid) -> None:
    kept, planner = ex.Held(torch.arange(10, 20), 10, (5, 6), torch.int64), Planner()
    found = filled(planner, planner.plan_fill("w", kept, region))
    whole = torch.arange(30).view(5, 6)
    if isinstance(region, Grid):
        ((first_row, last_row),), ((first, last),) = region.runs
        assert torch.equal(found, whole[first_row:last_row, first:last].reshape(-1))
    else:
        assert torch.equal(found, whole.view(-1)[region.start : region.end])


# -- elementwise operations ------------------------------------------------------------------------------------------


def in_memory(node: ex.Expression, data: dict[str, torch.Tensor]) -> ex.Expression:
    """Returns the expression with values in memory in place of tensors in files."""
    if isinstance(node, ex.Source):
        return ex.hold(data[node.name])
    if isinstance(node, ex.Concat):
        return replace(node, parts=tuple(in_memory(part, data) for part in node.parts))
    assert isinstance(node, ex.Strided)
    return replace(node, part=in_memory(node.part, data))


@settings(max_examples=60, deadline=None)
@given(expressions(), st.data())
def test_an_operation_runs_on_the_elements_that_are_picked_of_it(
    case: tuple[ex.Expression, dict[str, torch.Tensor]], more: st.DataObject
) -> None:
    """Whatever is done to a result (transposed, repeated, cut, stepped through) and however it is cut up."""
    inner, ran = in_memory(*case), []

    def tripled(values: Sequence[torch.Tensor]) -> torch.Tensor:
        ran.append(values[0].numel())
        return values[0] * 3 + 1

    node: ex.Expression = ex.Elementwise("tripled", tripled, (inner,), inner.shape, inner.dtype)
    expected = value_of(*case) * 3 + 1
    repeats = more.draw(st.integers(1, 3))
    node, expected = ex.expand(node, (repeats, *node.shape)), expected.expand(repeats, *expected.shape)
    dims = more.draw(st.permutations(range(len(node.shape))))
    node, expected = ex.permute(node, dims), expected.permute(dims)
    dim, step = more.draw(st.integers(0, len(dims) - 1)), more.draw(st.integers(1, 3))
    size = -(-node.shape[dim] // step)
    node = ex.slice_dim(node, dim, 0, step, size)
    flat = expected[(slice(None),) * dim + (slice(None, None, step),)].reshape(-1)
    for world_size in (1, 3):
        for rank in range(world_size):
            planner, span = Planner(ReadLimits(staging_bytes=64)), partition_range(len(flat), rank, world_size)
            ran.clear()
            assert torch.equal(filled(planner, planner.plan_fill("w", node, span)), flat[span.start : span.end])
            assert sum(ran) <= span.numel


# -- every fill is proved, nested ones too ---------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[nest.Copy]], list[nest.Copy]]) -> None:
    """Makes the plans of the source's elements wrong; those of what is computed from them stay right."""
    ordinary = nest.plan_copies

    def wrong(expression: ex.Expression, flat_range: FlatRange) -> Iterator[nest.Copy]:
        found = list(ordinary(expression, flat_range))
        yield from change(found) if all(isinstance(copy.leaf, ex.Source) for copy in found) else found

    monkeypatch.setattr(planner, "plan_copies", wrong)


def shortened(found: list[nest.Copy]) -> list[nest.Copy]:
    (copy,) = found
    first, *others = copy.nest.axes
    axes = (first._replace(size=first.size - 1), *others)
    return [replace(copy, nest=replace(copy.nest, axes=axes))]


def repeated(found: list[nest.Copy]) -> list[nest.Copy]:
    return found * 2


def moved(found: list[nest.Copy]) -> list[nest.Copy]:
    return [replace(copy, nest=copy.nest.shifted(destination=1)) for copy in found]


@pytest.mark.parametrize("change", [shortened, repeated, moved])
@pytest.mark.parametrize(
    "of",
    [
        lambda part: part,
        lambda part: ex.permute(doubled(part), (1, 0)),
        lambda part: doubled(flipped(part)),
        lambda part: flipped(doubled(part)),
    ],
)
def test_a_wrong_plan_of_a_part_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    of: Callable[[ex.Expression], ex.Expression],
    change: Callable[[list[nest.Copy]], list[nest.Copy]],
) -> None:
    Planner().plan_fill("w", of(SOURCE), FlatRange(10, 700))
    planted(monkeypatch, change)
    with pytest.raises(PlanError, match=r"w: .*(cover|a copy writes)"):
        Planner().plan_fill("w", of(SOURCE), FlatRange(10, 700))


# -- values ----------------------------------------------------------------------------------------------------------


def test_a_value_that_is_needed_several_times_has_one_number() -> None:
    planner, held, computed = Planner(), ex.hold(torch.ones(4), "here"), flipped(SOURCE)
    first = planner.plan_fill("a", held, FlatRange(0, 2))
    second = planner.plan_fill("b", ex.concat([held, ex.reshape(computed, (720,))], 0), FlatRange(0, 724))
    third = planner.plan_fill("c", computed, FlatRange(0, 5))
    assert (first.needs, second.needs, third.needs) == ((0,), (0, 1), (1,))
    of_held, of_computed = planner.values
    assert of_held == HeldValue("here")
    assert isinstance(of_computed, ComputedValue)
    assert (of_computed.operation, of_computed.input_shapes, of_computed.shape) == ("aten.flip", ((24, 30),), (24, 30))
    assert list(planner.constants.tensors) == [0]
    assert planner.constants.functions[of_computed.function] is computed.compute


def test_what_an_elementwise_operation_needs_is_needed_by_its_fill() -> None:
    planner = Planner()
    scales = ex.expand(ex.reshape(flipped(SOURCE), (24, 1, 30)), (24, 2, 30))
    fill = planner.plan_fill("w", ex.permute(doubled(scales), (1, 0, 2)), FlatRange(0, 1440))
    assert fill.needs == (0,)
    assert all(isinstance(step, Apply) for step in fill.steps)
    assert torch.equal(filled(planner, fill), torch.stack([VALUES.flip(0) * 2] * 2).view(-1))


# -- costs -----------------------------------------------------------------------------------------------------------


def cost_of(
    expression: ex.Expression, region: FlatRange, limits: ReadLimits | None = None, on_host: bool = True
) -> Costs:
    planner = Planner(limits)
    return planner.costs([planner.plan_fill("w", expression, region, on_host=on_host)])


def test_costs() -> None:
    half, whole = FlatRange(0, 360), FlatRange(0, 720)
    assert cost_of(SOURCE, half) == Costs(1440, 1440, 1)
    assert cost_of(SOURCE, half, on_host=False) == Costs(1440, 1440, 1, staging_bytes=1440)
    # 10 of every 30 elements: gaps of 80 bytes are read, too, from the first column to the last
    columns = ex.slice_dim(SOURCE, 1, 5, 1, 10)
    assert cost_of(columns, FlatRange(0, 240)) == Costs(960, (23 * 30 + 10) * 4, 1, staging_bytes=(23 * 30 + 10) * 4)
    assert cost_of(columns, FlatRange(0, 240), ReadLimits(max_gap_bytes=0)) == Costs(960, 960, 24)
    # a result of 360 elements, its input, and a block
    assert cost_of(doubled(SOURCE), half) == Costs(1440, 1440, 1, largest_temporary_bytes=3 * 1440)
    # the whole input, and the whole result, for any part of it
    assert cost_of(flipped(SOURCE), half) == Costs(2880, 2880, 1, largest_temporary_bytes=2 * 2880)
    assert cost_of(flipped(flipped(SOURCE)), half) == Costs(2880, 2880, 1, largest_temporary_bytes=4 * 2880)
    assert cost_of(ex.hold(torch.ones(720)), whole) == Costs()


# -- steps -----------------------------------------------------------------------------------------------------------


def test_a_piece_of_an_operation_holds_no_more_than_a_staging_buffer() -> None:
    weights, scales = (ex.Source("file", str(dtype), 0, (64, 64), dtype) for dtype in (torch.uint8, torch.float32))
    product = ex.Elementwise("mul", lambda values: values[0] * values[1], (weights, scales), (64, 64), torch.float32)
    planner = Planner(ReadLimits(staging_bytes=1000))
    (apply,) = planner.plan_fill("x", product, FlatRange(0, 4096)).steps
    assert isinstance(apply, Apply)
    held = [piece.numel * 4 + sum(fill.numel * fill.dtype.itemsize for fill in piece.inputs) for piece in apply.pieces]
    assert max(held) <= 1000 and len(held) == -(-4096 // 111)  # 5 bytes of each element, and 4 of the result


@pytest.mark.parametrize(("start", "end", "most_reads"), [(0, 2048, 8), (100, 2048, 11), (517, 1800, 12), (3, 40, 4)])
def test_pieces_end_where_blocks_of_scales_do(start: int, end: int, most_reads: int) -> None:
    weights = ex.Source("file", "w", 0, (32, 64), torch.uint8)
    scales = ex.Source("file", "s", 2048, (4, 8), torch.float32)  # one of each 8 x 8 weights
    parts = ex.reshape(weights, (4, 8, 8, 8)), ex.expand(ex.reshape(scales, (4, 1, 8, 1)), (4, 8, 8, 8))
    product = ex.Elementwise("mul", lambda values: values[0] * values[1], parts, (4, 8, 8, 8), torch.float32)
    planner = Planner(ReadLimits(staging_bytes=9 * 520))  # a block of rows has 512 elements
    fill = planner.plan_fill("x", product, FlatRange(start, end))
    assert planner.costs([fill]).num_reads <= most_reads
    stored = torch.frombuffer(bytearray(VALUES.numpy().tobytes()), dtype=torch.uint8)
    factors = stored[2048:2176].view(torch.float32).view(4, 1, 8, 1)
    expected = (stored[:2048].view(4, 8, 8, 8) * factors).view(-1)[start:end]
    assert torch.equal(filled(planner, fill), expected)


# -- a plan as data: what is equal, what is summed, what ranks have in common ------------------------------------------


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
