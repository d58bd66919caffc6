"""Which machine and node a rank is on, and the host memory that is free to it there.

Ranks of a node see the same files under equal paths.

[Note: free memory] It is bounded by the machine, by cgroups, and by limits of the process. Linux only: elsewhere there
is nothing to compare with. All figures are upper bounds, since a load that fits must not be refused: swap counts as
free, and so does the page cache, which the kernel gives back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lowmem_load.files.memory import untouched_between
from lowmem_load.text import fingerprint, size

PROC, BOOT_ID = Path("/proc"), Path("/proc/sys/kernel/random/boot_id")
CGROUPS = Path("/sys/fs/cgroup")

NO_LIMIT = 1 << 60  # bytes from which a cgroup's limit does not limit: version 1 has the largest number of pages

# The limits of a process, and what /proc/self/status says of each. Source: proc_pid_status(5), getrlimit(2).
LIMITS = {resource.RLIMIT_AS: ("address space", "VmSize"), resource.RLIMIT_DATA: ("data", "VmData")}


def node_name(rank: int) -> str:
    """Return a short name that is equal for processes that see the same files under equal paths.

    Where the system does not tell nodes apart (not Linux), each rank is its own node.
    """
    try:
        name = f"{BOOT_ID.read_text()} {os.readlink('/proc/self/ns/mnt')} {os.stat('/').st_ino} {os.getuid()}"
    except OSError:
        name = f"rank {rank} on {platform.node()}"
    return fingerprint([name])


@functools.cache
def machine() -> str:
    """Return a name of this boot of this machine. On one machine, files of equal version are the same file."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()


class Room(NamedTuple):
    """Memory that ranks of equal `pool` share, and what is free of it, bytes."""

    place: str  # for messages
    pool: str
    free_bytes: int
    is_mapped: bool = False  # whether memory counts when it is mapped, and not when it gets pages


def rooms(rank: int) -> list[Room]:
    """Return all that bounds the host memory of this process, a rank."""
    host, shared = platform.node(), []
    memory = _numbers(PROC / "meminfo")
    swap_bytes = memory.get("SwapFree", 0) << 10
    if "MemAvailable" in memory:
        free_bytes = (memory["MemAvailable"] << 10) + swap_bytes
        shared.append(Room(f"{host}: MemAvailable and free swap", f"memory {machine()}", free_bytes))
    for folder in _cgroups():
        bounds = _of_cgroup(folder, swap_bytes)
        if bounds is not None:
            limit_bytes, free_bytes = bounds
            status = folder.stat()
            place = f"{host}: limit of {size(limit_bytes)} of the cgroup {folder}"
            shared.append(Room(place, f"{machine()} {status.st_dev} {status.st_ino}", free_bytes))
    used = _numbers(PROC / "self/status")
    for number, (what, key) in LIMITS.items():
        limit_bytes = resource.getrlimit(number)[0]
        if limit_bytes != resource.RLIM_INFINITY and key in used:
            place = f"limit of {size(limit_bytes)} of the {what} of a process (ulimit)"
            shared.append(
                Room(place, f"process of rank {rank}", max(0, limit_bytes - (used[key] << 10)), is_mapped=True)
            )
    return shared


def free_heap_bytes(*, is_mapped: bool) -> int:
    """Return the bytes that this process has from the system and uses no more, which new tensors may get.

    Unless `is_mapped`, only those with pages: glibc goes on to count what `malloc_trim` has given back. In the heaps
    of threads that does not show. Source: mallinfo2(3), since glibc 2.33. 0 without it.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    free_bytes = int(mallinfo().fordblks)
    if not is_mapped:
        with contextlib.suppress(OSError):  # no /proc
            heap = re.search(r"^(\w+)-(\w+) .*\[heap\]$", (PROC / "self/maps").read_text(), re.MULTILINE)
            free_bytes -= untouched_between(int(heap[1], 16), int(heap[2], 16)) if heap else 0
    return max(0, free_bytes)


class _Mallinfo(ctypes.Structure):
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may limit memory, and of those above them that show.

    In a container the root may be a cgroup of which /proc gives the path on the host.
    """
    try:
        groups = [line.split(":", 2) for line in (PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if not controllers or "memory" in controllers.split(","):
            root = CGROUPS / "memory" if controllers else CGROUPS
            folder = root / path.lstrip("/")
            levels = (level for level in (folder, *folder.parents) if level.is_relative_to(root))
            yield from filter(Path.is_dir, levels)


def _of_cgroup(folder: Path, swap_bytes: int) -> tuple[int, int] | None:
    """Return the limit of a cgroup and what is free of it; None without a limit."""
    is_v2 = (folder / "memory.max").exists()
    names = ("max", "current", "swap.max") if is_v2 else ("limit_in_bytes", "usage_in_bytes", "memsw.limit_in_bytes")
    limit_bytes, used_bytes, swap_limit_bytes = (_number(folder / f"memory.{name}") for name in names)
    if limit_bytes is None or used_bytes is None:
        return None
    pages = _numbers(folder / "memory.stat")
    prefix = "" if is_v2 else "total_"  # with the cgroups below it
    kinds = [f"{prefix}{kind}" for kind in ("active_file", "inactive_file")] + ["slab_reclaimable"]
    if swap_limit_bytes is not None:
        swap_bytes = min(swap_bytes, swap_limit_bytes if is_v2 else max(0, swap_limit_bytes - limit_bytes))
    cache_bytes = sum(pages.get(kind, 0) for kind in kinds)
    return limit_bytes, max(0, limit_bytes - used_bytes + cache_bytes + swap_bytes)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or if it does not limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < NO_LIMIT else None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line; none if it cannot be read."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1 and fields[1].isdigit()}
