"""Memory that a reading thread uses again and again for the inputs of elementwise operations.

Memory that is made and freed for each of them leaves holes in the heap, between the partitions that are made meanwhile:
a rank that dequantized a partition of 1250 MiB ended with 590 MiB of them.

[Note: another heap] What torch makes while it computes a block comes from the heap all the same. The calling thread
makes parameters meanwhile, whose small objects stay and lie in what was freed, so that its heap grows with each: by 80
MiB in that load. So operations run in other threads, of which the C library has another heap, where nothing stays.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence

import torch

from lowmem_load.planning.reads import BLOCK_NUMEL

Take = Callable[[int, torch.dtype], torch.Tensor]
"""For a number of elements and a dtype: uninitialised host memory, flat."""


class Temporaries:
    """Of one thread. They are pages of their own, and grow to the largest that was asked for of each."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._num_taken = 0

    @contextlib.contextmanager
    def frame(self) -> Iterator[Take]:
        """Inside, memory may be taken, and is lent out to nobody else; a frame in it takes other memory."""
        before = self._num_taken
        try:
            yield self._take
        finally:
            self._num_taken = before

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes, number = numel * dtype.itemsize, self._num_taken
        if number == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._memory[number].numel() < num_bytes:
            del self._memory[number]  # before the larger one is made
            self._memory.insert(number, _pages(num_bytes))
        self._num_taken += 1
        return self._memory[number][:num_bytes].view(dtype)


def _pages(num_bytes: int) -> torch.Tensor:
    """Return memory that goes back to the system when it is freed."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def compute_into(
    result: torch.Tensor, compute: Callable[[Sequence[torch.Tensor]], torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Fill `result`, which may be one of the inputs, a block of elements at a time: what comes in between is small."""
    for start in range(0, result.numel(), BLOCK_NUMEL):
        block = slice(start, start + BLOCK_NUMEL)
        result[block].copy_(compute([each[block] for each in inputs]))
