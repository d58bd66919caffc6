"""Byte sources: what formats and the executor know of a file. `LocalFile` is the source for files on disk.

Errors of the operating system become errors of this package here.

[Note: one descriptor] Header, sample and data of a file are read from one open source, which stays open as long as
the load or the lazy model. If another file is renamed over it, or it is deleted, the load reads the old one to its end.
If it is written to in place, that is an error. The limit of open files of the process is raised for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import resource
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.locks import ForkedLock
from lowmem_load.planning.load_plan import PlannedFile

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE})
"""Errors of network file systems while a server is busy or restarts. The same read may succeed a moment later."""

RETRY_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
"""Seconds before each further attempt: 3 s in all, as the other ranks wait meanwhile. Mounts that wait for their server
by themselves (NFS with `hard`) show no error."""

_retries: Counter[str] = Counter()  # of this process, by file and fault
_retries_lock = ForkedLock()

OPENING_BYTES = 128 << 10
"""Bytes of each of the first two calls of a large read from a disk.

Where a read does not continue the last one, Linux starts its readahead again: what the first call asks for is read in
single pages, in small disk requests, and only then do pages and requests grow. So the first calls ask for little.
Source: Linux 6.18 `mm/readahead.c`, `page_cache_sync_ra`, `page_cache_async_ra`."""

DIRECT_BYTES = 2 << 20
"""Bytes of a read past the page cache, of which each thread that makes them has a buffer: a huge page.

A disk of a virtual machine took 3.1 s for 3 GB into small pages, and 1.25 s into huge ones."""

MIN_DIRECT_BYTES = 256 << 10
"""Fewest bytes that are read past the page cache. Smaller reads gain from what was read ahead."""

ALIGNMENT = 4096
"""What place in the file, size and memory of a read past the page cache are multiples of: disks ask for 512 or 4096."""

SPARE_FILES = 256
"""Files that a process may open in addition to those of checkpoints."""


class ByteSource(Protocol):
    """Bytes that several threads can read at a time, by position.

    One member is optional: `is_remote` says that each read takes a request.
    """

    path: str
    """Name of the source in messages. The opener opens it again by this name."""
    nbytes: int
    """Size when it was opened."""

    @property
    def version(self) -> str:
        """Text that changes when the bytes change. It is looked up again each time."""

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `offset` on.

        Raises TruncatedFileError if there are fewer, and CheckpointError if they cannot be read.
        """

    def close(self) -> None:
        """Close the source, which never fails. Closing it again does nothing."""


Opener = Callable[[str], ByteSource]
"""Opens the source at a path. Raises CheckpointError if it cannot."""


