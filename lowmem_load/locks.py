"""Locks in processes that are forked off: there the threads that had them at the fork do not exist."""

from __future__ import annotations

import os
import threading
import weakref

_LOCKS: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


class ForkedLock:
    """A lock that its thread may take again. After a fork the child has what the forking thread had, and no more.

    What a lock guards has to be sound in the child whenever another thread was at work on it in the parent.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def acquire(self, timeout_s: float = -1) -> bool:
        """Return whether this thread has the lock now, after waiting for it, by default as long as it takes."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free unless this thread has the lock."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
