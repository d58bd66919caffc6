"""Which process of which machine a rank is, whether it lives, and how far it is."""

from __future__ import annotations

import functools
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step is.

    Attributes:
        amount: grows as the step makes progress.
        detail: for people: "512.0 MiB read, model-00003.safetensors".
    """

    amount: int
    detail: str


@functools.cache
def pid_space() -> str:
    """Return what tells the process numbers that hold here from those of other machines and containers; "" if none."""
    try:
        return boot_id() and f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not told here
        return ""


def machine() -> str:
    """Return what tells this machine, as booted now, from others: files of equal version on it are the same file."""
    return boot_id() or platform.node()


@functools.cache
def boot_id() -> str:
    """Return what tells this boot of this machine from others; "" if the system does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def started(pid: int) -> str | None:
    """Return when a process of this machine started; "" if it has ended; None if that cannot be found out."""
    try:
        fields = _fields(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # no descriptor is free, say
        return None
    return "" if fields[0] in "ZX" else fields[19]  # state and starttime, see proc(5)


def computing() -> Callable[[], Progress]:
    """Return what says how far a step is that only computes, in the calling thread: the processor time of that."""
    native_id = threading.get_native_id()
    return lambda: _processor_time(native_id)


def _processor_time(native_id: int) -> Progress:
    try:
        fields = _fields(f"/proc/self/task/{native_id}/stat")
    except OSError:  # not Linux
        return Progress(int(time.process_time() * 10), "")
    return Progress((int(fields[11]) + int(fields[12])) // 10, "")  # utime and stime, in ticks of 10 ms, see proc(5)


def _fields(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
