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

import torch

from lowmem_load.planning.expression import Source
from lowmem_load.planning.reads import Read
from lowmem_load.read.scatter import scatter_elements

SMALL_BYTES = 64 << 10
"""Of the largest read that waits for others: to copy so much takes as long as to have a thread do it."""

BATCH_BYTES = 1 << 20
"""Of a batch: the least that a thread's staging buffer has."""

_FULL_BYTES = BATCH_BYTES - 2 * SMALL_BYTES
"""Of a batch that takes no more: room for another is also for what lies between reads of different dtypes."""

MAX_READS = 512
"""Of a batch: system calls fill up to 1024 buffers."""


SmallRead = tuple[str, int, int, Read, int, torch.Tensor]
"""One of the reads of a step, and the memory that its elements go to: path and first byte in the file; bytes of the
read; the step, and the elements by which its scatter is moved on; flat contiguous host memory. A plain tuple, since to
make one of a class takes a tenth of the time that is left for each."""

_PLACE_IN_FILE = itemgetter(0, 1)


@dataclass(slots=True)
class Batch:
    """Reads that one thread will do.

    Attributes:
        reads: in the order in which they came.
        nbytes: of all of them.
        needed_bytes: those that are wanted of what is read.
        has_staged: whether some go to `staging` first.
    """

    reads: list[SmallRead] = field(default_factory=list)
    nbytes: int = 0
    needed_bytes: int = 0
    has_staged: bool = False

    def add(self, step: Read, start: int, shift: int, nbytes: int, destination: torch.Tensor) -> bool:
        """Take one more, from byte `start` of the file on; see `SmallRead`. Return whether it is the last."""
        self.reads.append((step.tensor.path, start, nbytes, step, shift, destination))
        self.nbytes += nbytes
        if step.is_direct:
            self.needed_bytes += nbytes
        else:
            self.needed_bytes += step.needed_bytes_each
            self.has_staged = True
        return self.nbytes > _FULL_BYTES or len(self.reads) == MAX_READS

    def fill(self, staging: torch.Tensor, read: Callable[[Source, int, int, Sequence[memoryview]], None]) -> None:
        """Do all reads.

        Args:
            staging: `BATCH_BYTES` of the calling thread, uint8.
            read: fills buffers, one after the other, with the bytes of a file, given a tensor in it, how many begin
                with that one, and the first byte.

        Raises:
            ValueError: see `_addresses_of`.
            CheckpointError: of `read`.
        """
        for run in self._runs():
            addresses = _addresses_of(run, staging)
            _, start, _, step, *_ = run[0]
            read(step.tensor, len(run), start, _buffers_at(addresses, run))
            if self.has_staged:
                _place(run, addresses, staging)

    def _runs(self) -> Iterator[list[SmallRead]]:
        """Yield the reads by their place in the files, those together that follow each other there without a gap."""
        run: list[SmallRead] = []
        path, end = "", 0
        for read in sorted(self.reads, key=_PLACE_IN_FILE):
            its_path, start, nbytes, *_ = read
            if start != end or its_path != path:
                if run:
                    yield run
                run = []
                path, end = its_path, start
            run.append(read)
            end += nbytes
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
        itemsize = nbytes // step.numel
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
    for address, (_, _, nbytes, *_) in zip(addresses, run, strict=True):
        if address != end:
            buffers.append(_bytes_at(begin, end - begin))
            begin = address
        end = address + nbytes
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
