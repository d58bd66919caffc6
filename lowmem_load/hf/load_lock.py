"""The lock by which one thread of a process loads or saves at a time: all ranks take part in one load at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from lowmem_load.errors import ConfigError

PATIENCE_S = 30.0
"""Seconds that a thread waits for another one to build a model. The largest models take a second."""

_LOCK = threading.RLock()
_BUILDING: list[object] = []
"""One object for each constructor of a model that runs in the thread with the lock."""


@contextlib.contextmanager
def load_lock() -> Iterator[None]:
    """Hold the lock. The thread that has it may take it again.

    Raises:
        ConfigError: the thread that has it has been in the constructor of one model for `PATIENCE_S`. That constructor
            may wait for this thread.
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
    """Inside, the constructor of a model runs in the thread with the lock."""
    _BUILDING.append(object())
    try:
        yield
    finally:
        _BUILDING.pop()
