"""Memory that the ranks of a node share, and how they wait for each other in it, without messages.

It is anonymous (memfd): it has no name that could be left behind, no file system whose size bounds it (that of /dev/shm
is 64 MB in many containers), and ends with the last process that has it. The others open it by way of /proc.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import torch

_PREFIX = "lowmem_load-"
"""Of the names of memory, which /proc shows."""

_LINE_BYTES = 128
"""Between counters of different ranks: a cache line, or two that processors fetch together."""

_FIRST_WAIT_S, _LAST_WAIT_S = 20e-6, 2e-3
"""Between looks at a counter: short at first, then longer."""


def new_name() -> str:
    """Return a name for memory that no other has: whoever opens it sees that it is the one that was meant."""
    return secrets.token_hex(4)


def make_memory(name: str, nbytes: int = 0) -> int:
    """Return the descriptor of new shared memory, all of which is there: nobody meets SIGBUS later.

    Raises:
        OSError: there is none, or not as much.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "not on this system")
    descriptor = os.memfd_create(_PREFIX + name, os.MFD_CLOEXEC)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_memory(pid: int, descriptor: int, name: str, flags: int) -> int:
    """Return a descriptor of memory that another process of this user, in the same space of process numbers, has made.

    Raises:
        OSError: it cannot be opened from here, or something else is there: the process may have closed it, and opened
            a file, or be one of another machine.
    """
    # Looked at before it is opened: to open a pipe may take for ever, a device may do something.
    path = f"/proc/{pid}/fd/{descriptor}"
    _check_name(path, name)
    opened = os.open(path, flags | os.O_CLOEXEC)
    try:
        _check_name(f"/proc/self/fd/{opened}", name)
    except BaseException:
        os.close(opened)
        raise
    return opened


def memory_of(pid: int, descriptor: int, name: str, nbytes: int) -> mmap.mmap:
    """Return memory that another process has made; see `open_memory`.

    Raises:
        OSError: as `open_memory`.
        ValueError: it is smaller.
    """
    opened = open_memory(pid, descriptor, name, os.O_RDWR)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _check_name(path: str, name: str) -> None:
    if not os.readlink(path).startswith(f"/memfd:{_PREFIX}{name}"):
        raise OSError(errno.ESTALE, "another file is there")


class Windows:
    """A window of shared memory for each rank of a node, and a few counters for each, which only grow.

    Args:
        memory: of at least `nbytes_of(...)` bytes, zeros at first.
        place: of this rank among those of the node that take part.
        num_ranks: of them.
        window_bytes: of each window.

    Attributes:
        place, num_ranks, window_bytes: as given.
    """

    NUM_COUNTERS = 3

    def __init__(self, memory: mmap.mmap, place: int, num_ranks: int, window_bytes: int) -> None:
        self.place, self.num_ranks, self.window_bytes = place, num_ranks, window_bytes
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._counters = memoryview(memory).cast("q")
        self._first = _header_bytes(num_ranks)
        self._fence = threading.Lock()

    @classmethod
    def nbytes_of(cls, num_ranks: int, window_bytes: int) -> int:
        """Return the bytes of memory that windows take."""
        return _header_bytes(num_ranks) + num_ranks * window_bytes

    def window(self, place: int) -> torch.Tensor:
        """Return the window of a rank, uint8."""
        return self._bytes.narrow(0, self._first + place * self.window_bytes, self.window_bytes)

    def tell(self, counter: int, value: int) -> None:
        """Set a counter of this rank, once all that was written before can be seen."""
        with self._fence:  # a lock orders memory on every processor; what is stored after it is seen after
            pass
        self._counters[self._at(self.place, counter)] = value

    def behind(self, counter: int, value: int) -> list[int]:
        """Return the places of the ranks whose counter has not reached a value."""
        found = [place for place in range(self.num_ranks) if self._counters[self._at(place, counter)] < value]
        with self._fence:
            pass
        return found

    def wait(self, counter: int, value: int, check: Callable[[Sequence[int]], None]) -> None:
        """Wait until the counter of every rank has reached a value.

        Args:
            counter: which.
            value: that it is to reach.
            check: called now and then with the places that are behind; raises to end the waiting.
        """
        pause_s = _FIRST_WAIT_S
        while missing := self.behind(counter, value):
            check(missing)
            time.sleep(pause_s)
            pause_s = min(_LAST_WAIT_S, pause_s * 1.5)

    def _at(self, place: int, counter: int) -> int:
        return (place * Windows.NUM_COUNTERS + counter) * _LINE_BYTES // 8


def _header_bytes(num_ranks: int) -> int:
    used = num_ranks * Windows.NUM_COUNTERS * _LINE_BYTES
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
