"""Elements are moved where a nest says, also in pieces and gathered first; numpy decides where that is."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from lowmem_load.errors import PlanError
from lowmem_load.files.memory import scatter_elements, source_elements
from lowmem_load.planning.nest import Axis, Nest, Side

SOURCE = torch.arange(100, dtype=torch.float32)
NESTS = {
    "a run": Nest(3, 5, (Axis(40, 1, 1),)),
    "transposed": Nest(2, 1, (Axis(6, 1, 7), Axis(7, 6, 1))),
    "each twice": Nest(0, 0, (Axis(5, 3, 1), Axis(2, 0, 5))),
    "three axes": Nest(1, 4, (Axis(3, 20, 1), Axis(4, 5, 3), Axis(2, 2, 12))),
    "one element": Nest(9, 2, ()),
}


def pairs(nest: Nest) -> Iterator[tuple[int, int]]:
    """Yields which element goes where, one by one."""
    for steps in itertools.product(*(range(axis.size) for axis in nest.axes)):
        moved = list(zip(steps, nest.axes, strict=True))
        yield (
            nest.source + sum(step * axis.source for step, axis in moved),
            nest.destination + sum(step * axis.destination for step, axis in moved),
        )


def expected(nest: Nest) -> torch.Tensor:
    result = torch.full((60,), -1.0)
    for source, destination in pairs(nest):
        result[destination] = SOURCE[source]
    return result


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_elements_go_where_the_axes_say(nest: Nest) -> None:
    destination = torch.full((60,), -1.0)
    scatter_elements(nest, SOURCE, destination)
    assert torch.equal(destination, expected(nest))


@pytest.mark.parametrize("max_numel", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_pieces_that_are_gathered_first_do_the_same(nest: Nest, max_numel: int) -> None:
    destination = torch.full((60,), -1.0)
    for part in nest.split(max_numel):
        chosen = source_elements(part, SOURCE)
        assert 0 < chosen.numel() <= max_numel
        scatter_elements(part.gathered(), chosen.contiguous().view(-1), destination)
    assert torch.equal(destination, expected(nest))


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("numel", [1, 2, 5, 24])
@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_clipped_parts_are_disjoint_and_together_the_nest(nest: Nest, numel: int, side: Side) -> None:
    found = []
    for start in range(0, 100, numel):
        for part in nest.clipped(start, start + numel, side):
            mine = list(pairs(part))
            assert all(
                start <= (source if side == "source" else destination) < start + numel for source, destination in mine
            )
            assert list(part.axes) == sorted(part.axes, key=lambda axis: -axis.destination)
            found += mine
    assert sorted(found) == sorted(pairs(nest))


def test_axes_that_run_into_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="interleave"):
        list(Nest(0, 0, (Axis(3, 2, 4), Axis(4, 1, 1))).clipped(2, 5, "source"))
