"""How many pieces a plan has and what it costs to find them, by the shapes of the expression."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.planning import copies
from lowmem_load.planning import expression as ex
from lowmem_load.planning.ranges import FlatRange, partition_range
from tests.unit.test_copies import copies_of, execute, expressions, source, stacked


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacks_of_thousands_of_parts_are_cut_once_per_part(dim: int) -> None:
    """Two stacks of 2000 experts, one after the other (0) or joined within each expert (1, 2), on one rank."""

    def calls(parts: int) -> int:
        """Returns how many functions planning calls."""
        stacks = [stacked([source(f"{kind}{e}", 2, 3) for e in range(parts)]) for kind in ("gate", "up")]
        node, calls = ex.concat(stacks, dim), 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename == copies.__file__

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


@st.composite
def _with_repeats(draw: st.DrawFn) -> ex.Expression:
    """An expression of which some dims may be repeated, and then regrouped and reordered with the others."""
    node, _ = draw(expressions())
    repeats = draw(st.lists(st.integers(1, 3), max_size=2))
    node = ex.expand(ex.reshape(node, (*node.shape, *(1 for _ in repeats))), (*node.shape, *repeats))
    node = ex.permute(node, draw(st.permutations(range(len(node.shape)))))
    divisors = [n for n in range(1, ex.numel(node) + 1) if ex.numel(node) % n == 0]
    rows = draw(st.sampled_from(divisors))
    return ex.permute(ex.reshape(node, (rows, ex.numel(node) // rows)), draw(st.permutations(range(2))))


@settings(max_examples=300, deadline=None)
@given(_with_repeats(), st.integers(1, 3))
def test_loops_do_not_interleave(node: ex.Expression, world_size: int) -> None:
    """What the note of that name says, seen in the leaves. What cuts take from it is asserted where they are made."""
    for rank in range(world_size):
        for copy in copies_of(node, partition_range(ex.numel(node), rank, world_size)):
            reach = 0
            for stride, size in sorted((axis.source, axis.size) for axis in copy.nest.axes if axis.source):
                assert stride > reach
                reach += stride * (size - 1)


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
