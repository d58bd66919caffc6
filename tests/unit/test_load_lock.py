"""The lock for loads of one process: who waits for it."""

from __future__ import annotations

import threading

from lowmem_load.hf.load_lock import load_lock


def begin(found: list[BaseException | None]) -> threading.Thread:
    """Return a thread that takes the lock; what comes of that is put into the list."""

    def take() -> None:
        try:
            with load_lock():
                found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def test_a_thread_waits_until_the_other_is_done() -> None:
    found: list[BaseException | None] = []
    with load_lock():
        with load_lock():
            thread = begin(found)
        thread.join(0.3)
        assert not found
    thread.join(60)
    assert found == [None]
