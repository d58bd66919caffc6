"""Small reads, many at a time: each by itself costs more in calls than in bytes.

Those that lie one behind the other in a file are one call of its source, which fills many buffers at once.

[Note: addresses] Of a tensor of a few kilobytes, a view of it as bytes costs more than its bytes do. So what is kept of
the memory is its address, checked against the tensor, and what lies one behind the other there too is one buffer. The
tensors stay with the batch until they are filled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

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
read; the step, and the elements by which its nest is moved on; flat contiguous host memory. A plain tuple, since to
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

    def fill(self, staging: torch.Tensor, read: Callable[[str, Sequence[Run]], None]) -> None:
        """Do all reads.

        Args:
            staging: `BATCH_BYTES` of the calling thread, uint8.
            read: fills the buffers of runs of the file of that path.

        Raises:
            ValueError: see `_addresses_of`.
            CheckpointError: of `read`.
        """
        reads = sorted(self.reads, key=_PLACE_IN_FILE)
        addresses = _addresses_of(reads, staging)
        for path, runs in _runs_of(reads, addresses).items():
            read(path, runs)
        if self.has_staged:
            _place(reads, addresses, staging)


class Run(NamedTuple):
    """Reads that follow each other in a file without a gap.

    Attributes:
        tensor: the one that the first of them is of.
        num_reads: how many they are.
        start: first byte in the file.
        nbytes: of all of them.
        buffers: their memory, in this order.
    """

    tensor: Source
    num_reads: int
    start: int
    nbytes: int
    buffers: Sequence[memoryview]

    @property
    def what(self) -> str:
        """What it is called in errors."""
        return repr(self.tensor.name) + (f" or one of the {self.num_reads - 1} behind it" if self.num_reads > 1 else "")


def _addresses_of(reads: Sequence[SmallRead], staging: torch.Tensor) -> list[int]:
    """Return where each read puts its bytes: in its destination, or one behind the other in `staging`.

    Raises:
        ValueError: a destination is not flat and contiguous, or ends too early: other memory would be written to.
    """
    addresses = []
    free = staging.data_ptr()
    for _, _, nbytes, step, shift, destination in reads:
        itemsize = nbytes // step.numel
        if step.is_direct:
            offset = (step.nest.destination + shift) * itemsize
            if not (0 <= offset <= destination.nbytes - nbytes and destination.is_contiguous()):
                raise ValueError(f"{step.tensor.name}: has no {nbytes} contiguous bytes at {offset} of its destination")
            addresses.append(destination.data_ptr() + offset)
        else:
            free = -(-free // itemsize) * itemsize
            addresses.append(free)
            free += nbytes
    assert free <= staging.data_ptr() + staging.nbytes  # see `Batch.add`
    return addresses


def _runs_of(reads: Sequence[SmallRead], addresses: Sequence[int]) -> dict[str, list[Run]]:
    """Return the runs of each file, by its path; the reads are in the order of their places."""
    runs: dict[str, list[Run]] = {}
    path, end, *_ = reads[0]
    first = 0
    for number, (its_path, start, nbytes, *_) in enumerate(reads):
        if start != end or its_path != path:
            runs.setdefault(path, []).append(_run(reads[first:number], addresses[first:number]))
            path, first, end = its_path, number, start
        end += nbytes
    runs.setdefault(path, []).append(_run(reads[first:], addresses[first:]))
    return runs


def _run(reads: Sequence[SmallRead], addresses: Sequence[int]) -> Run:
    """Return reads that follow each other as one, with as few buffers as their memory has pieces."""
    begin = end = addresses[0]
    buffers, total = [], 0
    for address, (_, _, nbytes, *_) in zip(addresses, reads, strict=True):
        if address != end:
            buffers.append(_bytes_at(begin, end - begin))
            begin = address
        end = address + nbytes
        total += nbytes
    buffers.append(_bytes_at(begin, end - begin))
    _, start, _, step, *_ = reads[0]
    return Run(step.tensor, len(reads), start, total, buffers)


def _place(reads: Sequence[SmallRead], addresses: Sequence[int], staging: torch.Tensor) -> None:
    """Move what was read to `_addresses_of(reads, staging)` to where it belongs, if it is not there."""
    base = staging.data_ptr()
    for (_, _, nbytes, step, shift, destination), address in zip(reads, addresses, strict=True):
        if not step.is_direct:
            values = staging[address - base : address - base + nbytes].view(step.tensor.dtype)
            scatter_elements(step.nest, values, destination, shift)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
