"""Memory that the ranks of a node share.

It is an anonymous file (memfd): no name is left behind, no file system bounds its size (/dev/shm has 64 MB in many
containers), and it ends with the last process that has it open. Other processes open it through /proc.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets

_PREFIX = "lowmem_load-"
"""Beginning of the names of memory, which /proc shows."""


def new_name() -> str:
    """Return a unique name for memory, by which a process that opens it can see that it is the right one."""
    return secrets.token_hex(4)


def make_memory(name: str, nbytes: int = 0) -> int:
    """Return the descriptor of new shared memory. All of it is allocated, so that no access raises SIGBUS.

    Raises:
        OSError: the system has none, or too little.
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
    """Return a descriptor of memory that another process of this user on this machine has made.

    Raises:
        OSError: it cannot be opened, or the descriptor is that of another file: the process may have closed the memory
            and opened a file, or be one of another machine.
    """
    # The name is checked before, too: opening a pipe may take for ever, and opening a device may have effects.
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
        ValueError: it is smaller than `nbytes`.
    """
    opened = open_memory(pid, descriptor, name, os.O_RDWR)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _check_name(path: str, name: str) -> None:
    if not os.readlink(path).startswith(f"/memfd:{_PREFIX}{name}"):
        raise OSError(errno.ESTALE, f"{path} is another file, expected memory {name}")
