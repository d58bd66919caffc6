"""Host memory in huge pages, handed out as many small tensors and taken back one by one.

The first touch of memory in pages of 4 KiB costs more than copying a file into it: each page is a fault of its own.
Memory of which the kernel may take 2 MiB at a time is faulted in 512 times less often. A tensor by itself seldom covers
whole blocks of 2 MiB, so the tensors of one load lie side by side. To everyone else each is alone: it has a storage of
its own, which starts where the tensor does, and whose memory goes when it goes.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 2 << 20
"""Of x86, and of ARM with pages of 4 KiB; larger ones elsewhere only mean that fewer blocks are huge."""

ALIGNMENT_BYTES = 64
"""Of each tensor: what torch gives its own."""

WINDOW_BYTES = 32 << 20
"""After so much a huge page is timed again; after one that came slowly, twice as much each time."""

MAX_PAGE_S = 1e-3
"""Of processor time for a huge page. 512 small ones cost 0.7 ms on an AMD EPYC, a huge one 0.1 to 0.2 ms; but 5 ms
where a hypervisor has taken the free memory back (free page reporting), or the kernel has to make room by moving
pages."""

TRIES = 2
"""Huge pages of which one has to come quickly: where others want the core as well, a single one may be held up."""

MIN_CAPACITY = 8 * HUGE_PAGE_BYTES
"""Of an arena: for less, what its last huge page may leave unused is not worth it."""

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Says whether memory may have huge pages: "always [madvise] never" means that who asks for them gets them."""


def has_huge_pages() -> bool:
    """Return whether the kernel gives huge pages to memory that asks for them."""
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:  # another system, or a kernel without them
        return False


def arena_for(sizes: Iterable[int]) -> Arena | None:
    """Return an arena for tensors of these sizes, bytes; None where it would gain nothing, or cannot be had."""
    capacity = sum(map(_rounded, sizes))
    if capacity < MIN_CAPACITY or not has_huge_pages():
        return None
    try:
        return Arena(capacity)
    except OSError:  # not so much may be promised in one piece; what there is, ordinary memory will show
        return None


class Arena:
    """Hands out memory for tensors that are made one after the other.

    Huge pages where the kernel has them at hand: one of each `WINDOW_BYTES` is timed as it comes. Nothing else is
    resident before it is written to. What is resident beside the tensors is at most `TRIES` huge pages, at the end, and
    less than `ALIGNMENT_BYTES` for each. Memory of a tensor goes back to the kernel with its storage, but for pages
    that it shares with a neighbour which is still there; the address space when all of them are gone.

    Args:
        capacity: bytes of all tensors together, each rounded up to `ALIGNMENT_BYTES`. See `arena_for`.

    Raises:
        OSError: there is not so much address space, or none that may be promised (`vm.overcommit_memory` 2).
    """

    def __init__(self, capacity: int) -> None:
        nbytes = -(-capacity // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        # One page more, for before 6.7 kernels do not align what may have huge pages.
        self._pages = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._next = -torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
        self._end = self._next + nbytes
        self._asked, self._small_bytes = self._next, WINDOW_BYTES
        self._gone = _Gone(self._pages)

    def has_room(self, numel: int, dtype: torch.dtype) -> bool:
        """Return whether `empty` may be called."""
        return 0 < numel * dtype.itemsize <= self._end - self._next

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat memory of at least one element, zeros, with a storage of its own (which cannot be resized)."""
        start, end = self._next, self._next + _rounded(numel * dtype.itemsize)
        while self._asked < end:
            self._ask()
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=numel, offset=start)
        self._next = end
        hold = _Hold(tensor.untyped_storage(), _let_go)
        hold.gone, hold.start, hold.end = self._gone, start, end
        _HOLDS[id(hold)] = hold
        return tensor

    def _ask(self) -> None:
        """Take a huge page, another if it was slow to come, and decide by them on those behind."""
        start = self._asked
        last = min(start + TRIES * HUGE_PAGE_BYTES, self._end)
        if any(self._page_s(page) <= MAX_PAGE_S for page in range(start, last, HUGE_PAGE_BYTES)):
            self._asked += WINDOW_BYTES
            return
        self._asked += self._small_bytes
        end = min(self._asked, self._end)
        if last < end:
            self._pages.madvise(mmap.MADV_NOHUGEPAGE, last, end - last)
        self._small_bytes *= 2

    def _page_s(self, start: int) -> float:
        """Return the seconds of processor time that a page took to come."""
        begin_s = time.thread_time()
        self._pages[start] = 0
        return time.thread_time() - begin_s


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Gone:
    """Which bytes of an arena no tensor holds any more."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self._end_of: dict[int, int] = {}  # by start, and the other way round: runs that do not touch each other
        self._start_of: dict[int, int] = {}
        self._may_be_huge = True

    def add(self, start: int, end: int) -> None:
        """Give the pages back that lie in these bytes, with those at their ends that nobody else holds."""
        first = self._start_of.pop(start, start)
        last = self._end_of.pop(end, end)
        self._end_of[first], self._start_of[last] = last, first
        size = mmap.PAGESIZE
        low = -(-max(first, start - size) // size) * size
        high = min(last, end + size) // size * size
        if low < high:
            if self._may_be_huge:  # then khugepaged would fill the gaps with a huge page, zeros, at its leisure
                self._pages.madvise(mmap.MADV_NOHUGEPAGE)
                self._may_be_huge = False
            self._pages.madvise(mmap.MADV_DONTNEED, low, high - low)


class _Hold(weakref.ref[torch.UntypedStorage]):
    """A storage, and the bytes of an arena that it holds: `weakref.finalize` makes three objects more of it."""

    __slots__ = ("end", "gone", "start")

    gone: _Gone
    start: int
    end: int


_HOLDS: dict[int, _Hold] = {}
"""By `id`: of all storages that are there. Not kept by what they refer to, or the garbage collector would take the two
together, and nobody would hear of the storage's end. None is heard of when the interpreter ends: torch leaves the
Python objects of storages where they are then (torch 2.13 `torch/csrc/PyInterpreter.cpp`, `decref`)."""


def _let_go(hold: _Hold) -> None:
    """Take the memory of a storage back that has gone: in any thread, and between any two steps of another."""
    del _HOLDS[id(hold)]
    hold.gone.add(hold.start, hold.end)
