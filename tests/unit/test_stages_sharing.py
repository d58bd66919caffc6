"""Who reads together, and what is said where nobody does. The other ranks are scripted."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

from lowmem_load.distributed.nodes import Nodes
from lowmem_load.errors import ConfigError
from lowmem_load.pipeline.share_reads import ALONE, SHARE_READS, shared_windows, shares_reads, sharing_ranks
from tests.steps import ScriptedRanks

NODES = ("a", "b", "a", "b", "a")


def test_ranks_may_read_together_unless_the_environment_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares_reads()
    for text, expected in (("auto", True), ("off", False), ("", True)):
        monkeypatch.setenv(SHARE_READS, text)
        assert shares_reads() is expected
    monkeypatch.setenv(SHARE_READS, "on")
    with pytest.raises(ConfigError, match="LOWMEM_LOAD_SHARE_READS: the environment has 'on', expected auto or off"):
        shares_reads()


def test_ranks_with_reads_to_share_meet_where_there_are_two_on_a_node() -> None:
    nodes = Nodes(0, NODES)
    assert sharing_ranks(nodes, [True] * 5) == {"a": [0, 2, 4], "b": [1, 3]}
    assert sharing_ranks(nodes, [True, True, False, False, True]) == {"a": [0, 4]}


@pytest.mark.parametrize(("offers", "why"), [([False] * 5, ""), ([True, True, False, False, False], ALONE)])
def test_where_no_two_meet_there_is_no_step(offers: list[bool], why: str) -> None:
    ranks: Any = ScriptedRanks(0)
    assert shared_windows(ranks, Nodes(0, NODES), offers) == (None, why)
    assert not ranks.titles


def test_the_first_rank_of_a_node_makes_what_the_others_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ranks: Any = ScriptedRanks(1, [None] * 5, [""] * 5)
    windows, why = shared_windows(ranks, Nodes(1, NODES), [True] * 5)
    assert windows is not None and why == ""
    assert (windows.place, windows.num_ranks) == (0, 2)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1, "that of the mapping; its own is closed"
    del windows
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_memory_that_one_rank_cannot_open_is_used_by_none_of_its_node() -> None:
    trouble = ["", "", "", "the shared memory of process 7 cannot be opened: no", ""]
    ranks: Any = ScriptedRanks(1, [None] * 5, trouble)
    assert shared_windows(ranks, Nodes(1, NODES), [True] * 5) == (None, f"rank 3: {trouble[3]}")


def test_memory_of_a_process_that_is_not_there_is_a_reason() -> None:
    ranks: Any = ScriptedRanks(3, [None, (1 << 30, 5, "name"), None, None, None], [""] * 5)
    windows, why = shared_windows(ranks, Nodes(3, NODES), [True] * 5)
    assert windows is None and why.startswith(f"rank 3: the shared memory of process {1 << 30} cannot be opened")


def test_a_rank_whose_node_has_nothing_to_share_takes_part_in_the_steps() -> None:
    ranks: Any = ScriptedRanks(0, [None] * 5, [""] * 5)
    assert shared_windows(ranks, Nodes(0, NODES), [True, True, False, True, False]) == (None, ALONE)
    assert len(ranks.titles) == 2
