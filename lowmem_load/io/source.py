"""Where bytes come from: local files today. The only place where files of a checkpoint are opened and read.

A `ByteSource` is all that formats and the executor know of a file, so that another kind (ranges over HTTP, an object
store) is one class more. Errors of the operating system become ours here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from lowmem_load.errors import CheckpointError, TruncatedFileError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE})
"""What network file systems give while a server is busy or replaced: the same read may succeed a moment later."""

RETRY_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
"""Seconds before each further attempt: 3 in all, for short interruptions, while the other ranks wait. A mount that
waits for its server by itself (NFS, `hard`) shows no error at all."""

OPENING_BYTES = 128 << 10
"""Of each of the first two calls of a large read from a disk. Where a read does not go on from the last one, Linux
begins its readahead anew, in single pages, and as far as the call asks for; from then on the window doubles and the
pages become larger as it is used up (6.18 `mm/readahead.c`, `page_cache_sync_ra`, `page_cache_async_ra`). Single pages
go to the disk in small requests, and cost more each: so it is asked for little, until the window is under way."""


class ByteSource(Protocol):
    """Bytes that can be read by position, from several threads at a time.

    A source that reads again after transient faults may count that, as `num_retries`. One that is far away may fetch
    many small ranges at a time, which are read later, by `prefetch`, given (offset, bytes) of each in ascending order.
    """

    @property
    def path(self) -> str:
        """What names it in messages, and opens it again."""

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""

    @property
    def version(self) -> str:
        """What changes when the bytes do: equal as long as they are the same. Looked up anew each time."""

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill memory, of bytes, with those from `offset` on.

        Raises:
            TruncatedFileError: the bytes end before the memory is full.
            CheckpointError: they cannot be read.
        """

    def close(self) -> None:
        """Give back what it holds open. Calling it again does nothing."""


Opener = Callable[[str], ByteSource]
"""Opens the source that a path names; raises CheckpointError where it cannot."""


class LocalFile:
    """A regular file, read with `preadv`.

    Never mapped: a mapped file hides its memory in RssFile, is read page by page on network file systems, and turns a
    lost file into SIGBUS.

    After a transient fault it is opened again, and read again if it is still the same file.

    Args:
        path: of the file.

    Attributes:
        num_retries: attempts so far that followed a transient fault.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_retries = 0
        self._lock = threading.Lock()
        self._descriptor = -1
        with _our_errors(path):
            self._descriptor, found = self._retrying(_open_regular, path)
        self.nbytes, self._opened_version = found.st_size, file_version(found)
        self._is_on_disk = os.major(found.st_dev) != 0  # as file systems of memory and of the network have it

    @property
    def version(self) -> str:
        """Device, inode, size and time of change of the open file."""
        with _our_errors(self.path):
            return file_version(self._retrying(os.fstat, self._descriptor))

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
            with contextlib.suppress(OSError):  # it is closed all the same, and nothing was written to it
                os.close(descriptor)

    def _retrying(self, call: Callable[..., T], *args: object) -> T:
        """Return what a call returns; one that fails in a way that may pass is repeated."""
        delays = iter(RETRY_DELAYS_S)
        while True:
            try:
                return call(*args)
            except OSError as error:
                delay_s = next(delays, None)
                if error.errno not in TRANSIENT or delay_s is None:
                    raise
                logger.warning("%s: %s; trying again in %.2f s", self.path, error.strerror, delay_s)
            with self._lock:
                self.num_retries += 1
            time.sleep(delay_s)
            with contextlib.suppress(OSError):  # then the call says what is wrong
                self._reopen()

    def _reopen(self) -> None:
        """Let the descriptor stand for the file as opened anew: a stale one never recovers."""
        if self._descriptor < 0:
            return
        descriptor, found = _open_regular(self.path)
        try:
            if file_version(found) != self._opened_version:
                raise CheckpointError(
                    f"{self.path}: was replaced or written to while it was read; load again once nobody writes to it"
                )
            os.dup2(descriptor, self._descriptor, inheritable=False)  # other threads read by this number
        finally:
            os.close(descriptor)


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    # Not blocking: a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found


def file_version(found: os.stat_result) -> str:
    """Return what changes when the bytes of a file do: device, inode, size and time of change."""
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def read_bytes(source: ByteSource, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of a source from `offset` on; fewer only where the source ends.

    Raises:
        CheckpointError: they cannot be read.
    """
    found = bytearray(max(0, min(nbytes, source.nbytes - offset)))
    source.read_into(offset, memoryview(found))
    return bytes(found)


class SourceFile(io.RawIOBase):
    """A source as the file object that `zipfile` wants: read-only and seekable."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__()
        self._source, self._position = source, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position, bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move as any file's `seek`."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.nbytes}[whence]
        if start + offset < 0:
            raise ValueError(f"{self._source.path}: byte {start + offset} lies before the file")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer; zipfile gives these
        """Fill `buffer` as far as the source goes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(view.nbytes, self._source.nbytes - self._position))]
        self._source.read_into(self._position, view)
        self._position += view.nbytes
        return view.nbytes


@contextlib.contextmanager
def _our_errors(path: str) -> Iterator[None]:
    """Make errors of the operating system ours."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise CheckpointError(f"{path!r}: cannot be opened: {error}") from error
