"""Tasks: done by threads or by the calling one, all of them, and failures heard of in time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowmem_load.io import executor as executor_module
from lowmem_load.io.executor import Tasks

LONG_S = 20.0


def failing() -> None:
    raise ValueError("it failed")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_tasks_are_done_when_finish_returns(num_threads: int) -> None:
    done: list[int] = []
    tasks = Tasks(num_threads)
    for number in range(200):
        tasks.run(lambda number=number: done.append(number))  # type: ignore[misc]
    tasks.finish()
    assert sorted(done) == list(range(200))
    tasks.run(lambda: done.append(200))
    tasks.finish()
    assert done[-1] == 200
    tasks.close()


def test_the_calling_thread_does_what_threads_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MAX_DELAYED", 2)
    by: list[threading.Thread] = []
    tasks = Tasks(1)

    def note() -> None:
        by.append(threading.current_thread())

    tasks.run(note)
    assert not by
    tasks.run(note)
    tasks.run(note)
    tasks.have_threads(2)
    tasks.run(note)
    tasks.finish()
    tasks.close()
    assert [each is threading.current_thread() for each in by].count(True) == 3
    assert len(by) == 4


def test_only_so_many_tasks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MAX_WAITING", 4)
    go_on, given = threading.Event(), []
    tasks = Tasks(2)

    def give() -> None:
        for number in range(10):
            tasks.run(lambda: go_on.wait(LONG_S) and None)
            given.append(number)

    giver = threading.Thread(target=give)
    giver.start()
    giver.join(0.2)
    assert len(given) == 4
    go_on.set()
    giver.join(LONG_S)
    tasks.finish()
    tasks.close()
    assert len(given) == 10


@pytest.mark.parametrize("num_threads", [1, 2])
def test_finish_raises_what_a_task_has_raised(num_threads: int) -> None:
    tasks = Tasks(num_threads)
    tasks.run(failing)
    with pytest.raises(ValueError, match="it failed"):
        tasks.finish()
    tasks.close()


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_failure_is_heard_of_while_earlier_tasks_go_on(is_waiting: bool) -> None:
    go_on, tasks = threading.Event(), Tasks(2)
    tasks.run(lambda: go_on.wait(LONG_S) and None)
    for _ in range(executor_module.MAX_WAITING - 2):
        tasks.run(lambda: None)

    def fail() -> None:
        threading.Event().wait(0.2 if is_waiting else 0.0)  # once the calling thread waits, or before
        failing()

    tasks.run(fail)
    threading.Event().wait(0.0 if is_waiting else 0.2)
    begin_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(ValueError, match="it failed"):
            tasks.finish()
        with pytest.raises(ValueError, match="it failed"):
            tasks.run(lambda: None)
    assert time.monotonic() - begin_s < LONG_S / 2
    go_on.set()
    tasks.close()


def test_an_interrupt_while_a_task_is_given_away_does_not_hang_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(lambda: None)
    closing = threading.Thread(target=tasks.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
