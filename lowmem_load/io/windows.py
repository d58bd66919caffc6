"""Windows of memory that the ranks of a node share, and counters in it by which they wait for each other."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence

import torch

_LINE_BYTES = 128
"""Between counters of different ranks: a cache line, or two that processors fetch together."""

_FIRST_WAIT_S, _LAST_WAIT_S = 20e-6, 2e-3
"""Between looks at a counter: short at first, then longer."""


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
