"""Phases of a load or a save: when each began and ended, and the most host memory that was seen. Reads /proc."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STATM = Path("/proc/self/statm")
"""Says the same as /proc/self/status in half the time: pages that are resident, and which of them are of files or
shared memory, second and third (Linux `Documentation/filesystems/proc.rst`)."""

EPOCH_S = time.time() - time.perf_counter()
"""Seconds since 1970 at the zero of `time.perf_counter`: what was timed here can be laid beside other ranks'."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident host memory of this process, bytes. Anonymous is what counts; file-backed can be reclaimed."""

    anonymous_bytes: int
    file_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together: what the kernel counts as resident."""
        return self.anonymous_bytes + self.file_bytes


def host_memory() -> Memory:
    """Return the resident memory now; zeros where the system has no /proc (macOS)."""
    try:
        with STATM.open("rb", buffering=0) as file:  # it is read often
            _, resident, of_files, *_ = file.read().split()
    except (OSError, ValueError):
        return Memory(0, 0)
    file_bytes = int(of_files) * mmap.PAGESIZE
    return Memory(int(resident) * mmap.PAGESIZE - file_bytes, file_bytes)


@dataclass(frozen=True, slots=True)
class Span:
    """One phase, once: seconds since 1970, and the resident host memory at its end, bytes."""

    phase: str
    begin_s: float
    end_s: float
    memory_bytes: int


@dataclass(slots=True, kw_only=True)
class Phases:
    """What a report says of phases.

    Attributes:
        seconds: wall seconds by phase, in order.
        spans: each time that a phase went on.
        start_memory, peak_memory: resident host memory before the first phase and the most that was seen.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    start_memory: Memory = Memory(0, 0)
    peak_memory: Memory = Memory(0, 0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the block to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            now = self.sample_memory()
            self.spans.append(Span(name, EPOCH_S + start, EPOCH_S + end, now.total_bytes))

    def sample_memory(self) -> Memory:
        """Raise the peak to the memory now where that is more; return the memory now."""
        now = host_memory()
        if now.total_bytes > self.peak_memory.total_bytes:
            self.peak_memory = now
        return now


@dataclass(slots=True)
class FileReads:
    """What was read of one file.

    Attributes:
        read_bytes, num_reads: of the file; small reads that lie one behind the other are one.
        seconds: of all reads together; more than one may go on at a time.
        begin_s, end_s: of the first and of the last read, in seconds since 1970.
        sizes: how many reads fetched at most so many bytes, a power of two, but more than half of it.
    """

    read_bytes: int = 0
    num_reads: int = 0
    seconds: float = 0.0
    begin_s: float = math.inf
    end_s: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, nbytes: int, begin_s: float, end_s: float) -> None:
        """Count one read."""
        self.read_bytes, self.num_reads = self.read_bytes + nbytes, self.num_reads + 1
        self.seconds += end_s - begin_s
        self.begin_s, self.end_s = min(self.begin_s, begin_s), max(self.end_s, end_s)
        at_most = 1 << (nbytes - 1).bit_length()
        self.sizes[at_most] = self.sizes.get(at_most, 0) + 1
