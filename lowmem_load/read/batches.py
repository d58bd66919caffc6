"""Small reads, many at a time: each by itself costs more in calls than in bytes.

Those that lie one behind the other in a file are one call of its source, which fills many buffers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lowmem_load.planning.reads import Read
from lowmem_load.read.scatter import scatter_elements

SMALL_BYTES = 64 << 10
"""Of the largest read that waits for others: to copy so much takes as long as to have a thread do it."""

BATCH_BYTES = 1 << 20
"""Of a batch: the least that a thread's staging buffer has."""

MAX_READS = 512
"""Of a batch: system calls fill up to 1024 buffers."""


class SmallRead(NamedTuple):
    """One of the reads of a step, and the memory that its elements go to.

    Attributes:
        step: of a plan.
        first: element of its tensor at which the read starts.
        shift: elements by which its scatter is moved on.
        destination: flat host memory.
    """

    step: Read
    first: int
    shift: int
    destination: torch.Tensor


@dataclass(slots=True)
class Batch:
    """Reads that one thread will do.

    Attributes:
        reads: in the order in which they came.
        nbytes: of all of them.
        needed_bytes: those that are wanted of what is read.
    """

    reads: list[SmallRead] = field(default_factory=list)
    nbytes: int = 0
    needed_bytes: int = 0

    def add(self, step: Read, first: int, shift: int, destination: torch.Tensor) -> bool:
        """Take one more; see `SmallRead`. Return whether there may be no room for another."""
        nbytes = step.numel * step.tensor.dtype.itemsize
        self.reads.append(SmallRead(step, first, shift, destination))
        self.nbytes += nbytes
        self.needed_bytes += nbytes if step.is_direct else step.needed_bytes_each
        # Room for another is also for what lies between reads of different dtypes.
        return self.nbytes > BATCH_BYTES - 2 * SMALL_BYTES or len(self.reads) == MAX_READS

    def runs(self) -> Iterator[list[SmallRead]]:
        """Yield the reads again, those together of which each begins in the file where the one before ends."""
        run: list[SmallRead] = []
        path, end = "", 0
        for read in self.reads:
            tensor, itemsize = read.step.tensor, read.step.tensor.dtype.itemsize
            start = tensor.start + read.first * itemsize
            if run and (start != end or tensor.path != path):
                yield run
                run = []
            run.append(read)
            path, end = tensor.path, start + read.step.numel * itemsize
        if run:
            yield run


def memory_of(run: Sequence[SmallRead], staging: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Return where each read of a run puts its elements: to their destination, or one behind the other in a buffer.

    Args:
        run: of a batch.
        staging: returns the buffer of the calling thread, of so many bytes.
    """
    memory, used = [], 0
    for step, _, shift, destination in run:
        if step.is_direct:
            start = step.scatter.destination_start + shift
            whole = start == 0 and step.numel == destination.numel()
            memory.append(destination if whole else destination.narrow(0, start, step.numel))
        else:
            itemsize = step.tensor.dtype.itemsize
            used = -(-used // itemsize) * itemsize
            end = used + step.numel * itemsize
            memory.append(staging(BATCH_BYTES)[used:end].view(step.tensor.dtype))
            used = end
    return memory


def place(run: Sequence[SmallRead], memory: Sequence[torch.Tensor]) -> None:
    """Move what was read to `memory_of(run)` to where it belongs, if it is not there."""
    for (step, _, shift, destination), values in zip(run, memory, strict=True):
        if not step.is_direct:
            scatter_elements(step.scatter, values, destination, shift)
