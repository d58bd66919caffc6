"""Byte sources: what formats and the executor know of a file. `LocalFile` is the source for files on disk.

Another kind of storage (HTTP, an object store) is one more class with the methods of `ByteSource`; see `RemoteFile`.
Errors of the operating system become errors of this package here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from lowmem_load.errors import CheckpointError, TruncatedFileError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE})
"""Errors of network file systems while a server is busy or restarts. The same read may succeed a moment later."""

RETRY_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
"""Seconds before each further attempt: 3 s in all, as the other ranks wait meanwhile. Mounts that wait for their server
by themselves (NFS with `hard`) show no error."""

_retries: Counter[str] = Counter()  # of this process, by file and fault
_retries_lock = threading.Lock()

OPENING_BYTES = 128 << 10
"""Bytes of each of the first two calls of a large read from a disk.

Where a read does not continue the last one, Linux starts its readahead anew: what the first call asks for is read in
single pages, in small disk requests, and only then do pages and requests grow. So the first calls ask for little.
Source: Linux 6.18 `mm/readahead.c`, `page_cache_sync_ra`, `page_cache_async_ra`."""


class ByteSource(Protocol):
    """Bytes that several threads can read at a time, by position.

    One member is optional: `is_remote` says that each read takes a request.
    """

    @property
    def path(self) -> str:
        """Name of the source in messages. The opener opens it again by this name."""

    @property
    def nbytes(self) -> int:
        """Size when it was opened."""

    @property
    def version(self) -> str:
        """Text that changes when the bytes change. Looked up anew each time."""

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `offset` on.

        Raises:
            TruncatedFileError: the source ends before the memory is full.
            CheckpointError: the bytes cannot be read.
        """

    def close(self) -> None:
        """Close the source. Closing it again does nothing."""


Opener = Callable[[str], ByteSource]
"""Opens the source at a path. Raises CheckpointError if it cannot."""


class LocalFile:
    """A regular file, read with `preadv`. After a transient fault it is opened again, if it is still the same file.

    Files are not mapped: mapped memory does not count as the process's own, is read page by page on network file
    systems, and raises SIGBUS if the file is lost.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        with _our_errors(path):
            self._descriptor, found = self._retrying(_open_regular, path)
        self.nbytes, self._opened_version = found.st_size, _version(found)
        self._is_on_disk = os.major(found.st_dev) != 0  # file systems in memory and on the network have major number 0

    @property
    def version(self) -> str:
        """Device, inode, size and time of change of the open file."""
        with _our_errors(self.path):
            return _version(self._retrying(os.fstat, self._descriptor))

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        opens_until = offset + 2 * OPENING_BYTES * self._is_on_disk
        with _our_errors(self.path):
            while memory:
                asked = memory[:OPENING_BYTES] if offset < opens_until else memory
                num_bytes = self._retrying(os.preadv, self._descriptor, [asked], offset)
                if num_bytes == 0:
                    raise TruncatedFileError(f"{self.path}: ended at byte {offset} ({memory.nbytes} bytes short)")
                offset += num_bytes
                memory = memory[num_bytes:]

    def close(self) -> None:
        """See `ByteSource`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # it is closed anyway, and nothing was written to it
                os.close(descriptor)

    def _retrying(self, call: Callable[..., T], *args: object) -> T:
        delays = iter(RETRY_DELAYS_S)
        while True:
            try:
                return call(*args)
            except OSError as error:
                delay_s = next(delays, None)
                if error.errno not in TRANSIENT or delay_s is None:
                    raise
                with _retries_lock:
                    _retries[f"{self.path}: {error.strerror}"] += 1
                logger.warning("%s: %s; trying again in %.2f s", self.path, error.strerror, delay_s)
            time.sleep(delay_s)
            with contextlib.suppress(OSError):  # the call itself then says what is wrong
                self._reopen()

    def _reopen(self) -> None:
        """Open the file again under the same descriptor: a stale descriptor never recovers."""
        if self._descriptor < 0:
            return
        descriptor, found = _open_regular(self.path)
        try:
            if _version(found) != self._opened_version:
                raise CheckpointError(
                    f"{self.path}: was replaced or written to while it was read; load again once nobody writes to it"
                )
            os.dup2(descriptor, self._descriptor, inheritable=False)  # other threads use this number
        finally:
            os.close(descriptor)


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    # O_NONBLOCK: opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found


def _version(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def retries() -> Counter[str]:
    """Return how often this process has repeated a call of a local file, by file and fault."""
    with _retries_lock:
        return _retries.copy()


def read_bytes(source: ByteSource, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of a source from `offset` on; fewer if the source ends."""
    found = bytearray(max(0, min(nbytes, source.nbytes - offset)))
    source.read_into(offset, memoryview(found))
    return bytes(found)


def read_small(path: str, max_nbytes: int) -> bytes:
    """Return the bytes of a regular file. Raises CheckpointError if there are more than `max_nbytes`."""
    with contextlib.closing(LocalFile(path)) as source:
        if source.nbytes > max_nbytes:
            raise CheckpointError(f"{path}: has {source.nbytes} bytes, expected at most {max_nbytes}")
        return read_bytes(source, 0, source.nbytes)


@contextlib.contextmanager
def _our_errors(path: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise CheckpointError(f"{path!r}: cannot be opened: {error}") from error
