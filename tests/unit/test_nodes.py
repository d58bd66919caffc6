"""Which ranks share a node."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_load.ranks.nodes import Nodes, meet, node_name


@pytest.mark.parametrize(
    ("rank", "neighbours", "first"), [(0, (0, 2), 0), (1, (1, 3, 4), 1), (2, (0, 2), 0), (4, (1, 3, 4), 1)]
)
def test_nodes_of_ranks_that_do_not_fill_them_in_order(rank: int, neighbours: tuple[int, ...], first: int) -> None:
    nodes = Nodes(rank, ("a", "b", "a", "b", "b"))
    assert nodes.num_nodes == 2
    assert nodes.neighbours == neighbours
    assert nodes.first == first


def test_processes_of_one_container_are_on_one_node() -> None:
    code = "from lowmem_load.ranks.nodes import node_name; print(node_name(7), end='')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == node_name(3)


def test_a_rank_is_a_node_of_its_own_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_load.ranks.nodes.pid_space", lambda: "")
    assert node_name(3) != node_name(4)


def test_what_each_rank_says_of_its_node_is_short() -> None:
    """For each is sent that of all of them: at a thousand ranks a hundred bytes each are a hundred million."""
    said: list[Any] = []
    meet(SimpleNamespace(rank=3, is_fake=False, all_gather_object=lambda mine: said.append(mine) or [mine] * 4), None)
    assert len(pickle.dumps(said[0])) <= 48


def test_ranks_of_the_fake_backend_wait_for_nobody() -> None:
    ranks: Any = SimpleNamespace(rank=517, is_fake=True, all_gather_object=lambda mine: [mine] * 1024)
    nodes, said = meet(ranks, "this")
    assert nodes.first == 517
    assert nodes.neighbours == (517,)
    assert said[0] == "this"
