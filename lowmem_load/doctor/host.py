"""The machine: memory, limits, shared memory, tools that compile."""

from __future__ import annotations

import ctypes.util
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding
from lowmem_load.quantities import size

MIN_FILES = 1024
"""Open files that a process should be allowed: a load keeps 96 open, DataLoaders and NCCL many more."""

MIN_SHARED_BYTES = 1 << 30
"""Of /dev/shm: what DataLoader's workers and NCCL share lies there."""

PROC, SYS = Path("/proc"), Path("/sys")


def check_host() -> Iterator[Finding]:
    """Yield what is to be said of the machine. What cannot be found out here is left out."""
    yield from _memory()
    yield from _limits()
    yield from _shared_memory()
    yield from _tools()


def _memory() -> Iterator[Finding]:
    fields = {line.split(":")[0]: line.split()[1] for line in _text(PROC / "meminfo").splitlines() if ":" in line}
    if "MemAvailable" not in fields:
        return
    free, cached = int(fields["MemAvailable"]) << 10, int(fields.get("Cached", 0)) << 10
    yield Finding(
        "memory", OK, f"{size(free)} of {size(int(fields['MemTotal']) << 10)} are free; {size(cached)} cache files"
    )
    limit = _cgroup_limit()
    if limit is not None and limit < free:
        yield Finding(
            "memory",
            NOTE,
            f"this container may use {size(limit)}",
            "plan with --host-memory of that size; the page cache of what is read counts towards it and is given back",
        )


def _cgroup_limit() -> int | None:
    for path in ("fs/cgroup/memory.max", "fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(SYS / path).strip()
        if text.isdigit():
            return int(text)
    return None


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MIN_FILES:
        yield Finding("limits", NOTE, f"a process may open {files} files", f"ulimit -n {MIN_FILES} or more")
    else:
        yield Finding("limits", OK, f"a process may open {files} files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        yield Finding(
            "limits",
            NOTE,
            f"a process may lock {size(locked)}",
            "ulimit -l unlimited (docker run --ulimit memlock=-1), for offload to nvme and for RDMA",
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield Finding("limits", PROBLEM, f"addresses are limited to {size(space)}", "ulimit -v unlimited")


def _shared_memory() -> Iterator[Finding]:
    if not os.path.isdir("/dev/shm"):
        return
    free = shutil.disk_usage("/dev/shm").free
    if free < MIN_SHARED_BYTES:
        advice = "docker run --shm-size 16g, or --ipc host: workers of DataLoader and NCCL share memory there"
        yield Finding("shared memory", NOTE, f"/dev/shm has {size(free)} free", advice)
    else:
        yield Finding("shared memory", OK, f"/dev/shm has {size(free)} free")


def _tools() -> Iterator[Finding]:
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        advice = "install them, or put the environment's bin on PATH: DeepSpeed compiles its ops at their first use"
        yield Finding("compiler", NOTE, f"{' and '.join(missing)} cannot be found", advice)
    else:
        yield Finding("compiler", OK, "g++ and ninja are there, with which DeepSpeed compiles its ops")
    if ctypes.util.find_library("aio") is None and not _on_library_path("libaio.so"):
        advice = "apt install libaio-dev, or dnf install libaio-devel: needed for offload to nvme, else for nothing"
        yield Finding("libaio", NOTE, "cannot be found", advice)
    else:
        yield Finding("libaio", OK, "is there, for offload to nvme")


def _on_library_path(prefix: str) -> bool:
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if os.path.isdir(folder)]
    return any(name.startswith(prefix) for folder in folders for name in os.listdir(folder))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
