"""Which machine, node and process a rank is. Ranks of a node share memory and see the same files under equal paths."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_NAME_DIGITS = 16
"""Hexadecimal digits of a node's name: two of a million nodes have the same name once in 10**7 jobs."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that the ranks of a group run on.

    Attributes:
        rank: of this process in the group.
        names: of the node of each rank, by rank.
    """

    rank: int
    names: tuple[str, ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.names))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself included, ascending."""
        return tuple(rank for rank, name in enumerate(self.names) if name == self.names[self.rank])

    @property
    def first(self) -> int:
        """The lowest rank of this rank's node."""
        return self.names.index(self.names[self.rank])


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


def start_time(pid: int) -> str | None:
    """Return when a process of this machine started; "" if it has ended; None if that cannot be found out."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # no descriptor is free, say
        return None
    return "" if fields[0] in "ZX" else fields[19]  # state and starttime, see proc(5)
