"""Storage that is not there: file systems that hold what tests have written, as far as lowmem_load can tell."""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

BLOCK_BYTES = 16 << 10


@contextlib.contextmanager
def on_network() -> Iterator[None]:
    """Inside, all files lie on an NFS."""
    from lowmem_load.files import mounts

    with mock.patch.object(mounts, "mount_of", return_value=mounts.Mount("nfs4", BLOCK_BYTES)):
        yield


@contextlib.contextmanager
def in_small_batches() -> Iterator[None]:
    """Inside, small models are read once in many pieces and batches."""
    from lowmem_load.planning import replicas

    with mock.patch.multiple(replicas, PIECE_BYTES=8 << 10, BATCH_BYTES=64 << 10):
        yield


def fail_once(patch: pytest.MonkeyPatch, suffix: str = "") -> None:
    """Has the next read of a file whose name ends so fail."""
    ordinary, failing = os.preadv, [True]

    def preadv(descriptor: int, *args: Any) -> int:
        if failing and os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            failing.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return ordinary(descriptor, *args)

    patch.setattr(os, "preadv", preadv)


PAGE_BYTES = 4096


class PageCache:
    """Stands for `os` on a node that has read every page it writes to: whole pages go back, when files are synced.

    So do Linux's clients of NFS, unless files are opened with O_DIRECT.
    """

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, bytearray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not flags & os.O_DIRECT:
            self._pages[descriptor] = {}
        return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor not in self._pages:
            return os.pwrite(descriptor, data, offset)
        number, start = divmod(offset, PAGE_BYTES)
        pages = self._pages[descriptor]
        if number not in pages:
            pages[number] = bytearray(os.pread(descriptor, PAGE_BYTES, number * PAGE_BYTES))
        part = bytes(data[: PAGE_BYTES - start])
        pages[number][start : start + len(part)] = part
        return len(part)

    def fsync(self, descriptor: int) -> None:
        for number, page in self._pages.get(descriptor, {}).items():
            os.pwrite(descriptor, page, number * PAGE_BYTES)

    def close(self, descriptor: int) -> None:
        self.fsync(descriptor)
        self._pages.pop(descriptor, None)
        os.close(descriptor)
