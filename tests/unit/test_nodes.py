"""Which processes share a node, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_load.distributed.nodes import make_memory, map_memory_of, node_name


def test_processes_of_one_container_are_on_one_node() -> None:
    code = "from lowmem_load.distributed.nodes import node_name; print(node_name(7), end='')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == node_name(3)


def test_a_rank_is_a_node_of_its_own_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_load.distributed.nodes.pid_space", lambda: "")
    assert node_name(3) != node_name(4)


def test_a_file_that_lies_where_the_memory_was_is_left_alone(tmp_path: Path) -> None:
    place = make_memory(1 << 12)
    try:
        map_memory_of(place, 1 << 12).close()
        with pytest.raises(OSError, match="another file"):
            map_memory_of(place._replace(name="other"), 1 << 12)
        with (tmp_path / place.name).open("w+b") as file, pytest.raises(OSError, match="another file"):
            map_memory_of(place._replace(descriptor=file.fileno()), 1 << 12)
    finally:
        os.close(place.descriptor)
