"""What the garbage collector goes through during a load, and what describing leaves behind.

Describing makes millions of small objects that all stay: it would go through them time and again. Nothing large depends
on it: values of parameters are freed by hand, see `describe/initialise.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

YOUNG = 50_000
"""New objects that set the collector off during a load, instead of 700: a model of 250 parameters makes it run 18 times
then, which takes 3 ms, and finds nothing."""


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


@contextlib.contextmanager
def heap_set_aside() -> Iterator[Callable[[], None]]:
    """Inside, the collector looks at what was made inside: not at all that torch and transformers made when imported.

    Going through that takes 0.2 s, and the new objects of one small load are enough to set it off. Where somebody has
    frozen objects (`gc.freeze`), nothing is done: there is no telling theirs from ours afterwards.

    Yields:
        Sets aside what was made inside so far, too.
    """
    if gc.get_freeze_count():
        yield lambda: None
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    if thresholds[0]:  # 0 turns it off
        gc.set_threshold(max(thresholds[0], YOUNG), *thresholds[1:])
    try:
        yield gc.freeze
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def give_back_freed() -> None:
    """Let the C library return what is free in its heaps; nothing where it is not glibc.

    Headers and lists that are gone leave 10 MiB there of a hundred thousand tensors.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
