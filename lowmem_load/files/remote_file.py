"""Files of remote stores, read by ranges: how many bytes a request has, and how many requests are in flight.

A file is pinned to the version that it had when it was found: each request carries it as a condition. Requests of
`REQUEST_BYTES` go straight into the memory where the bytes stay. obstore makes a request that failed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeAlias, TypeVar

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files.object_store import RemoteObject
from lowmem_load.locks import ForkedLock

T = TypeVar("T")
Item = TypeVar("Item")

Check: TypeAlias = Callable[[], object]
"""Is called while something waits, and may raise to end it."""

CHECK_S = 0.05
"""Seconds between two checks."""

REQUEST_BYTES = 16 << 20
"""Most bytes of a request. AWS advises 8 to 16 MiB (S3 performance guidelines, byte-range fetches)."""

HEAD_BYTES = 64 << 10
"""Bytes at the front of a file that are fetched when it is found: most headers."""

IN_FLIGHT_PER_NODE, MIN_IN_FLIGHT, MAX_IN_FLIGHT = 64, 4, 16
"""Requests in flight for the ranks of a node together, and the fewest and most for a rank."""

NUM_THREADS = 16
"""Small requests at a time."""


class Counts(NamedTuple):
    """What this process has read from remote stores."""

    num_requests: int = 0
    received_bytes: int = 0

    def since(self, before: Counts) -> Counts:
        """Return what came after `before`."""
        return Counts(self.num_requests - before.num_requests, self.received_bytes - before.received_bytes)


_counts, _counts_lock = Counts(), ForkedLock()


def request_counts() -> Counts:
    """Return what this process has read from remote stores so far."""
    return _counts


def requests_in_flight(num_ranks: int) -> int:
    """Return how many requests each of the ranks of a node has in flight."""
    return max(MIN_IN_FLIGHT, min(MAX_IN_FLIGHT, IN_FLIGHT_PER_NODE // num_ranks))


class RemoteFile:
    """A `ByteSource` in a remote store, whose first bytes, and a file that stands for it at `path`, may be here."""

    is_remote = True

    def __init__(self, item: RemoteObject, head: bytes = b"", path: str = "") -> None:
        self.path, self.nbytes, self.version = path or item.name, item.nbytes, item.version
        self._item, self._head, self._is_closed = item, head, False

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        global _counts  # noqa: PLW0603  of the process, as its connections
        if (missing := offset + memory.nbytes - self.nbytes) > 0:
            raise TruncatedFileError(f"{self._item.name}: ended at byte {self.nbytes} ({missing} bytes short)")
        if offset + memory.nbytes <= len(self._head):
            memory[:] = self._head[offset : offset + memory.nbytes]
            return
        for start in range(0, memory.nbytes, REQUEST_BYTES):
            if self._is_closed:
                raise CheckpointError(f"{self._item.name}: was closed while it was read")
            part = memory[start : start + REQUEST_BYTES]
            self._item.fetch(offset + start, part)
            with _counts_lock:
                _counts = Counts(_counts.num_requests + 1, _counts.received_bytes + part.nbytes)

    def close(self) -> None:
        """See `ByteSource`. The requests of other threads go on; no further ones are made."""
        self._is_closed = True


def results_of(futures: Iterable[Future[T]], check: Check) -> list[T]:
    """Return the results of all futures, or raise what one of them raised. `check` is called now and then."""
    futures = list(futures)
    while True:
        done, waiting = wait(futures, CHECK_S, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if not waiting:
            return [future.result() for future in futures]
        check()


def map_in_threads(act: Callable[[Item], T], items: Iterable[Item], check: Check) -> list[T]:
    """Return what `act` makes of each item. Threads that still work when this raises are left to themselves."""
    pool = ThreadPoolExecutor(NUM_THREADS, "lowmem_load-find")
    try:
        return results_of([pool.submit(act, item) for item in items], check)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
