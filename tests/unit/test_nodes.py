"""Which processes share a node, and what is free of host memory: of the machine, in cgroups, within limits."""

import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lowmem_load.distributed import nodes
from lowmem_load.distributed.nodes import Room, free_heap_bytes, node_name, rooms
from lowmem_load.files.memory import map_memory, trim_heap, untouched_bytes
from tests.ranks import REPO

MEMINFO = (
    "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 2000 kB\nCached: 4000 kB\nSwapFree: 500 kB\nHugePages_Total: 0\n"
)
NONE = str(2**63 - 4096)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without cgroups, and a process without limits."""
    monkeypatch.setattr(nodes, "PROC", tmp_path)
    monkeypatch.setattr(nodes, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write(tmp_path, {"meminfo": MEMINFO, "self/status": "Name:\tpython\nVmSize:\t  300 kB\nVmData:\t  200 kB\n"})
    return tmp_path


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def in_cgroup(proc: Path, group: str) -> Path:
    """Has the process be in a cgroup; returns the folder of all cgroups."""
    write(proc, {"self/cgroup": f"7:cpu:/x\n{group}\n"})
    return proc / "cgroup"


def free() -> dict[str, int]:
    """The free bytes behind the words by which a room is named."""
    words = ("MemAvailable", "cgroup", "address space", "data")
    return {next(word for word in words if word in room.place): room.free_bytes for room in rooms(3)}


def test_of_the_machine_memory_available_and_swap_are_free(proc: Path) -> None:
    (room,) = rooms(3)
    assert (room.free_bytes, room.is_mapped) == (2500 << 10, False)
    assert room.place.endswith(": MemAvailable and free swap")
    assert room.pool == rooms(4)[0].pool, "ranks share it"
    (proc / "meminfo").unlink()
    assert rooms(3) == []


V2 = {
    "memory.max": "9000000",
    "memory.current": "8000000",
    "memory.stat": "anon 9\nactive_file 30\ninactive_file 200\nslab_reclaimable 1000\nfile 7\n",
}
V1 = {
    "memory.limit_in_bytes": "9000000",
    "memory.usage_in_bytes": "8000000",
    "memory.stat": "active_file 1\ninactive_file 1\ntotal_active_file 230\ntotal_inactive_file 1000\n",
}


def test_of_a_cgroup_the_page_cache_is_free_and_so_is_swap(proc: Path) -> None:
    folder = in_cgroup(proc, "0::/job/rank") / "job/rank"
    write(folder, V2)
    assert free()["cgroup"] == 1_001_230 + (500 << 10)
    write(folder, {"memory.swap.max": "0"})
    assert free()["cgroup"] == 1_001_230
    write(folder, {"memory.max": "max"})
    assert list(free()) == ["MemAvailable"]


def test_version_1_counts_what_lies_below(proc: Path) -> None:
    folder = in_cgroup(proc, "4:memory,x:/job") / "memory/job"
    write(folder, V1)
    assert free()["cgroup"] == 1_001_230 + (500 << 10)
    write(folder, {"memory.memsw.limit_in_bytes": "9000100"})
    assert free()["cgroup"] == 1_001_330
    write(folder, {"memory.limit_in_bytes": NONE})
    assert list(free()) == ["MemAvailable"]


def test_limits_of_the_cgroups_above_count_too(proc: Path) -> None:
    point = in_cgroup(proc, "0::/job/rank")
    write(point / "job/rank", V2)
    write(point / "job", {**V2, "memory.max": "8500000", "memory.swap.max": "0"})
    of_cgroups = [room for room in rooms(3) if "cgroup" in room.place]
    assert [room.free_bytes for room in of_cgroups] == [1_001_230 + (500 << 10), 501_230]
    assert of_cgroups[0].pool != of_cgroups[1].pool
    assert f"limit of 8.11 MiB of the cgroup {point / 'job'}" in of_cgroups[1].place


@pytest.mark.parametrize("path", ["/", "/docker/1a"])
def test_a_container_that_shows_only_its_own_cgroup(proc: Path, path: str) -> None:
    write(in_cgroup(proc, f"0::{path}"), V2)
    assert free()["cgroup"] == 1_001_230 + (500 << 10)


def test_a_limit_of_the_process_is_its_own(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 1000 << 10, resource.RLIMIT_DATA: 100 << 10}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limits[number], resource.RLIM_INFINITY))
    assert free() == {"MemAvailable": 2500 << 10, "address space": 700 << 10, "data": 0}
    room = rooms(3)[1]
    assert room == Room(
        "limit of 1000.0 KiB of the address space of a process (ulimit)", room.pool, 700 << 10, is_mapped=True
    )
    assert room.pool != rooms(4)[1].pool
    assert proc


def test_heap_that_was_freed_counts_as_free() -> None:
    code = "from tests.unit.test_nodes import free_a_heap; free_a_heap()"  # a heap that no other test has used
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def free_a_heap() -> None:
    def free() -> torch.Tensor:
        return torch.tensor([free_heap_bytes(is_mapped=is_mapped) for is_mapped in (False, True)])

    blocks = [torch.ones(10_000, dtype=torch.uint8) for _ in range(5000)]
    before, blocks, least = free(), blocks[::10], 4500 * 10_000 * 0.9
    assert (free() - before > least).all()  # the holes between them stay with the process
    trim_heap()
    assert (free() - before > least).tolist() == [False, True], "their pages do not"
    assert blocks


def test_memory_without_pages_is_told_from_memory_that_has_them() -> None:
    memory = map_memory(64 << 20)
    assert untouched_bytes(memory) == 64 << 20
    memory[: 16 << 20] = 1
    assert 0 <= (48 << 20) - untouched_bytes(memory) <= 2 << 20, "pages may be huge"
    memory[:] = 1
    assert untouched_bytes(memory) == 0
    assert untouched_bytes(memory[5:9]) == untouched_bytes(memory[:0]) == 0


def test_processes_of_one_container_are_on_one_node() -> None:
    code = "from lowmem_load.distributed.nodes import node_name; print(node_name(7), end='')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == node_name(3)


def test_a_rank_is_a_node_of_its_own_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BOOT_ID", Path("nowhere"))
    assert node_name(3) != node_name(4)
