"""Reads of a checkpoint after its load has ended, for as long as somebody holds weights that are not read yet."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lowmem_load.io.executor import Executor, Tasks, read_whole
from lowmem_load.planning.expression import Expression, cast
from lowmem_load.planning.load_plan import Costs, PlannedFile, reading_order
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import Region


class Part(NamedTuple):
    """A region of an expression, and the flat memory that is to hold it, row-major, in the dtype of the memory."""

    name: str
    expression: Expression
    region: Region
    memory: torch.Tensor


class Reader:
    """Reads expressions of the files of one load. Closes the files when nobody refers to it any more.

    Any number of threads may use it; they take turns. Processes that are forked off have threads of their own.

    Raises CheckpointError if a file cannot be read, or has changed since the load: files are compared after each read.
    """

    def __init__(self, executor: Executor, files: Sequence[PlannedFile]) -> None:
        self.executor = executor
        self._lock, self._process = threading.RLock(), os.getpid()
        executor.sources.expect(files)
        self.closing = contextlib.ExitStack()
        """What happens when nobody refers to the reader any more."""
        self.closing.callback(executor.sources.close)
        self.closing.callback(executor.tasks.close)
        weakref.finalize(self, self.closing.close)

    def now(self, expression: Expression, _: str) -> torch.Tensor:
        """Return the value of an expression as a tensor in host memory."""
        with self._reading():
            return read_whole(self.executor, expression)

    def fill(self, parts: Sequence[Part], on_part: Callable[[], object] = int) -> Costs:
        """Fill the memory of all parts in the order of the files; return what that took.

        `on_part` is called as each is begun; it may raise, and so end the reading.
        """
        planner = Planner()
        fills = [
            planner.plan_fill(
                part.name, cast(part.expression, part.memory.dtype), part.region, on_host=part.memory.is_cpu
            )
            for part in parts
        ]
        order = sorted(range(len(parts)), key=lambda number: reading_order([fills[number]], parts[number].name))
        with self._reading():
            for number in order:
                self.executor.fill(fills[number], parts[number].memory, planner.values, planner.constants)
                on_part()
            self.executor.finish()
        return planner.costs(fills)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if self._process != os.getpid():  # its threads and the holder of its lock may be in the process it came from
            self._lock, self._process = threading.RLock(), os.getpid()
            self.executor.tasks = Tasks(1)
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            yield
            self.executor.sources.check_unchanged()
