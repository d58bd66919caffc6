"""Tasks that threads do, or the calling one, several at a time. Knows nothing of reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_WAITING = 64
"""Tasks that are given to threads ahead, lest these wait for the calling one."""

MAX_KEPT = 512
"""Tasks that the calling thread does together. What it does in between takes twice as long where a read of MBs has left
the processor's caches cold: loading 1.5 billion parameters with one thread takes 15 % more processor time then."""

Task = Callable[[], None]


class Tasks:
    """Has tasks done in any order.

    Args:
        num_threads: that do them; 1 for the calling thread, `MAX_KEPT` at a time, unless
            `have_threads` is called.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._kept: list[Task] = []  # for the calling thread
        self._changed = threading.Condition()  # guards what follows
        self._num_given = 0  # to threads, and not done
        self._num_enough = 0  # of these, for the calling thread to go on
        self._failed: Future[None] | None = None
        if num_threads > 1:
            self.have_threads(num_threads)

    def have_threads(self, num_threads: int) -> None:
        """Leave tasks to threads from now on; to those that there are, if any."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_threads, "lowmem_load-read")

    def run(self, task: Task) -> None:
        """Do a task, or have it done; `finish` tells when.

        Raises:
            Exception: what an earlier task has raised, at once, whatever others are at.
        """
        if self._pool is None:
            self._kept.append(task)
            if len(self._kept) >= MAX_KEPT:
                self._run_kept()
            return
        if self._num_given >= MAX_WAITING or self._failed is not None:
            self._wait(MAX_WAITING // 2)  # not for one: so that the calling thread does a good deal at a time, too
        with self._changed:
            self._num_given += 1
        self._pool.submit(task).add_done_callback(self._note)

    def finish(self) -> None:
        """Wait until all tasks so far are done. Raises what one of them has raised."""
        self._run_kept()
        self._wait(0)

    def close(self) -> None:
        """End the threads; tasks that were not begun are left out."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _run_kept(self) -> None:
        tasks, self._kept = self._kept, []
        for task in tasks:
            task()

    def _wait(self, num_enough: int) -> None:
        """Wait until no more than so many tasks are left to threads, or one has failed; raise that one's error."""
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
