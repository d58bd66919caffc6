"""Which machine, node and process a rank is, and memory that the ranks of a node share.

Ranks of a node see the same files under equal paths, and each other in /proc. The memory is an anonymous file (memfd):
no name is left behind, no file system bounds its size (/dev/shm has 64 MB in many containers), and it ends with the
last process that has it open. Other processes open it through /proc.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import mmap
import os
import platform
import secrets
from pathlib import Path
from typing import NamedTuple

_PREFIX = "lowmem_load-"
"""Beginning of the names of memory, which /proc shows."""

_NAME_DIGITS = 16
"""Hexadecimal digits of a node's name: two of a million nodes have the same name once in 10**7 jobs."""


def node_name(rank: int) -> str:
    """Return a name that is equal for processes that see the same files under equal paths, and each other in /proc.

    It is short, since all names are sent to each rank.

    Args:
        rank: of this process. Where the system does not tell nodes apart (not Linux), each rank is its own node.
    """
    try:
        place = f"{pid_space()} {os.readlink('/proc/self/ns/mnt')} {os.stat('/').st_ino} {os.getuid()}"
    except OSError:
        place = ""
    name = place if place and pid_space() else f"rank {rank} on {platform.node()}"
    return hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]


def machine() -> str:
    """Return a name of this boot of this machine. On one machine, files of equal version are the same file."""
    return boot_id() or platform.node()


@functools.cache
def pid_space() -> str:
    """Return a name of the machine or container in which this process's number holds; "" if the system has none."""
    try:
        return boot_id() and f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or hidden
        return ""


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of this machine; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


class SharedMemory(NamedTuple):
    """Where the processes of a node find memory that one of them has made."""

    pid: int
    descriptor: int
    name: str  # unique, so that who opens it can see that it is the right one


def make_memory(nbytes: int) -> SharedMemory:
    """Make shared memory. All of it is allocated, so that no access raises SIGBUS.

    Raises:
        OSError: the system has none, or too little.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "not on this system")
    name = secrets.token_hex(4)
    descriptor = os.memfd_create(_PREFIX + name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedMemory(os.getpid(), descriptor, name)


def map_memory_of(place: SharedMemory, nbytes: int) -> mmap.mmap:
    """Return memory that another process of this user on this machine has made.

    Raises:
        OSError: it cannot be opened, or the descriptor is that of another file: the process may have closed the memory
            and opened a file, or be one of another machine.
        ValueError: it is smaller than `nbytes`.
    """
    # The name is checked before, too: opening a pipe may take for ever, and opening a device may have effects.
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    _check_name(path, place.name)
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_name(f"/proc/self/fd/{opened}", place.name)
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _check_name(path: str, name: str) -> None:
    if not os.readlink(path).startswith(f"/memfd:{_PREFIX}{name}"):
        raise OSError(errno.ESTALE, f"{path} is another file, expected memory {name}")
