"""Host memory of this process, over the time of a load or whatever else is measured; how much there is; the page cache.

It needs nothing but the standard library, so that earlier versions of the package can be measured by it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

SAMPLE_INTERVAL_S = 0.005
"""In so long about 30 MB are copied. A sample takes 2 us where the processor's caches are warm, 30 us beside copies."""

CHUNK_BYTES = 8 << 20
"""That are read at a time into the page cache: enough for the speed of the disk."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


class Rss(NamedTuple):
    """Resident memory of this process in bytes; `file` includes shared memory (RssFile + RssShmem)."""

    anon: int
    file: int
    high_water: int


@dataclass(slots=True)
class MemoryUse:
    """Memory in bytes above its start; samples are (seconds, anon, file)."""

    start_rss: int
    peak: int
    peak_anon: int
    peak_file: int
    anon_at_peak: int
    file_at_peak: int
    end_anon: int
    end_file: int
    max_sample_gap_s: float
    samples: list[tuple[float, int, int]]


def read_rss() -> tuple[Rss, int]:
    """Return the resident memory of this process, and how many bytes of /proc were read to learn it."""
    text = (PROC / "self/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")}
    return Rss(kib["RssAnon"] * 1024, (kib["RssFile"] + kib["RssShmem"]) * 1024, kib["VmHWM"] * 1024), len(text)


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
    file-backed comes from samples of a thread, which waits while other threads hold the interpreter lock; the
    longest gap between samples is recorded.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start_s = 0.0
        self._high_water = 0
        self._statm = -1
        self.proc_bytes_read = 0

    def __enter__(self) -> MemorySampler:
        _settle_memory()
        (PROC / "self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
        self._statm = os.open(PROC / "self/statm", os.O_RDONLY)
        self.start_s = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        os.close(self._statm)
        rss, num_bytes = read_rss()
        self.proc_bytes_read += num_bytes
        self._high_water = rss.high_water

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        # Pages that are resident, and those of them that are of files or shared: a twentieth of what `read_rss` costs.
        text = os.pread(self._statm, 128, 0)
        self.proc_bytes_read += len(text)
        _, resident, of_files, *_ = map(int, text.split())
        anon, file = (resident - of_files) * mmap.PAGESIZE, of_files * mmap.PAGESIZE
        self._samples.append((time.perf_counter() - self.start_s, anon, file))

    def use(self) -> MemoryUse:
        """Return the recorded memory above the start."""
        _, start_anon, start_file = self._samples[0]
        above = [(round(t, 4), anon - start_anon, file - start_file) for t, anon, file in self._samples]
        _, anon_at_peak, file_at_peak = max(above, key=lambda sample: sample[1] + sample[2])
        return MemoryUse(
            start_rss=start_anon + start_file,
            peak=self._high_water - start_anon - start_file,
            peak_anon=max(anon for _, anon, _ in above),
            peak_file=max(file for _, _, file in above),
            anon_at_peak=anon_at_peak,
            file_at_peak=file_at_peak,
            end_anon=above[-1][1],
            end_file=above[-1][2],
            max_sample_gap_s=max((b[0] - a[0] for a, b in itertools.pairwise(above)), default=0.0),
            samples=above,
        )


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
