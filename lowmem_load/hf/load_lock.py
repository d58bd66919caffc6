"""The lock that lets one thread of a process load or save at a time: ranks take part in one load at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from lowmem_load.errors import ConfigError

PATIENCE_S = 30.0
"""Seconds that a thread waits for a model to be built elsewhere; that takes a second for the largest ones."""

_LOCK = threading.RLock()
_BUILDING: list[object] = []  # one object for each constructor that runs in the thread that has the lock


@contextlib.contextmanager
def load_lock() -> Iterator[None]:
    """Hold the lock of this process for loads and saves of lowmem_load. A thread may hold it several times.

    Raises:
        ConfigError: the thread that has it has been in the constructor of one model for long. A constructor that starts
            a thread which loads, and waits for it, would wait for ever.
    """
    before: list[object] = []
    while not _LOCK.acquire(timeout=PATIENCE_S):
        now = _BUILDING[:1]
        if now and now == before:
            raise ConfigError(
                "another thread of this process is loading, and has been in the constructor of its model for more than "
                f"{PATIENCE_S:.0f} s; if that constructor waits for this thread, let it load without a thread"
            )
        before = now
    try:
        yield
    finally:
        _LOCK.release()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Say that the constructor of a model runs, by whoever has the lock."""
    _BUILDING.append(object())
    try:
        yield
    finally:
        _BUILDING.pop()
