"""Host memory of this process while something is measured, memory that others can have, files in the page cache."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lowmem_load.phases import Memory, host_memory

SAMPLE_INTERVAL_S = 0.005
"""In so long about 30 MB are copied."""

CHUNK_BYTES = 8 << 20
"""That are read at a time into the page cache: enough for the speed of the disk."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(slots=True)
class MemoryUse:
    """The most resident memory in bytes, above its start: in all, anonymous, and of files and shared."""

    peak: int = 0
    peak_anon: int = 0
    peak_file: int = 0


def high_water() -> int:
    """Return the most resident memory, in bytes, that this process had since it began or a `MemorySampler` did."""
    return int((PROC / "self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def available_bytes() -> int | None:
    """Return the memory that new processes can have: of the machine, or of our cgroup where that is less.

    None where the system does not say (macOS).
    """
    try:
        fields = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


class MemorySampler:
    """Context manager that records this process' memory; `use()` gives the result after it has ended.

    The peak of the sum is exact: the kernel's high-water mark, reset on entry. The split into anonymous and
    file-backed comes from samples of a thread, which waits while other threads hold the interpreter lock.
    """

    def __init__(self) -> None:
        self._start, self._use = Memory(0, 0), MemoryUse()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        _settle_memory()
        (PROC / "self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
        self._start = host_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self._use.peak = high_water() - self._start.total_bytes

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        now, start, use = host_memory(), self._start, self._use
        use.peak_anon = max(use.peak_anon, now.anonymous_bytes - start.anonymous_bytes)
        use.peak_file = max(use.peak_file, now.file_bytes - start.file_bytes)

    def use(self) -> MemoryUse:
        """Return the recorded memory above the start."""
        return self._use


def _settle_memory() -> None:
    """Return freed memory to the kernel: kept by malloc it would be reused by what is measured and not be counted."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def warm(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read every file once, so that whatever is measured finds it in the page cache."""
    memory = bytearray(CHUNK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the kernel to drop the cached pages of every file (a hint, which needs no privileges)."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