class _DirectBuffer(threading.local):
    """Memory of a thread for reads past the page cache: a huge page, if the system gives one."""

    def __init__(self) -> None:
        mapped = mmap.mmap(-1, 2 * DIRECT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # this system has none
            mapped.madvise(mmap.MADV_HUGEPAGE)
        start = -_address(memoryview(mapped)) % DIRECT_BYTES
        self.memory = memoryview(mapped)[start : start + DIRECT_BYTES]
        self.address = _address(self.memory)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


_buffer = _DirectBuffer()


class LocalFile:
    """A regular file, read with `preadv`, opened again after a transient fault, and closed when nobody refers to it.

    Files are not mapped, because mapped memory does not count as the process's own, is read page by page on network
    file systems, and raises SIGBUS if the file is lost.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = self._direct = -1  # the latter reads past the page cache
        self._descriptor, status = self._call(_open_regular, path)
        _leave_room(self._descriptor)
        self._is_read_no_further = False
        self.nbytes, self._opened_version = status.st_size, _version(status)
        self._is_on_disk = os.major(status.st_dev) != 0  # file systems in memory and on the network have major number 0

    @property
    def version(self) -> str:
        """Device, inode, size and time of change of the open file."""
        return _version(self._call(os.fstat, self._descriptor))

    @property
    def path_of_open(self) -> str:
        """A path by which this process opens this file, even after another one was renamed over it."""
        return f"/proc/self/fd/{self._descriptor}"

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `ByteSource`."""
        if self._direct >= 0 and memory.nbytes >= MIN_DIRECT_BYTES:
            done = self._read_past_cache(offset, memory)
            offset, memory = offset + done, memory[done:]
        opens_until = offset + 2 * OPENING_BYTES * self._is_on_disk
        while memory:
            part = memory[:OPENING_BYTES] if offset < opens_until else memory
            num_bytes = self._call(os.preadv, self._descriptor, [part], offset)
            if num_bytes == 0:
                raise TruncatedFileError(f"{self.path}: ended at byte {offset} ({memory.nbytes} bytes short)")
            offset += num_bytes
            memory = memory[num_bytes:]

    def read_no_further(self) -> None:
        """Have the system read nothing ahead, because another node needs what follows, and this one may not.

        EFS reads 15 MiB ahead, Lustre more. Only for many threads: 4 that read a FUSE folder which answers after 5 ms
        took 2.0 s for 128 MiB instead of 1.3 s, and 16 took 0.8 s either way.
        """
        self._is_read_no_further = True
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def bypass_cache(self) -> bool:
        """Have large reads leave the page cache as it is. Returns False, and does nothing, where that cannot be."""
        if not self._is_on_disk:  # mounts of networks and memory were not measured
            return False
        descriptor = -1
        try:
            descriptor = os.open(self.path_of_open, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            os.preadv(descriptor, [_buffer.memory[:ALIGNMENT]], 0)
        except OSError:  # file systems refuse the one or the other
            if descriptor >= 0:
                os.close(descriptor)
            return False
        self._direct = descriptor
        _leave_room(descriptor)
        return True

    def _read_past_cache(self, offset: int, memory: memoryview) -> int:
        """Fill memory from its start on, and return how many bytes. What an error leaves is for an ordinary read."""
        address, done = _address(memory), 0
        with contextlib.suppress(OSError):
            while done < memory.nbytes:
                before = (offset + done) % ALIGNMENT
                nbytes = min(DIRECT_BYTES, -(-(before + memory.nbytes - done) // ALIGNMENT) * ALIGNMENT)
                found = os.preadv(self._direct, [_buffer.memory[:nbytes]], offset + done - before) - before
                if found <= 0:
                    break
                found = min(found, memory.nbytes - done)
                ctypes.memmove(address + done, _buffer.address + before, found)  # other threads run meanwhile
                done += found
        return done

    def close(self) -> None:
        """See `ByteSource`."""
        descriptors = self._descriptor, self._direct
        self._descriptor = self._direct = -1  # first: these numbers may soon be those of other files
        for descriptor in descriptors:
            if descriptor >= 0:
                with contextlib.suppress(OSError):  # it is closed anyway, and nothing was written to it
                    os.close(descriptor)

    __del__ = close

    def _call(self, call: Callable[..., T], *args: object) -> T:
        """Return the result of a system call. CheckpointError: it fails, also after some time."""
        delays = iter(RETRY_DELAYS_S)
        while True:
            try:
                return call(*args)
            except CheckpointError:  # which is a ValueError
                raise
            except ValueError as error:  # a NUL in the path
                raise CheckpointError(f"{self.path!r}: cannot be opened: {error}") from error
            except OSError as error:
                delay_s = next(delays, None)
                if error.errno not in TRANSIENT or delay_s is None:
                    advice = "; raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
                    reason = error.strerror or error
                    raise CheckpointError(f"{self.path}: cannot be read: {reason}{advice}") from error
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
        descriptor, status = _open_regular(self.path)
        try:
            if _version(status) != self._opened_version:
                raise CheckpointError(
                    f"{self.path}: was replaced or written to while it was read; load again once nobody writes to it"
                )
            os.dup2(descriptor, self._descriptor, inheritable=False)  # other threads use this number
            if self._is_read_no_further:  # which was said of the stale one
                self.read_no_further()
        finally:
            os.close(descriptor)


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    # O_NONBLOCK: opening a FIFO would wait for a writer. With it, reads of a file that is on tape would not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def _leave_room(descriptor: int) -> None:
    """Raise the limit of open files if this process may open fewer than `SPARE_FILES` others, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and descriptor + SPARE_FILES > soft:
        wanted = 2 * (descriptor + SPARE_FILES)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # more than the system allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _version(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def retries() -> Counter[str]:
    """Return how often this process has repeated a call of a local file, by file and fault."""
    with _retries_lock:
        return _retries.copy()


def read_bytes(source: ByteSource, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of a source from `offset` on; fewer if the source ends."""
    content = bytearray(max(0, min(nbytes, source.nbytes - offset)))
    source.read_into(offset, memoryview(content))
    return bytes(content)


# -- the open files of a load -----------------------------------------------------------------------------------------


class OpenSources:
    """Opens sources when they are first read, and keeps them open. Any number of threads may use it.

    A source must keep the version that was planned against, or that it had when it was opened.
    """

    def __init__(self, open_source: Opener) -> None:
        self._opener = open_source
        self.files: dict[str, PlannedFile] = {}  # that were planned against, by path
        self._versions: dict[str, str] = {}
        self._sources: dict[str, ByteSource] = {}

    def expect(self, files: Iterable[PlannedFile]) -> None:
        """Refuse files that have another version than was planned against. Raises CheckpointError if one had before."""
        for file in files:
            self._check(file.path, file.version)
            self.files[file.path] = file

    def opened(self, path: str) -> ByteSource:
        """Return the open source of a path. Raises CheckpointError if it cannot be opened or has changed."""
        found = self._sources.get(path)
        if found is None:
            source = self._opener(path)
            try:
                self._check(path, source.version)
                found = self._sources.setdefault(path, source)
            finally:
                if found is not source:  # it has changed, or another thread was first
                    source.close()
        return found

    def check_unchanged(self, paths: Iterable[str] | None = None) -> None:
        """Raise CheckpointError if an open source, of these paths or of all, has changed."""
        for path in list(self._sources) if paths is None else paths:
            if (source := self._sources.get(path)) is not None:
                self._check(path, source.version)

    def close(self) -> None:
        """Close all sources without a check. Nobody may read them any more."""
        while self._sources:  # a thread that a failed load has left may add one meanwhile
            self._sources.popitem()[1].close()

    def _check(self, path: str, version: str) -> None:
        if self._versions.setdefault(path, version) != version:
            raise CheckpointError(
                f"{path}: was replaced or written to after its header was read; load again once nobody writes to it"
            )
