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
from typing import NamedTuple

from tqdm.auto import tqdm

from lowmem_load.errors import ConfigError

# It has the resident pages second, and those of files and shared memory third (Linux
# `Documentation/filesystems/proc.rst`). It is read in half the time of /proc/self/status.
STATM = Path("/proc/self/statm")

PROGRESS = "LOWMEM_LOAD_PROGRESS"  # environment variable: 1 for a progress bar from the start on, 0 for none
LINE_S = 30.0  # between two states of the progress bar where stderr is not a terminal
DELAY_S = 3.0  # before the progress bar appears where it was not asked for


def no_callback(*_: object) -> None:
    """Stand for a callback that nobody has given."""


class Progress(NamedTuple):
    """How far a step is."""

    amount: int  # grows as the step makes progress
    detail: str  # for messages: "512.0 MiB read, model-00003.safetensors"


def computing() -> Callable[[], Progress]:
    """Return the progress of a step that only computes, in the calling thread: the processor time of the thread."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: Progress(int(10 * time.clock_gettime(clock)), "")


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

    Only rank 0 shows its own progress, in long loads: where stderr is not a terminal, every `LINE_S` seconds.
    `PROGRESS` asks for a bar, or for nothing.
    """
    text = os.environ.get(PROGRESS, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{PROGRESS}: the environment has {text!r}, expected 0 or 1")
    if rank != 0 or text == "0":
        yield no_callback
        return
    delay_s, interval_s = (DELAY_S, 0.1) if sys.stderr.isatty() else (LINE_S, LINE_S)
    if text == "1":
        delay_s, interval_s = 0.0, 0.1
    lock = threading.Lock()
    with tqdm(
        total=total,
        desc=f"{description} of rank 0",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=False,  # whatever TQDM_DISABLE says
        delay=delay_s,
        mininterval=interval_s,
        maxinterval=LINE_S,
    ) as bar:

        def update(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield update
