"""Elements are moved where a scatter says, also in pieces and gathered first; numpy decides where that is."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowmem_load.planning.reads import Loop, Scatter
from lowmem_load.read.scatter import gathered, scatter_elements, source_elements, split

SOURCE = torch.arange(100, dtype=torch.float32)
SCATTERS = {
    "a run": Scatter(3, 5, (Loop(40, 1, 1),), ()),
    "transposed": Scatter(2, 1, (Loop(6, 1, 7), Loop(7, 6, 1)), ()),
    "each twice": Scatter(0, 0, (Loop(5, 3, 1), Loop(2, 0, 5)), ()),
    "three loops": Scatter(1, 4, (Loop(3, 20, 1), Loop(4, 5, 3), Loop(2, 2, 12)), ()),
    "one element": Scatter(9, 2, (), ()),
}


def expected(scatter: Scatter) -> torch.Tensor:
    destination = torch.full((60,), -1.0)
    for steps in itertools.product(*(range(loop.size) for loop in scatter.loops)):
        pairs = list(zip(steps, scatter.loops, strict=True))
        source = scatter.source_start + sum(step * loop.source for step, loop in pairs)
        destination[scatter.destination_start + sum(step * loop.destination for step, loop in pairs)] = SOURCE[source]
    return destination


@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS)
def test_elements_go_where_the_loops_say(scatter: Scatter) -> None:
    destination = torch.full((60,), -1.0)
    scatter_elements(scatter, SOURCE, destination, 0)
    assert torch.equal(destination, expected(scatter))


@pytest.mark.parametrize("max_numel", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS)
def test_pieces_that_are_gathered_first_do_the_same(scatter: Scatter, max_numel: int) -> None:
    destination = torch.full((60,), -1.0)
    for part in split(scatter, max_numel):
        chosen = source_elements(part, SOURCE)
        assert 0 < chosen.numel() <= max_numel
        scatter_elements(gathered(part), chosen.contiguous().view(-1), destination, 0)
    assert torch.equal(destination, expected(scatter))


def test_casts_are_done_in_order_and_a_shift_is_added() -> None:
    scatter = Scatter(1, 0, (Loop(4, 1, 1),), (torch.bfloat16, torch.float64))
    destination = torch.zeros(10, dtype=torch.float64)
    scatter_elements(scatter, SOURCE + 0.123, destination, 3)
    assert destination.tolist() == [0.0] * 3 + (SOURCE[1:5] + 0.123).to(torch.bfloat16).tolist() + [0.0] * 3
