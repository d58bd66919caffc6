"""One thread loads or saves at a time, and whether this code runs as part of a load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from lowmem_load.errors import ConfigError
from lowmem_load.locks import ForkedLock
from lowmem_load.replaced import holding

PATIENCE_S = 30.0
"""Seconds that a thread waits for another one to build a model. The largest models take a second."""

constructors: list[object] = []
"""One object for each constructor of a model that runs in the thread that loads."""

_LOCK = ForkedLock()

_IS_LOADING: ContextVar[bool] = ContextVar("lowmem_load_is_loading", default=False)
"""Whether a load runs. Calls that the model's own code makes are part of it."""


@contextlib.contextmanager
def load_lock() -> Iterator[None]:
    """Have one thread load or save at a time. That thread may take the lock again.

    Raises ConfigError if the other thread stays in one constructor, which may wait for this thread.
    """
    before: list[object] = []
    while not _LOCK.acquire(PATIENCE_S):
        now = constructors[:1]
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


def is_loading() -> bool:
    """Return whether this code runs as part of a load of this package."""
    return _IS_LOADING.get()


def outermost() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is no part of the load in progress: it is handed to a handler like any other."""
    return holding(_IS_LOADING, False)


def inside_load() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is part of the load in progress."""
    return holding(_IS_LOADING, True)
