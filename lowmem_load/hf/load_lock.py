"""One thread loads or saves at a time, and whether this code runs as part of a load."""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar

from lowmem_load.replaced import holding

_LOCK = threading.RLock()

_IS_LOADING: ContextVar[bool] = ContextVar("lowmem_load_is_loading", default=False)
"""Whether a load runs. Calls that the model's own code makes are part of it."""


def load_lock() -> contextlib.AbstractContextManager[bool]:
    """Return the lock that one thread holds while it loads or saves. That thread may take it again."""
    return _LOCK


def is_loading() -> bool:
    """Return whether this code runs as part of a load of this package."""
    return _IS_LOADING.get()


def outermost() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is no part of the load in progress: it is handed to a handler like any other."""
    return holding(_IS_LOADING, False)


def inside_load() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is part of the load in progress."""
    return holding(_IS_LOADING, True)
