"""Stands in for a function of somebody else's while a block lasts. Part of the transformers seam, see `loader.py`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a function, but not for threads that run already: one of them may be in the middle of an ordinary load.

    A load that begins later in another thread waits for its turn, see `hf/intercept.py`.
    """
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]
    ordinary = getattr(owner, name)
    others = set(threading.enumerate()) - {threading.current_thread()}  # not by number: numbers are given again

    @functools.wraps(value)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (ordinary if threading.current_thread() in others else value)(*args, **kwargs)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
