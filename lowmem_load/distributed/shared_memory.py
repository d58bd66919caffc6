"""Memory that the ranks of a node share.

It is anonymous (memfd): it has no name that could be left behind, no file system whose size bounds it (that of /dev/shm
is 64 MB in many containers), and ends with the last process that has it. The others open it by way of /proc.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets

_PREFIX = "lowmem_load-"
"""Of the names of memory, which /proc shows."""


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
