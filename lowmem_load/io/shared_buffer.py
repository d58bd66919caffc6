"""Memory that the ranks of a node share, with a barrier. Each rank makes a part of it, which the others map as well."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence

import torch

from lowmem_load.errors import LowMemLoadError
from lowmem_load.planning.sharing import CHUNK_BYTES

_DECLINED = 1 << 62
"""Counter of a rank that passes all barriers from now on."""

_LEFT = -1
"""Counter of a rank that comes to no further barrier."""

LEAVE_GRACE_S = 3.0
"""Seconds to wait after another rank has left. By then `check` has raised, unless that rank could not say why."""

_FIRST_WAIT_S, _LAST_WAIT_S = 20e-6, 2e-3
"""Seconds between two looks at the counters, at first and in the end."""


class SharedBuffer:
    """Two chunks of memory for each rank, and a counter of the barriers that it has reached.

    Args:
        memories: the part of each rank, by place: a page for its counter, zeros at first, then two chunks.
        place: this rank's place among the ranks of the node that take part.

    Attributes:
        place: as given.
        num_ranks: that take part.
        chunk_bytes: bytes of one chunk.
    """

    NBYTES = mmap.PAGESIZE + 2 * CHUNK_BYTES
    """Usual bytes of the part of one rank."""

    def __init__(self, memories: Sequence[mmap.mmap], place: int) -> None:
        self.place, self.num_ranks = place, len(memories)
        self.chunk_bytes = (len(memories[place]) - mmap.PAGESIZE) // 2
        self._bytes = [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]
        self._counters = [memoryview(memory).cast("q") for memory in memories]
        self._fence = threading.Lock()

    def both_chunks(self, place: int) -> torch.Tensor:
        """Return the chunks of a rank as one piece of memory, uint8."""
        return self._bytes[place][mmap.PAGESIZE :]

    def chunk(self, place: int, round_number: int) -> torch.Tensor:
        """Return the chunk that a rank fills in a round, uint8. Rounds alternate between the two."""
        return self.both_chunks(place).narrow(0, round_number % 2 * self.chunk_bytes, self.chunk_bytes)

    def decline(self) -> None:
        """Let all barriers pass as far as this rank is concerned."""
        self._arrive(_DECLINED)

    def leave(self) -> None:
        """Tell the other ranks that this one comes to no further barrier."""
        self._arrive(_LEFT)

    def barrier(self, number: int, check: Callable[[], None]) -> None:
        """Wait until every rank has reached barrier `number`; each one has a higher number than the last.

        Args:
            number: of the barrier.
            check: called while this rank waits; raises to end the waiting.

        Raises:
            LowMemLoadError: another rank has left, and `check` did not say why.
        """
        self._arrive(number)
        pause_s, left_s = _FIRST_WAIT_S, float("inf")
        while (least := min(counter[0] for counter in self._counters)) < number:
            check()
            if least == _LEFT:
                left_s = min(left_s, time.monotonic())
                if time.monotonic() - left_s > LEAVE_GRACE_S:
                    raise LowMemLoadError("another rank of this node stopped reading together with this one")
            time.sleep(pause_s)
            pause_s = min(_LAST_WAIT_S, pause_s * 1.5)
        self._order_memory()

    def _arrive(self, number: int) -> None:
        self._order_memory()
        self._counters[self.place][0] = number

    def _order_memory(self) -> None:
        """Make sure that other ranks see what was written before they see the counter, on every kind of processor."""
        with self._fence:  # taking a lock orders memory; Python has no other means
            pass
