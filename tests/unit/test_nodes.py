"""Which processes share a node."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowmem_load.distributed.nodes import node_name


def test_processes_of_one_container_are_on_one_node() -> None:
    code = "from lowmem_load.distributed.nodes import node_name; print(node_name(7), end='')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == node_name(3)


def test_a_rank_is_a_node_of_its_own_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_load.distributed.nodes.pid_space", lambda: "")
    assert node_name(3) != node_name(4)
