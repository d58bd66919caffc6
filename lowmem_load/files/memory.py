"""Memory of the host: moves elements between flat tensors, takes memory, gives it back, and names what is short."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from lowmem_load.errors import LowMemLoadError, MemoryShortageError
from lowmem_load.planning.nest import Nest
from lowmem_load.planning.reads import BLOCK_NUMEL, GROUPED_NUMEL
from lowmem_load.text import size

MANY_BYTES = 1 << 20
"""Bytes that are worth memory of their own: glibc takes fewer than 32 MiB from its heap, which keeps holes."""

POPULATED_BYTES = 1 << 20
"""Bytes of memory for which the system makes pages at a time: meanwhile no thread can map or unmap memory."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; older systems refuse it

Take = Callable[[int, torch.dtype], torch.Tensor]
"""Returns uninitialized flat host memory for a number of elements of a dtype."""


def scatter_elements(nest: Nest, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Move elements of the flat tensor `source` to the flat tensor `destination`."""
    values = source_elements(nest, source)
    casts = nest.casts
    if casts and casts[-1] == destination.dtype:
        casts = casts[:-1]  # copy_ casts without a temporary, which may be twice as large as the source
    for dtype in casts:
        values = values.to(dtype)
    sizes, strides = [axis.size for axis in nest.axes], [axis.destination for axis in nest.axes]
    destination.as_strided(sizes, strides, destination.storage_offset() + nest.destination).copy_(values)


def source_elements(nest: Nest, source: torch.Tensor) -> torch.Tensor:
    """Return the elements of the flat tensor `source` that a nest moves, as a view with one dim for each axis."""
    sizes, strides = [axis.size for axis in nest.axes], [axis.source for axis in nest.axes]
    return source.as_strided(sizes, strides, source.storage_offset() + nest.source)


def compute_into(
    result: torch.Tensor,
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: int = 1,
    part_group: int = 1,
) -> None:
    """Fill `result` with an elementwise operation, block by block. For groups, see `Elementwise`."""
    num_groups = BLOCK_NUMEL if part_group == 1 else GROUPED_NUMEL // part_group
    for first in range(0, -(-result.numel() // group), num_groups):
        end = first + num_groups
        parts = [flat[first * part_group : end * part_group] for flat in inputs]
        result[first * group : end * group].copy_(compute(parts))


class Temporaries(threading.local):
    """Memory that each thread uses again and again, for staged reads and for inputs of elementwise operations.

    It is mapped, not taken from the heap: what is freed there would stay as holes between the partitions that are made
    meanwhile. A rank that dequantized a partition of 1250 MiB ended with 590 MiB of holes.
    """

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._num_taken = 0

    @contextlib.contextmanager
    def frame(self) -> Iterator[Take]:
        """Lend memory within a block. Frames nest: memory of an outer frame is not lent again."""
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
            del self._memory[number]  # before the larger one is mapped
            with naming_shortage("staging buffer", num_bytes):
                self._memory.insert(number, map_memory(num_bytes))
        self._num_taken += 1
        return self._memory[number][:num_bytes].view(dtype)


def map_memory(num_bytes: int) -> torch.Tensor:
    """Return bytes in memory of their own, which goes back to the system when freed."""
    return torch.frombuffer(_pages(num_bytes), dtype=torch.uint8)


def own_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized bytes that go back to the system when freed, also on the host if they are many."""
    if device.type == "cpu" and num_bytes >= MANY_BYTES:
        return map_memory(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class SpareMemory:
    """Memory of tensors that come and go: what nobody refers to any more is used again.

    The first touch of a page may take ten times as long as a copy: 1.2 s for a GB on a virtual machine, and 0.13 s.
    """

    def __init__(self) -> None:
        self._mapped: list[mmap.mmap] = []

    def take(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return uninitialized bytes of each size. What is free and fits none of them goes back to the system."""
        free: dict[int, list[mmap.mmap]] = {}
        for number, count in enumerate(_num_references(self._mapped)):
            if count == _UNUSED:
                free.setdefault(len(self._mapped[number]), []).append(self._mapped[number])
        chosen = [free[nbytes].pop() if free.get(nbytes) else None for nbytes in sizes]
        self._mapped, free = [], {}  # before more is mapped
        tensors = []
        for nbytes, pages in zip(sizes, chosen, strict=True):
            if device.type == "cpu" and nbytes >= MANY_BYTES:
                self._mapped.append(pages or _pages(nbytes))
                tensors.append(torch.frombuffer(self._mapped[-1], dtype=torch.uint8))
            else:
                tensors.append(own_memory(nbytes, device))
        return tensors


def _pages(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _num_references(pages: list[mmap.mmap]) -> list[int]:
    return [sys.getrefcount(mapping) for mapping in pages]


_UNUSED = _num_references([_pages(1)])[0]
"""References to memory that only a list has. A tensor of torch.frombuffer is one more."""


def untouched_bytes(memory: torch.Tensor) -> int:
    """Return how many bytes of contiguous host memory have no pages yet, in full pages; 0 where that does not show."""
    return untouched_between(memory.data_ptr(), memory.data_ptr() + memory.nbytes)


def untouched_between(start: int, stop: int) -> int:
    """Return the same for the bytes between two addresses."""
    page = mmap.PAGESIZE
    first, end = -(-start // page), stop // page
    if first >= end:
        return 0
    has_page, size = (ctypes.c_ubyte * (end - first))(), ctypes.c_size_t((end - first) * page)
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first * page), size, has_page):
        return 0
    return page * int((torch.frombuffer(has_page, dtype=torch.uint8) & 1).logical_not().sum())


def trim_heap() -> None:
    """Return free pages to the system: glibc keeps holes between blocks, and 400 MiB of weights took up to 990 MiB."""
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # of glibc alone


# -- shortage ---------------------------------------------------------------------------------------------------------

_SHORTAGE_WORDS = ("can't allocate memory", "out of memory", "not enough memory")
"""Words of torch's RuntimeErrors: `c10/core/impl/alloc_cpu.cpp` for the host, and those of the devices."""


@contextlib.contextmanager
def naming_shortage(what: str, nbytes: int) -> Iterator[None]:
    """Raise MemoryShortageError, which says what the `nbytes` are for ("parameter x"), if an allocator fails."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        says_so = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _SHORTAGE_WORDS)
        is_shortage = says_so or isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
        if isinstance(error, LowMemLoadError) or not is_shortage:  # RankError quotes those of other ranks
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MemoryShortageError(f"{what}: {size(nbytes)} of memory cannot be allocated: {reason}") from error


def make_pages(memory: memoryview) -> None:
    """Have the system make the pages of memory that is written soon, if it has none."""
    # A page fault for each page takes a quarter more processor time. Memory that has pages already is left alone.
    if memory.nbytes < POPULATED_BYTES // 16:
        return
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end, has_page = start + memory.nbytes, ctypes.c_ubyte()
    libc.mincore(ctypes.c_void_p((start + end) // 2 // page * page), ctypes.c_size_t(1), ctypes.byref(has_page))
    if not has_page.value:
        for first in range(start // page * page, end, POPULATED_BYTES):
            nbytes = min(POPULATED_BYTES, end - first)
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), _POPULATE_WRITE)
