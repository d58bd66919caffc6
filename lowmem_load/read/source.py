"""Where bytes come from: local files today. The only place where files of a checkpoint are opened and read.

A `ByteSource` is all that formats and the executor know of a file, so that another kind (ranges over HTTP, an object
store) is one class more. Errors of the operating system become ours here.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lowmem_load.errors import CheckpointError, TruncatedFileError

MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
"""Buffers that one system call fills; it refuses more."""


class ByteSource(Protocol):
    """Bytes that can be read by position, from several threads at a time."""

    @property
    def path(self) -> str:
        """What names it in messages, and opens it again."""

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""

    @property
    def version(self) -> str:
        """What changes when the bytes do: equal as long as they are the same. Looked up anew each time."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes from `offset` on.

        Raises:
            TruncatedFileError: the bytes end before the buffers are full.
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

    Args:
        path: of the file.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        with _our_errors(path):
            # Not blocking: a FIFO would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CheckpointError(f"{path}: is not a regular file")
        self.nbytes = found.st_size

    @property
    def version(self) -> str:
        """Device, inode, size and time of change of the open file."""
        with _our_errors(self.path):
            found = os.fstat(self._descriptor)
        return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ByteSource`."""
        left = [buffer for buffer in buffers if buffer.nbytes]
        with _our_errors(self.path):
            while left:
                num_bytes = os.preadv(self._descriptor, left[:MAX_BUFFERS], offset)
                if num_bytes == 0:
                    short = sum(buffer.nbytes for buffer in left)
                    raise TruncatedFileError(f"{self.path}: ended at byte {offset} ({short} bytes short)")
                offset += num_bytes
                left = _after(left, num_bytes)

    def close(self) -> None:
        """See `ByteSource`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def read_bytes(source: ByteSource, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of a source from `offset` on; fewer only where the source ends.

    Raises:
        CheckpointError: they cannot be read.
    """
    found = bytearray(max(0, min(nbytes, source.nbytes - offset)))
    source.read_into(offset, [memoryview(found)])
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
        self._source.read_into(self._position, [view])
        self._position += view.nbytes
        return view.nbytes


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of `buffers` when the first `num_bytes` of them are full."""
    while buffers and num_bytes >= buffers[0].nbytes:
        num_bytes -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][num_bytes:], *buffers[1:]] if buffers else []


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
