"""Peak host memory of a block, split into anonymous and file-backed memory; and the memory that is free."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lowmem_load.phases import Memory, host_memory

SAMPLE_INTERVAL_S = 0.005
"""Seconds. A load copies about 30 MB in this time."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def high_water() -> int:
    """Return this process' peak resident memory in bytes, since its start or since the last `PeakMemory` began."""
    return int((PROC / "self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


class PeakMemory:
    """Context manager that measures the peak resident memory of the block: `peak_bytes` above its start."""

    def __init__(self) -> None:
        self.peak_bytes = self._start_bytes = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)  # the block would reuse freed memory, and it would not be counted
        (PROC / "self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
        self._start_bytes = high_water()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = high_water() - self._start_bytes


def available_bytes() -> int | None:
    """Return the memory free for new processes in this container; None if the system does not say (macOS)."""
    fields = _fields(PROC / "meminfo")
    if "MemAvailable:" not in fields:
        return None
    available, limit = fields["MemAvailable:"] << 10, _memory_limit()
    if limit is not None:
        pages = _fields(CGROUP / "memory.stat")
        of_files = pages.get("active_file", 0) + pages.get("inactive_file", 0)  # the kernel gives them back
        available = min(available, limit - int((CGROUP / "memory.current").read_text()) + of_files)
    return available


def _memory_limit() -> int | None:
    """Return the bytes that this container may use; None without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}
    except OSError:
        return {}


@contextlib.contextmanager
def in_cgroup(name: str, limit_bytes: int) -> Iterator[Callable[[], int]]:
    """Limit what this process, and others within such a block of this name, take of memory from now on.

    Yields a function that returns the bytes of page cache among it. Raises OSError where no cgroup can be made, which
    needs root. What a process had before stays with its other cgroup.
    """
    is_v2 = (CGROUP / "cgroup.controllers").exists()
    top, kind = (CGROUP, "") if is_v2 else (CGROUP / "memory", "memory")
    groups = [line.split(":", 2) for line in (PROC / "self/cgroup").read_text().splitlines()]
    before = next(path for _, controllers, path in groups if controllers == kind)
    (folder := top / name).mkdir(exist_ok=True)
    try:
        (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield lambda: _fields(folder / "memory.stat")["file" if is_v2 else "cache"]
    finally:
        (top / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # another process is in it
            folder.rmdir()


@dataclass(slots=True)
class MemoryUse:
    """Peak resident memory in bytes above its start: total, anonymous, and file-backed with shared memory."""

    peak: int = 0
    peak_anon: int = 0
    peak_file: int = 0


class MemorySampler(PeakMemory):
    """Measures the peak as `PeakMemory` does, and samples the split in a thread. `use` holds the result.

    The thread waits while other threads hold the interpreter lock, so the split is less exact than the total.
    """

    def __init__(self) -> None:
        super().__init__()
        self.use, self._start = MemoryUse(), Memory(0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        super().__enter__()
        self._start = host_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        super().__exit__()
        self.use.peak = self.peak_bytes

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        now, start, use = host_memory(), self._start, self.use
        use.peak_anon = max(use.peak_anon, now.anonymous_bytes - start.anonymous_bytes)
        use.peak_file = max(use.peak_file, now.file_bytes - start.file_bytes)
