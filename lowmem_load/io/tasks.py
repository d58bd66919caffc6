"""Runs tasks, several at a time, in threads or in the calling one. Knows nothing of reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_WAITING = 64
"""Most tasks that wait for the threads. So many, so that a thread need not wait for the calling one."""

MAX_DELAYED = 512
"""Most tasks that the calling thread puts off, to run them together. A read of MBs empties the processor's caches. If
one ran between each two parameters, loading 1.5 billion parameters would take 15 % more processor time."""

Task = Callable[[], None]


class Tasks:
    """Runs tasks in any order.

    Args:
        num_threads: tasks at a time. With 1, the calling thread runs them, unless `have_threads` is called.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._delayed: list[Task] = []  # for the calling thread
        self._changed = threading.Condition()  # guards what follows
        self._num_given = 0  # tasks that threads have, and have not ended
        self._num_enough = 0  # the calling thread goes on when only so many of them are left
        self._failed: Future[None] | None = None
        if num_threads > 1:
            self.have_threads(num_threads)

    def have_threads(self, num_threads: int) -> None:
        """Leave further tasks to so many threads; to the threads that there are, if any."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_threads, "lowmem_load-read")

    def run(self, task: Task) -> None:
        """Run a task now or later. `finish` waits for it.

        Raises:
            Exception: what an earlier task raised, as soon as it is known.
        """
        if self._pool is None:
            self._delayed.append(task)
            if len(self._delayed) >= MAX_DELAYED:
                self._run_delayed()
            return
        if self._num_given >= MAX_WAITING or self._failed is not None:
            self._wait(MAX_WAITING // 2)  # for several, so that the calling thread, too, gets much done at a time
        with self._changed:
            self._num_given += 1
        self._pool.submit(task).add_done_callback(self._note)

    def finish(self) -> None:
        """Wait until all tasks have ended. Raises what one of them raised."""
        self._run_delayed()
        self._wait(0)

    def close(self) -> None:
        """End the threads. Tasks that have not begun are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _run_delayed(self) -> None:
        tasks, self._delayed = self._delayed, []
        for task in tasks:
            task()

    def _wait(self, num_enough: int) -> None:
        """Wait until the threads have at most so many tasks left, or one has failed; raise that one's error."""
        with self._changed:
            self._num_enough = num_enough
            self._changed.wait_for(lambda: self._failed is not None or self._num_given <= num_enough)
        if self._failed is not None:
            self._failed.result()

    def _note(self, done: Future[None]) -> None:
        with self._changed:
            self._num_given -= 1
            if self._failed is None and not done.cancelled() and done.exception() is not None:
                self._failed = done
            if self._failed is not None or self._num_given <= self._num_enough:
                self._changed.notify()
