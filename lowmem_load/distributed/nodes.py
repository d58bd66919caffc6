"""Which ranks run on which node: those that can share memory, and see the same files under the same paths."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass

from lowmem_load.distributed.processes import pid_space

_NAME_DIGITS = 16
"""Hexadecimal, of a digest: two nodes of a million have the same name once in 10**7 jobs."""


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
        """How many nodes there are."""
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
    """Return what is equal for processes that see the same files under the same paths, and each other in /proc.

    Short, for each rank is sent the names of all.

    Args:
        rank: of this process, which is a node of its own where the system does not tell (not Linux).
    """
    try:
        place = f"{pid_space()} {os.readlink('/proc/self/ns/mnt')} {os.stat('/').st_ino} {os.getuid()}"
    except OSError:
        place = ""
    told = place if place and pid_space() else f"rank {rank} on {platform.node()}"
    return hashlib.sha256(told.encode()).hexdigest()[:_NAME_DIGITS]
