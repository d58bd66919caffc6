"""Which machine and node a rank is on. Ranks of a node see the same files under equal paths."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

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
