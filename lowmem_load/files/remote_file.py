"""Files of remote stores, read by ranges: requests, retries, and how many are in flight.

[Note: requests] A file is pinned to the version that it had when it was found: each request carries it as a condition.
A request that fails in a way that may pass is made again, after a delay that doubles and is drawn at random, so that
ranks do not come back together. A store that answers "slow down" gets half as many requests at a time; each success
then adds a little. Requests of `REQUEST_BYTES` go straight into the memory where the bytes stay.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.phases import no_callback

T = TypeVar("T")
Item = TypeVar("Item")

Check: TypeAlias = Callable[[], object]
"""Is called while something waits, and may raise to end it."""

REQUEST_BYTES = 16 << 20
"""Most bytes of a request. AWS advises 8 to 16 MiB (S3 performance guidelines, byte-range fetches)."""

HEAD_BYTES = 64 << 10
"""Bytes at the front of a file that are fetched when it is found: most headers."""

IN_FLIGHT_PER_NODE, MIN_IN_FLIGHT, MAX_IN_FLIGHT = 64, 4, 16
"""Requests in flight for the ranks of a node together, and the fewest and most for a rank."""

TIMEOUT_S = 15.0
"""Seconds without a byte after which a request fails."""

PATIENCE_S, THROTTLED_PATIENCE_S = 20.0, 90.0
"""Seconds for which a request is made again after it failed; and after the store said "slow down"."""

NUM_THREADS = 16
"""Small requests at a time."""

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
"""Most seconds before the second attempt, and before any."""


def plain_url(url: str) -> str:
    """Return a URL without credentials, query and fragment; only its scheme if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # else the path may begin within a password
    except ValueError:
        return f"{url.partition('://')[0]}://..."
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def is_http(url: str) -> bool:
    """Return whether a URL is on an HTTP server."""
    return urlsplit(url).scheme in ("http", "https")


def without_secrets(text: str) -> str:
    """Return a text without user names, passwords and queries in its URLs."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", re.sub(r"\?[^\s'\"<>)]*", "?...", text))


class TransientError(Exception):
    """A request failed in a way that may pass. The text holds neither credentials nor signed queries.

    Attributes:
        is_throttled: whether the store said "slow down".
    """

    def __init__(self, text: str, *, is_throttled: bool = False) -> None:
        super().__init__(text)
        self.is_throttled = is_throttled


class RemoteObject(Protocol):
    """One version of one file in a store."""

    @property
    def name(self) -> str:
        """URL without credentials and query, for messages; equal on all ranks."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""

    @property
    def version(self) -> str:
        """What the store tells versions apart by: an ETag, a commit; equal on all ranks."""

    @property
    def entry(self) -> dict[str, Any]:
        """What a manifest has of it, without credentials; see `remote_checkpoint.object_of`."""

    def fetch(self, offset: int, memory: memoryview, check: Callable[[], object]) -> None:
        """Make one request; fill `memory` with the bytes from `offset` on.

        `check` is called while bytes arrive, and may raise to end the request.

        Raises:
            TransientError: the request may be made again.
            CheckpointError: the file has changed, is not there, or may not be read.
        """


class Counts(NamedTuple):
    """What this process has asked of remote stores."""

    num_requests: int = 0
    num_retries: int = 0  # of them
    received_bytes: int = 0
    waited_s: float = 0.0  # of all threads, before another attempt

    def since(self, before: Counts) -> Counts:
        """Return what came after `before`."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))  # type: ignore[arg-type]


class Traffic:
    """The requests of this process: how many are in flight, and what they came to."""

    def __init__(self, limit: float = MAX_IN_FLIGHT) -> None:
        self._most = limit
        self.reset()

    def reset(self) -> None:
        """Begin anew, without requests in flight."""
        self.counts, self.limit, self._in_flight = Counts(), self._most, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def request(self, nbytes: int, *, is_retry: bool) -> Iterator[None]:
        """Make a request within the block, when there is room for one more."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight < max(1, int(self.limit)))
            self._in_flight += 1
        received_bytes = 0
        try:
            yield
            received_bytes = nbytes
        finally:
            with self._changed:
                self._in_flight -= 1
                done = self.counts
                self.counts = done._replace(
                    num_requests=done.num_requests + 1,
                    num_retries=done.num_retries + is_retry,
                    received_bytes=done.received_bytes + received_bytes,
                )
                if received_bytes:
                    self.limit = min(self._most, self.limit + 1 / self.limit)
                self._changed.notify_all()

    def note_wait(self, seconds: float, *, is_throttled: bool) -> None:
        """Count a wait. After "slow down" there are half as many requests at a time."""
        with self._changed:
            self.counts = self.counts._replace(waited_s=self.counts.waited_s + seconds)
            if is_throttled:
                self.limit = max(1.0, self.limit / 2)


