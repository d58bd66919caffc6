"""The lock for loads of one process: who waits for it, and who gives up."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

from lowmem_load.errors import ConfigError
from lowmem_load.models import active as lock
from lowmem_load.models.active import constructors, load_lock


@contextlib.contextmanager
def building() -> Iterator[None]:
    constructors.append(object())
    yield
    constructors.pop()


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


def test_a_thread_waits_until_the_other_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.3)
    found: list[BaseException | None] = []
    with load_lock():
        with load_lock():
            thread = begin(found)
        for _ in range(40):  # constructors, none of which takes long
            with building():
                thread.join(0.02)
        assert not found
    thread.join(60)
    assert found == [None]


def test_a_thread_does_not_wait_for_a_constructor_that_may_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.05)
    found: list[BaseException | None] = []
    with load_lock(), building():
        thread = begin(found)
        thread.join(60)
    [error] = found
    assert isinstance(error, ConfigError)
    assert "has been in the constructor of its model" in str(error)
    with load_lock():
        pass
