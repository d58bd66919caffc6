"""What was there before a load is not gone through during it, and is afterwards again."""

from __future__ import annotations

import gc
import weakref

from lowmem_load.describe.collector import heap_set_aside


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


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with heap_set_aside():
            pass
        assert gc.get_freeze_count() >= count > 0
    finally:
        gc.unfreeze()
