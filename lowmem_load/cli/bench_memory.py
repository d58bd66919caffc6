"""Peak host memory of this process, memory free on the machine, and files in and out of the page cache."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable
from pathlib import Path

CHUNK_BYTES = 8 << 20
"""Bytes of one read into the page cache."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def high_water() -> int:
    """Return this process' peak resident memory in bytes, since its start or since the last `PeakMemory` began."""
    return int((PROC / "self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


class PeakMemory:
    """Context manager that measures the peak resident memory of the block, by the kernel's high-water mark.

    Attributes:
        peak_bytes: above the memory at the start of the block; set at its end.
    """

    def __init__(self) -> None:
        self.peak_bytes = self._start_bytes = 0

    def __enter__(self) -> PeakMemory:
        _return_freed_memory()
        (PROC / "self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
        self._start_bytes = high_water()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = high_water() - self._start_bytes


def _return_freed_memory() -> None:
    """Return freed memory to the kernel: the block would reuse it, and it would not be counted."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def available_bytes() -> int | None:
    """Return the memory free for new processes, within our cgroup's limit; None if the system does not say (macOS)."""
    try:
        fields = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def warm(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read every file once, so that the page cache holds it."""
    memory = bytearray(CHUNK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the kernel to drop every file from the page cache. This is a hint and needs no privileges."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
