"""What was there before a load is not gone through during it, and is afterwards again."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest

from lowmem_load.describe.collector import YOUNG, give_back_freed, heap_set_aside
from lowmem_load.phases import host_memory


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


def test_only_what_is_made_inside_is_collected_inside() -> None:
    before = weakref.ref(Node())
    with heap_set_aside():
        inside = weakref.ref(Node())
        gc.collect()
        assert inside() is None
        assert before() is not None
    gc.collect()
    assert before() is None


def test_what_was_made_inside_can_be_set_aside_too() -> None:
    with heap_set_aside() as set_aside:
        inside = weakref.ref(Node())
        set_aside()
        gc.collect()
        assert inside() is not None
    gc.collect()
    assert inside() is None


@pytest.mark.parametrize("first", [700, 10**6, 0])
def test_the_collector_runs_less_often_inside_but_not_more(first: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(first, *before[1:])
    try:
        with heap_set_aside():
            assert gc.get_threshold()[0] == (max(first, YOUNG) if first else 0)
        assert gc.get_threshold() == (first, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with heap_set_aside() as set_aside:
            inside = weakref.ref(Node())
            set_aside()
            gc.collect()
            assert inside() is None, "it would stay so"
        assert gc.get_freeze_count() >= count > 0
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_what_is_free_in_the_heap_goes_back() -> None:
    size, libc = 64 << 10, ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(size) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps what is below it
        libc.free(block)
    before = host_memory().anonymous_bytes
    give_back_freed()
    libc.free(blocks[-1])
    assert before - host_memory().anonymous_bytes > 50 << 20
