"""The proof that copies cover a destination once, against counting the writes to each element."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import CheckpointError, PlanError
from lowmem_load.planning import expression as ex
from lowmem_load.planning import proof
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.proof import prove_coverage, prove_names
from lowmem_load.planning.regions import partition_range
from tests.unit.test_copies import source


def nest(start: int, sizes: Sequence[int], strides: Sequence[int]) -> Nest:
    """A nest that writes; where its elements come from does not matter here, and differs from axis to axis."""
    return Nest(
        7, start, tuple(Axis(size, 3 + n, stride) for n, (size, stride) in enumerate(zip(sizes, strides, strict=True)))
    )


def run(start: int, size: int) -> Nest:
    return nest(start, (size,), (1,))


def elements_of(nest: Nest) -> np.ndarray:
    """Returns the elements that a nest writes, as often as it writes them."""
    elements = np.array([nest.destination])
    for size, _, stride in nest.axes:
        elements = (elements[:, None] + stride * np.arange(size)).reshape(-1)
    return elements


def in_ascending_order(nest: Nest) -> bool:
    """Whether the loops do not interleave: from the largest stride to the smallest, elements only grow."""
    ordered = replace(nest, axes=tuple(sorted(nest.axes, key=lambda axis: (-axis.destination, -axis.size))))
    return bool((np.diff(elements_of(ordered)) > 0).all())


def check_against_counting(nests: Sequence[Nest], numel: int) -> None:
    """The proof succeeds exactly if every element is written once, and what it says of the others is true."""
    written = np.concatenate([np.zeros(0, int), *map(elements_of, nests)])
    outside = written[(written < 0) | (written >= numel)]
    counts = np.bincount(written[(written >= 0) & (written < numel)], minlength=numel)
    if all(map(in_ascending_order, nests)) and not outside.size and (counts == 1).all():
        prove_coverage("w", nests, numel)
        return
    with pytest.raises(PlanError, match=r"^w: ") as failure:
        prove_coverage("w", nests, numel)
    message = str(failure.value)
    if "interleave" in message:
        assert not all(map(in_ascending_order, nests))
    elif "a copy writes" in message:
        assert outside.size
    else:
        found = re.search(r"elements \[(\d+), (\d+)\) are (not covered|covered twice)", message)
        assert found, message
        named = counts[int(found[1]) : int(found[2])]
        assert named.size and (named == 0 if found[3] == "not covered" else named > 1).all(), message


nests = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), max_size=3).flatmap(
    lambda loops: st.builds(
        nest, st.integers(-1, 8), st.just(tuple(n for n, _ in loops)), st.just(tuple(s for _, s in loops))
    )
)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[Nest], int]:
    """Nests that write each element once: a box, cut and interleaved again and again."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    pieces = [nest(0, tuple(shape), strides)]
    for _ in range(draw(st.integers(0, 8))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        loops = [loop for loop, axis in enumerate(piece.axes) if axis.size > 1]
        if not loops:
            pieces.append(piece)
            continue
        loop = draw(st.sampled_from(loops))
        size, source, stride = piece.axes[loop]
        number = draw(st.integers(2, size))
        cut, interleave = [(0, number - 1, 1), (number - 1, size - number + 1, 1)], []
        for first in range(number):
            interleave.append((first, -(-(size - first) // number), number))
        for first, new_size, step in draw(st.sampled_from([cut, interleave])):
            axes = (*piece.axes[:loop], Axis(new_size, source * step, stride * step), *piece.axes[loop + 1 :])
            pieces.append(replace(piece.shifted(destination=first * stride), axes=axes))
    return draw(st.permutations(pieces)), math.prod(shape)


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[list[Nest], int]:
    """A tiling with one nest changed, left out or repeated."""
    pieces, numel = draw(tilings())
    piece = pieces.pop()
    change = draw(st.sampled_from(["start", "size", "stride", "drop", "repeat"]))
    if change == "start":
        pieces.append(piece.shifted(destination=draw(st.sampled_from([-1, 1, 2]))))
    elif change in ("size", "stride") and piece.axes:
        loop = draw(st.integers(0, len(piece.axes) - 1))
        field, by = "size" if change == "size" else "destination", draw(st.sampled_from([-1, 1]))
        axis = piece.axes[loop]._replace(**{field: getattr(piece.axes[loop], field) + by})
        pieces.append(replace(piece, axes=(*piece.axes[:loop], axis, *piece.axes[loop + 1 :])))
    elif change == "repeat":
        pieces += [piece, piece]
    return pieces, numel


@settings(max_examples=500, deadline=None)
@given(tilings() | disturbed() | st.tuples(st.lists(nests, max_size=4), st.integers(0, 24)))
def test_the_proof_agrees_with_counting(case: tuple[list[Nest], int]) -> None:
    check_against_counting(*case)


@settings(max_examples=500, deadline=None)
@given(tilings() | disturbed(), st.integers(1, 12))
def test_a_bitmap_in_windows_agrees_with_counting(case: tuple[list[Nest], int], cells: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "rows_of", lambda group, start, end: None)
        patch.setattr(proof, "PROOF_CELLS", cells)
        check_against_counting(*case)


def test_copies_of_nothing_write_nothing() -> None:
    prove_coverage("w", [nest(3, (0, 2), (2, 1)), run(0, 4), run(20, 0)], 4)
    prove_coverage("w", [], 0)
    prove_coverage("w", [nest(0, (), ())], 1)


@pytest.fixture
def no_bitmap(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        raise AssertionError(f"{name} needs a bitmap")

    monkeypatch.setattr(proof, "prove_on_bitmap", refuse)


MANY = 1 << 27
"""Rows of a destination whose bitmap would take more than `PROOF_CELLS` cells."""


@pytest.mark.parametrize(
    ("copies", "numel", "message"),
    [
        # even and odd elements; the last odd one is missing, and the first even one is there twice
        ([nest(0, (MANY,), (2,)), nest(1, (MANY - 1,), (2,)), run(0, 1)], 2 * MANY, r"\[0, 1\) are covered twice"),
        ([nest(0, (MANY,), (2,)), nest(1, (MANY - 1,), (2,)), run(2 * MANY - 2, 1)], 2 * MANY, "are covered twice"),
        # left and right columns, one element too wide and one too narrow
        ([nest(0, (MANY, 4), (9, 1)), nest(3, (MANY, 5), (9, 1))], 9 * MANY, r"\[3, 4\) are covered twice"),
    ],
)
@pytest.mark.usefixtures("no_bitmap")
def test_an_element_written_twice_is_found_at_any_size(copies: list[Nest], numel: int, message: str) -> None:
    assert sum(copy.numel for copy in copies) == numel
    with pytest.raises(PlanError, match=message):
        prove_coverage("w", copies, numel)


@pytest.mark.parametrize(
    ("copies", "numel"),
    [
        ([nest(0, (MANY,), (2,)), nest(1, (MANY,), (2,))], 2 * MANY),
        # a partition that begins and ends within a row of (4, 5) elements
        ([run(0, 3), nest(3, (MANY, 4), (9, 1)), nest(7, (MANY - 1, 5), (9, 1)), run(9 * MANY - 2, 5)], 9 * MANY + 3),
        # columns that themselves interleave, with strides that do not divide the row
        ([nest(0, (MANY, 3), (9, 1)), nest(3, (MANY, 3), (9, 2)), nest(4, (MANY, 3), (9, 2))], 9 * MANY),
        # columns [4, 6) and [10, 12) of 12 are one copy of stride 6
        ([nest(0, (MANY, 4), (12, 1)), nest(4, (2 * MANY, 2), (6, 1)), nest(6, (MANY, 4), (12, 1))], 12 * MANY),
        # such a copy, that begins and ends within a row
        ([nest(0, (2 * MANY, 3), (4, 1)), run(3, 1), nest(7, (MANY - 1,), (8,)), nest(11, (MANY - 1,), (8,))], 0),
    ],
)
@pytest.mark.usefixtures("no_bitmap")
def test_copies_that_interleave_need_no_bitmap(copies: list[Nest], numel: int) -> None:
    prove_coverage("w", copies, numel or sum(copy.numel for copy in copies))


@pytest.mark.usefixtures("no_bitmap")
def test_plans_of_large_conversions_need_no_bitmap() -> None:
    transposed = ex.permute(source("w", 128, 1536, 4096), (0, 2, 1))
    gate_up = [ex.reshape(source(kind, 128, 4096, 1536), (128, 4096, 1536, 1)) for kind in ("gate", "up")]
    interleaved = ex.reshape(ex.concat(gate_up, 3), (128, 4096, 3072))
    side_by_side = ex.concat([transposed, interleaved, source("b", 128, 4096, 7)], 2)
    for node in (transposed, interleaved, side_by_side):
        for world_size in (1, 2, 7):
            for rank in range(world_size):
                Planner().plan_fill("w", node, partition_range(ex.numel(node), rank, world_size))


ROWS = 5
UNEQUAL = [
    # even elements of 12 in steps of 4, odd ones in steps of 6
    [*(nest(start, (3 * ROWS,), (4,)) for start in (0, 2)), *(nest(start, (2 * ROWS,), (6,)) for start in (1, 3, 5))],
    # whatever row of 4 the first two are put into, another copy runs over its end
    [nest(0, (2,), (2,)), nest(1, (3,), (4,)), nest(3, (3, 2), (4, 1)), nest(6, (2,), (4,))],
]


@pytest.mark.parametrize("cells", [1, 7, 1 << 24])
@pytest.mark.parametrize("copies", UNEQUAL)
def test_copies_that_do_not_fall_into_rows_take_a_bitmap(
    monkeypatch: pytest.MonkeyPatch, copies: list[Nest], cells: int
) -> None:
    numel = sum(copy.numel for copy in copies)
    monkeypatch.setattr(proof, "PROOF_CELLS", cells)
    windows: list[int] = []
    zeros = np.zeros
    monkeypatch.setattr(np, "zeros", lambda size, dtype: windows.append(size) or zeros(size, dtype))
    prove_coverage("w", copies, numel)
    assert sum(windows) == numel and max(windows) <= cells
    shifted = copies[2].shifted(destination=-1)
    check_against_counting([*copies[:2], shifted, *copies[3:]], numel)


@pytest.mark.usefixtures("no_bitmap")
def test_many_copies_next_to_one_are_proved_without_pairing_them() -> None:
    """20 000 rows of a column each a copy of its own, next to one copy of the other columns; none is skipped."""
    rows = 20_000
    copies = [nest(0, (rows, 4), (9, 1)), *(run(9 * row + 4, 5) for row in range(rows))]
    prove_coverage("w", copies, 9 * rows)
    copies[rows // 2] = copies[rows // 2].shifted(destination=-1)
    with pytest.raises(PlanError, match="covered twice"):
        prove_coverage("w", copies, 9 * rows)


def test_names_that_keep_tensors_apart() -> None:
    prove_names("x", ["a", "b", "c"], {"a": "w", "b": "v"}, left_out={"c"})
    prove_names("x", [("model", "w"), ("ema", "w")], {("model", "w"): ("", "w"), ("ema", "w"): ("adapter", "w")})


def test_two_names_never_become_one() -> None:
    with pytest.raises(CheckpointError, match=r"^x: a\.base\.w and a\.w would both become a\.w$"):
        prove_names("x", (), {("a", "base.w"): "a.w", ("a", "w"): "a.w"})


@pytest.mark.parametrize(
    ("new_names", "left_out"), [({"a": "w"}, set()), ({"a": "w", "b": "v"}, {"b"})], ids=["lost", "both"]
)
def test_a_tensor_is_written_or_reported(new_names: dict[str, str], left_out: set[str]) -> None:
    with pytest.raises(PlanError, match="x: b: neither written nor reported as left out, or both"):
        prove_names("x", ["a", "b"], new_names, left_out)
