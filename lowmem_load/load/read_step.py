"""The step in which ranks read: what a load, the fill of a lazy model and a resume do around `fill`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from lowmem_load.distributed.peers import Progress
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.files.executor import Executor
from lowmem_load.phases import Phases, progress_bar
from lowmem_load.text import share

SAMPLE_S = 5e-3
"""Between two samples of the memory in use, which take 10 to 60 us each."""


class Reading:
    """What one rank has read and made within `reading`."""

    def __init__(self, ranks: RankGroup, executors: Sequence[Executor], needed_bytes: int, reports: Sequence[Phases]):
        self._ranks, self._executors, self._needed_bytes, self._reports = ranks, executors, needed_bytes, reports
        self._read_before, self._num_parts, self._next_sample_s = self._read_bytes(), 0, 0.0
        self.num_exchanges: Callable[[], int] = lambda: 0  # with other ranks, which is progress, too

    def on_part(self) -> None:
        """Note that a part of memory is there; raise if another rank has failed."""
        self._num_parts += 1
        self._ranks.check()
        if (now_s := time.perf_counter()) >= self._next_sample_s:
            self._next_sample_s = now_s + SAMPLE_S
            for report in self._reports:
                report.sample_memory()

    def progress(self) -> Progress:
        """Return how far this rank is. In any thread."""
        read_bytes = self._read_bytes() - self._read_before
        path = next((executor.stats.path for executor in reversed(self._executors) if executor.stats.path), "no file")
        read = f"{share(read_bytes, self._needed_bytes)} read, last from {path}"
        amount = read_bytes + self._num_parts + self.num_exchanges()
        return Progress(amount, f"{self._num_parts} tensors begun, {read}")

    def _read_bytes(self) -> int:
        return sum(executor.stats.read_bytes for executor in self._executors)


@contextlib.contextmanager
def reading(
    ranks: RankGroup,
    name: str,
    executors: Sequence[Executor],
    needed_bytes: int,
    reports: Sequence[Phases] = (),
    *,
    bar: str,
    title: str = "reading",
) -> Iterator[Reading]:
    """A step in which executors read for parts of memory, with a progress bar. Collective.

    Reads end when another rank fails.
    """
    state = Reading(ranks, executors, needed_bytes, reports)
    with (
        ranks.step(title, name=name, progress=state.progress),
        progress_bar(needed_bytes, bar, ranks.rank) as update,
        contextlib.ExitStack() as after,
    ):

        def on_bytes(num_bytes: int) -> None:
            update(num_bytes)
            ranks.check()

        for executor in executors:
            after.callback(_watch, executor, executor.on_bytes, executor.sources.on_wait)
            _watch(executor, on_bytes, ranks.check)
        yield state


def _watch(executor: Executor, on_bytes: Callable[[int], object], on_wait: Callable[[], object]) -> None:
    executor.on_bytes, executor.sources.on_wait = on_bytes, on_wait
