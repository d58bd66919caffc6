"""Agreement among ranks, as far as one process can show it; tests/multi_rank/test_distributed.py has the rest."""

from __future__ import annotations

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.ranks import group as rank_group
from lowmem_load.ranks.process_group import DistributedInterface
from tests.ranks import run_ranks


def _agree_alone() -> None:
    error = CheckpointError("config.json: absent")
    interface = DistributedInterface()
    interface.agree("reading", None)
    with pytest.raises(CheckpointError) as caught:
        interface.agree("reading", error)
    assert caught.value is error


def test_agree_on_one_rank_raises_the_error_itself() -> None:
    run_ranks(_agree_alone, world_size=1)


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3"), (range(512), "0-511")]
)
def test_spell_ranks(ranks: list[int], text: str) -> None:
    assert rank_group.spell_ranks(list(ranks)) == text


def test_minorities_are_measured_against_what_most_hold() -> None:
    def minorities(*held: str | None) -> dict[int, str]:
        return rank_group._minorities(dict(enumerate(held)), "holds {}", "hold {}")

    assert minorities("a", "a", "a") == {}
    assert minorities("a", "b") == {1: "holds b, where rank(s) 0 hold a"}
    assert minorities("x", "a", "a", None) == {
        0: "holds x, where rank(s) 1-2 hold a",
        3: "holds None, where rank(s) 1-2 hold a",
    }