TRAFFIC = Traffic()
os.register_at_fork(after_in_child=TRAFFIC.reset)  # its threads are not there


def replaced_error(name: str) -> CheckpointError:
    """Return the error for a file that has another version than it had when it was found."""
    return CheckpointError(f"{name}: was replaced after its header was read; load again once nobody writes to it")


def requests_in_flight(num_ranks: int) -> int:
    """Return how many requests each of the ranks of a node has in flight."""
    return max(MIN_IN_FLIGHT, min(MAX_IN_FLIGHT, IN_FLIGHT_PER_NODE // num_ranks))


class RemoteFile:
    """A `ByteSource` in a remote store, whose first bytes may be here already. Closing it ends its requests.

    `path` is that of the empty file that stands for it, if there is one.
    """

    is_remote = True

    def __init__(self, item: RemoteObject, head: bytes = b"", path: str = "") -> None:
        self.path, self.nbytes, self.version = path or item.name, item.nbytes, item.version
        self.on_wait: Callable[[], object] = no_callback  # called while this waits; may raise to end it
        self._item, self._head = item, head
        self._closed = threading.Event()

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        if (missing := offset + memory.nbytes - self.nbytes) > 0:
            raise TruncatedFileError(f"{self._item.name}: ended at byte {self.nbytes} ({missing} short)")
        if offset + memory.nbytes <= len(self._head):
            memory[:] = self._head[offset : offset + memory.nbytes]
            return
        for start in range(0, memory.nbytes, REQUEST_BYTES):
            self._request(offset + start, memory[start : start + REQUEST_BYTES])

    def close(self) -> None:
        """See `ByteSource`."""
        self._closed.set()

    def _check(self) -> None:
        if self._closed.is_set():
            raise CheckpointError(f"{self._item.name}: was closed while it was read")
        self.on_wait()

    def _request(self, offset: int, memory: memoryview) -> None:
        what = f"{self._item.name}: cannot be read at bytes {offset} to {offset + memory.nbytes - 1}"
        retry(lambda: self._item.fetch(offset, memory, self._check), what, memory.nbytes, self._check)


def retry(call: Callable[[], T], what: str, nbytes: int = 0, check: Callable[[], object] = no_callback) -> T:
    """Return what a request returns; make it again if it fails in a way that may pass. See [Note: requests].

    Args:
        call: makes the request.
        what: cannot be done, for the message.
        nbytes: of the answer.
        check: called while this waits; may raise to end it.

    Raises:
        CheckpointError: the request went on failing.
    """
    failed_s, num_failed = 0.0, 0
    while True:
        check()
        try:
            with TRAFFIC.request(nbytes, is_retry=num_failed > 0):
                return call()
        except TransientError as error:
            failed_s = failed_s if num_failed else time.monotonic()
            num_failed += 1
            patience_s = THROTTLED_PATIENCE_S if error.is_throttled else PATIENCE_S
            took_s = time.monotonic() - failed_s
            delay_s = random.uniform(0, min(LAST_DELAY_S, FIRST_DELAY_S * 2**num_failed))
            if took_s + delay_s > patience_s:
                raise CheckpointError(f"{what}: {error} ({num_failed} attempts in {took_s:.0f} s)") from None
            TRAFFIC.note_wait(delay_s, is_throttled=error.is_throttled)
        until_s = time.monotonic() + delay_s
        while (left_s := until_s - time.monotonic()) > 0:
            check()
            time.sleep(min(left_s, 0.1))


def map_in_threads(act: Callable[[Item, Check], T], items: Iterable[Item], check: Check) -> list[T]:
    """Return what `act` makes of each item, called with a check that raises once one of them, or this thread, has."""
    ended = threading.Event()

    def look() -> None:
        if ended.is_set():
            raise CheckpointError("another request has failed")
        check()

    pool = ThreadPoolExecutor(NUM_THREADS, "lowmem_load-find")
    try:
        return list(pool.map(lambda item: act(item, look), items))
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)
