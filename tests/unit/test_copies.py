"""Expressions, and the copies that they become: executed, they rebuild its value for all ranks of every world size."""

import math
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.planning import expression as ex
from lowmem_load.planning import nest
from lowmem_load.planning.nest import Copy, plan_copies
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.regions import FlatRange, partition_range


def source(name: str, *shape: int) -> ex.Source:
    return ex.Source("file", name, 0, shape, torch.int64)


def value_of(node: ex.Expression, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Evaluates with torch's own operations."""
    if isinstance(node, ex.Source):
        return data[node.name]
    if isinstance(node, ex.Concat):
        return torch.cat([value_of(part, data) for part in node.parts], node.dim)
    if isinstance(node, ex.Strided):
        return (
            value_of(node.part, data)
            .clone(memory_format=torch.contiguous_format)
            .as_strided(node.shape, node.strides, node.start)
        )
    assert isinstance(node, ex.Cast)
    return value_of(node.part, data).to(node.dtype)


def copies_of(node: ex.Expression, span: FlatRange) -> list[Copy]:
    copies = list(plan_copies(node, span))
    prove_coverage("p", [copy.nest for copy in copies], span.numel)
    return copies


def execute(copies: list[Copy], data: dict[str, torch.Tensor], span: FlatRange, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((span.numel,), -1, dtype=dtype)
    for copy in copies:
        assert isinstance(copy.leaf, ex.Source)
        sizes, sources, destinations = zip(*copy.nest.axes, strict=True)
        values = data[copy.leaf.name].reshape(-1).as_strided(sizes, sources, copy.nest.source)
        for cast in copy.nest.casts:
            values = values.to(cast)
        out.as_strided(sizes, destinations, copy.nest.destination).copy_(values)
    return out


@st.composite
def expressions(draw: st.DrawFn) -> tuple[ex.Expression, dict[str, torch.Tensor]]:
    data: dict[str, torch.Tensor] = {}

    def leaf(shape: tuple[int, ...]) -> ex.Source:
        name = f"t{len(data)}"
        data[name] = torch.arange(math.prod(shape)).reshape(shape) + 10_000 * len(data)
        return source(name, *shape)

    node: ex.Expression = leaf(tuple(draw(st.lists(st.integers(1, 6), max_size=4))))
    value = value_of(node, data)
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["concat", "slice", "permute", "reshape", "reshape", "as_strided"]))
        if kind == "reshape":
            shape = draw(_factorings(ex.numel(node)))
            node, value = ex.reshape(node, shape), value.reshape(shape)
        elif kind == "as_strided":
            start, strides, shape = draw(_places(ex.numel(node)))
            node = ex.strided(node, start, strides, shape)
            value = value.clone(memory_format=torch.contiguous_format).as_strided(shape, strides, start)
        elif not node.shape:
            continue
        elif kind == "permute":
            dims = draw(st.permutations(range(len(node.shape))))
            node, value = ex.permute(node, dims), value.permute(dims)
        else:
            dim = draw(st.integers(0, len(node.shape) - 1))
            size = node.shape[dim]
            if kind == "slice":
                start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
                num = draw(st.integers(1, (size - start - 1) // step + 1))
                node = ex.slice_dim(node, dim, start, step, num)
                value = value[(slice(None),) * dim + (slice(start, None, step),)].narrow(dim, 0, num)
            else:
                sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
                others = [leaf((*node.shape[:dim], other, *node.shape[dim + 1 :])) for other in sizes]
                parts = draw(st.permutations([node, *others]))
                value = torch.cat([value if part is node else data[part.name] for part in parts], dim)
                node = ex.concat(parts, dim)
    assert torch.equal(value_of(node, data), value), "views are torch's"
    return node, data


@st.composite
def _factorings(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    factors = []
    for _ in range(draw(st.integers(0, 3))):
        factor = draw(st.sampled_from([n for n in range(1, number + 1) if number % n == 0]))
        factors.append(factor)
        number //= factor
    return tuple(draw(st.permutations([*factors, number])))


@st.composite
def _places(draw: st.DrawFn, num_elements: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Start, strides and shape of some elements of a flat tensor, of which each has one place."""
    dims, reach = [], 1
    for _ in range(draw(st.integers(0, 3))):
        stride = reach + draw(st.integers(0, 3))
        size = draw(st.integers(1, 1 + max(0, num_elements - reach) // stride))
        dims.append((size, stride))
        reach += (size - 1) * stride
    dims = draw(st.permutations(dims))
    start = draw(st.integers(0, num_elements - reach))
    return start, tuple(stride for _, stride in dims), tuple(size for size, _ in dims)


@settings(max_examples=400, deadline=None)
@given(expressions())
def test_executing_the_plans_of_all_ranks_rebuilds_the_value(
    case: tuple[ex.Expression, dict[str, torch.Tensor]],
) -> None:
    node, data = case
    expected = value_of(node, data).reshape(-1)
    for world_size in (1, 2, 3, 4, 7, 8):
        spans = [partition_range(ex.numel(node), rank, world_size) for rank in range(world_size)]
        pieces = [execute(copies_of(node, span), data, span, torch.int64) for span in spans]
        assert torch.equal(torch.cat(pieces), expected)


def stacked(parts: list[ex.Source]) -> ex.Expression:
    return ex.concat([ex.reshape(part, (1, *part.shape)) for part in parts], 0)


@pytest.mark.parametrize(("world_size", "most"), [(1, 1), (2, 1), (7, 8), (8, 1)])
def test_strided_conversions_need_few_copies(world_size: int, most: int) -> None:
    """The permutation of rotary weights and a transpose are a handful of strided copies, however large they are."""
    rope = ex.reshape(ex.permute(ex.reshape(source("q", 4096, 4096), (32, 64, 2, 4096)), (0, 2, 1, 3)), (4096, 4096))
    transposed = ex.permute(source("w", 128, 1536, 4096), (0, 2, 1))
    for node in (rope, transposed):
        for rank in range(world_size):
            assert len(copies_of(node, partition_range(ex.numel(node), rank, world_size))) <= most


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacks_of_thousands_of_parts_are_cut_once_per_part(dim: int) -> None:
    """Two stacks of 2000 experts, one after the other (0) or joined within each expert (1, 2), on one rank."""

    def calls(parts: int) -> int:
        """Returns how many functions planning calls."""
        stacks = [stacked([source(f"{kind}{e}", 2, 3) for e in range(parts)]) for kind in ("gate", "up")]
        node, calls = ex.concat(stacks, dim), 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename == nest.__file__

        sys.setprofile(count)
        try:
            found = copies_of(node, FlatRange(0, ex.numel(node)))
        finally:
            sys.setprofile(None)
        assert len(found) == 2 * parts
        return calls

    assert calls(2000) < 11 * calls(200), "the work for a part does not grow with the number of parts"


def test_parts_without_elements_are_passed_over() -> None:
    data = {"a": torch.arange(6).reshape(2, 3), "b": torch.arange(4).reshape(2, 2) + 100}
    empty = source("empty", 2, 0)
    node = ex.concat([empty, source("a", 2, 3), empty, empty, source("b", 2, 2), empty], 1)
    found, span = copies_of(node, FlatRange(0, 10)), FlatRange(0, 10)
    assert len(found) == 2
    assert torch.equal(execute(found, data, span, torch.int64), torch.cat([data["a"], data["b"]], 1).reshape(-1))


@pytest.mark.parametrize(
    ("shape", "other", "most"),
    [
        ((2, 2), (1, 4), 1),
        ((5, 3), (3, 5), 7),  # 5 rows of 3 in 3 rows of 5: a piece for each stretch between two row ends
        ((4, 6), (8, 3), 1),
        ((9, 4), (6, 6), 4),
    ],
)
@pytest.mark.parametrize("factor", [1, 2, 1000])
def test_regrouping_costs_what_one_period_of_the_rows_costs(
    shape: tuple[int, int], other: tuple[int, int], most: int, factor: int
) -> None:
    """A transposed reshape takes as many copies of a large matrix as of a small one of the same proportions."""
    columns_first = ex.permute(source("w", factor * shape[1], factor * shape[0]), (1, 0))
    node = ex.permute(ex.reshape(columns_first, tuple(factor * n for n in other)), (1, 0))
    assert len(copies_of(node, FlatRange(0, ex.numel(node)))) == most


def test_a_tensor_of_a_file_has_no_rows_of_its_own() -> None:
    node = ex.permute(ex.reshape(source("w", 5, 3), (3, 5)), (1, 0))
    (copy,) = copies_of(node, FlatRange(0, 15))
    assert [axis[:2] for axis in copy.nest.axes] == [(5, 1), (3, 5)]


def test_whole_rows_after_a_part_of_a_row_stay_together() -> None:
    """Elements [3, 64) of a transposed matrix of 8 columns: the end of one row, and 7 whole rows."""
    node = ex.slice_dim(ex.reshape(ex.permute(source("w", 8, 8), (1, 0)), (64,)), 0, 3, 1, 61)
    found = copies_of(node, FlatRange(0, 61))
    assert [[axis.size for axis in copy.nest.axes] for copy in found] == [[5], [7, 8]]


# -- leaves of an expression -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [lambda base: base.t(), lambda base: base[:, 1:], lambda base: base[1, 2], lambda base: base[:1].expand(3, 3)],
)
def test_a_view_in_memory_is_row_major(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.arange(6).view(2, 3))
    held = ex.hold(tensor)
    assert held.shape == tuple(tensor.shape)
    assert held.flat.tolist() == tensor.flatten().tolist()


def test_leaves_come_once_in_order_with_what_they_need() -> None:
    a, b, c = (source(name, 2, 3, 4) for name in "abc")
    product = ex.Elementwise("aten.add", lambda values: values[0], (ex.cast(b, torch.float64), a), a.shape, a.dtype)
    turned = ex.permute(product, (2, 1, 0))
    computed = ex.Computed("aten.flip", lambda values: values[0].flip(0), (turned,), turned.shape, turned.dtype)
    found = ex.leaves(ex.concat([computed, ex.reshape(c, (4, 3, 2)), ex.reshape(a, (4, 3, 2))], 0))
    assert found == [computed, product, b, a, c]
    assert ex.leaves(a) == [a]


def test_leaves_of_a_deep_expression() -> None:
    """A walk that recursed would end at Python's limit of a thousand."""
    leaf = source("w", 2, 3, 4)
    node: ex.Expression = leaf
    for number in range(3000):
        node = ex.reshape(ex.permute(node, (2, 0, 1)), ((2, 3, 4), (4, 3, 2))[number % 2])
    assert ex.leaves(node) == [leaf]
