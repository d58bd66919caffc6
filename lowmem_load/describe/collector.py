"""Describing makes millions of small objects that all stay: the garbage collector would go through them time and again.

Nothing large depends on it: values of parameters are freed by hand, see `describe/initialise.py`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Inside, cyclic garbage is left where it is."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
