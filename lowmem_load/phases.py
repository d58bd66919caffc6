"""Phases of a load or a save: their seconds, the peak of host memory (from /proc), and the progress bar."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm.auto import tqdm

from lowmem_load.errors import ConfigError
from lowmem_load.text import size

STATM = Path("/proc/self/statm")
"""Has the resident pages second, those of files and shared memory third (Linux `Documentation/filesystems/proc.rst`).
Read in half the time of /proc/self/status."""

PROGRESS = "LOWMEM_LOAD_PROGRESS"
"""Environment variable: 1 for a progress bar from the start on, 0 for none."""

LINE_S = 30.0
"""Seconds between lines of progress where stderr is no terminal."""

DELAY_S = 3.0
"""Seconds before the progress bar appears where it was not asked for."""


def no_callback(*_: object) -> None:
    """Stand for a callback that nobody has given."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident host memory of this process, bytes. The kernel can reclaim what is file-backed."""

    anonymous_bytes: int
    file_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
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


@dataclass(slots=True, kw_only=True)
class Phases:
    """What a report says of phases. Make the report before the first of them.

    Attributes:
        seconds: wall seconds by phase, in order.
        peak_memory: resident host memory at the peak, above what it was when the report was made.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: Memory = Memory(0, 0)
    _start: Memory = field(default_factory=host_memory, repr=False)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the block to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.sample_memory()

    def sample_memory(self) -> None:
        """Raise the peak to the memory now where that is more."""
        now, start = host_memory(), self._start
        if now.total_bytes - start.total_bytes > self.peak_memory.total_bytes:
            self.peak_memory = Memory(now.anonymous_bytes - start.anonymous_bytes, now.file_bytes - start.file_bytes)


@contextlib.contextmanager
def progress_bar(total: int, description: str, rank: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to call, from any thread, with the bytes that were done since its last call.

    Only rank 0 shows its own progress: a bar in long loads where stderr is a terminal, else a line every `LINE_S`
    seconds. `PROGRESS` asks for a bar, or for nothing.
    """
    text = os.environ.get(PROGRESS, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{PROGRESS}: the environment has {text!r}, expected 0 or 1")
    is_wanted = {"0": False, "1": True}.get(text)
    if rank != 0 or is_wanted is False:
        yield lambda _: None
    elif is_wanted is None and not sys.stderr.isatty():
        yield _one_by_one(ProgressLines(total, description).update)
    else:
        with tqdm(
            total=total,
            desc=f"{description} of rank 0",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=False,  # whatever TQDM_DISABLE says
            delay=0 if is_wanted else DELAY_S,
        ) as bar:
            yield _one_by_one(bar.update)


def _one_by_one(update: Callable[[int], object]) -> Callable[[int], object]:
    lock = threading.Lock()

    def count(num_bytes: int) -> None:
        with lock:
            update(num_bytes)

    return count


class ProgressLines:
    """Progress for a log: a line on stderr every `LINE_S` seconds."""

    def __init__(self, total: int, description: str) -> None:
        self._total, self._description, self._done = total, description, 0
        self._start_s = self._last_s = time.monotonic()

    def update(self, num_bytes: int) -> None:
        """Count bytes that were done."""
        self._done += num_bytes
        now_s = time.monotonic()
        if now_s - self._last_s < LINE_S or not self._done:
            return
        self._last_s = now_s
        rate = self._done / (now_s - self._start_s)
        left_s = max(0, self._total - self._done) / rate
        done = f"{size(self._done)} of {size(self._total)}, {size(rate)}/s, about {left_s:.0f} s left"
        sys.stderr.write(f"lowmem_load: {self._description} of rank 0: {done}\n")
        sys.stderr.flush()
