"""Small reads, many at a time: each by itself costs more in calls than in bytes.

Those that lie one behind the other in a file are one call of its source, which fills many buffers at once.

[Note: addresses] Of a tensor of a few kilobytes, a view of it as bytes costs more than its bytes do. So what is kept of
the memory is its address, checked against the tensor, and what lies one behind the other there too is one buffer. The
tensors stay with the batch until they are filled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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
        path: of the file.
        start: byte of the file.
        nbytes: of the read.
        step: of a plan.
        shift: elements by which its scatter is moved on.
        destination: flat contiguous host memory.
    """

    path: str
    start: int
    nbytes: int
    step: Read
    shift: int
    destination: torch.Tensor


_PLACE_IN_FILE = itemgetter(SmallRead._fields.index("path"), SmallRead._fields.index("start"))


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

    def add(self, step: Read, first: int, shift: int, nbytes: int, destination: torch.Tensor) -> bool:
        """Take one more, from element `first` of its tensor on; see `SmallRead`. Return whether it is the last."""
        tensor = step.tensor
        start = tensor.start + first * tensor.dtype.itemsize
        self.reads.append(SmallRead(tensor.path, start, nbytes, step, shift, destination))
        self.nbytes += nbytes
        self.needed_bytes += nbytes if step.is_direct else step.needed_bytes_each
        # Room for another is also for what lies between reads of different dtypes.
        return self.nbytes > BATCH_BYTES - 2 * SMALL_BYTES or len(self.reads) == MAX_READS

    def fill(self, staging: torch.Tensor, read: Callable[[Sequence[SmallRead], Sequence[memoryview]], None]) -> None:
        """Do all reads.

        Args:
            staging: `BATCH_BYTES` of the calling thread, uint8.
            read: fills the buffers of a run, one after the other, with its bytes of the file.

        Raises:
            ValueError: see `_addresses_of`.
            CheckpointError: of `read`.
        """
        for run in self._runs():
            addresses = _addresses_of(run, staging)
            read(run, _buffers_at(addresses, run))
            _place(run, addresses, staging)

    def _runs(self) -> Iterator[list[SmallRead]]:
        """Yield the reads by their place in the files, those together that follow each other there without a gap."""
        run: list[SmallRead] = []
        path, end = "", 0
        for read in sorted(self.reads, key=_PLACE_IN_FILE):
            if read.start != end or read.path != path:
                if run:
                    yield run
                run = []
                path, end = read.path, read.start
            run.append(read)
            end += read.nbytes
        if run:
            yield run


def _addresses_of(run: Sequence[SmallRead], staging: torch.Tensor) -> list[int]:
    """Return where each read of a run puts its bytes: in its destination, or one behind the other in `staging`.

    Raises:
        ValueError: a destination is not flat and contiguous, or ends too early: other memory would be written to.
    """
    addresses = []
    free = staging.data_ptr()
    for _, _, nbytes, step, shift, destination in run:
        itemsize = step.tensor.dtype.itemsize
        if step.is_direct:
            offset = (step.scatter.destination_start + shift) * itemsize
            if not (0 <= offset <= destination.nbytes - nbytes and destination.is_contiguous()):
                raise ValueError(f"{step.tensor.name}: has no {nbytes} contiguous bytes at {offset} of its destination")
            addresses.append(destination.data_ptr() + offset)
        else:
            free = -(-free // itemsize) * itemsize
            addresses.append(free)
            free += nbytes
    assert free <= staging.data_ptr() + staging.nbytes  # see `Batch.add`
    return addresses


def _buffers_at(addresses: Sequence[int], run: Sequence[SmallRead]) -> list[memoryview]:
    """Return the memory of a run, in its order, as few buffers as it has pieces."""
    begin = end = addresses[0]
    buffers = []
    for address, read in zip(addresses, run, strict=True):
        if address != end:
            buffers.append(_bytes_at(begin, end - begin))
            begin = address
        end = address + read.nbytes
    buffers.append(_bytes_at(begin, end - begin))
    return buffers


def _place(run: Sequence[SmallRead], addresses: Sequence[int], staging: torch.Tensor) -> None:
    """Move what was read to `_addresses_of(run, staging)` to where it belongs, if it is not there."""
    base = staging.data_ptr()
    for (_, _, nbytes, step, shift, destination), address in zip(run, addresses, strict=True):
        if not step.is_direct:
            values = staging[address - base : address - base + nbytes].view(step.tensor.dtype)
            scatter_elements(step.scatter, values, destination, shift)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
