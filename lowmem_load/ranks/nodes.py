"""Which ranks run on which node: those that can share memory, and see the same files under the same paths."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lowmem_load.ranks.group import RankGroup
from lowmem_load.ranks.life import pid_space

T = TypeVar("T")

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

    Short, for every rank is sent those of all.

    Args:
        rank: of this process, which is a node of its own where the system does not tell (not Linux).
    """
    try:
        place = f"{pid_space()} {os.readlink('/proc/self/ns/mnt')} {os.stat('/').st_ino} {os.getuid()}"
    except OSError:
        place = ""
    told = place if place and pid_space() else f"rank {rank} on {platform.node()}"
    return hashlib.sha256(told.encode()).hexdigest()[:_NAME_DIGITS]


def meet(ranks: RankGroup, said: T, exchange: Callable[[Any], list[Any]] | None = None) -> tuple[Nodes, list[T]]:
    """Return which ranks share a node, and what each rank says. Collective: one exchange.

    The ranks of the fake backend have no real others: each is a node of its own.

    Args:
        ranks: that meet.
        said: by this rank.
        exchange: given what this rank tells, returns what each does, by rank; `all_gather_object` by default.
    """
    gathered = (exchange or ranks.all_gather_object)((node_name(ranks.rank), said))
    names = [f"rank {rank}" if ranks.is_fake else name for rank, (name, _) in enumerate(gathered)]
    return Nodes(ranks.rank, tuple(names)), [each for _, each in gathered]
