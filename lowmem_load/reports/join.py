"""What the reports of many ranks say together: who was slow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_load.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank.

    Attributes:
        rank, host: whose report it is.
        seconds: by phase.
        read_bytes, num_reads: see `LoadReport`.
        peak_bytes: host memory at the peak, above the start.
    """

    rank: int
    host: str
    seconds: Mapping[str, float]
    read_bytes: int
    num_reads: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Joined:
    """One load, of all ranks whose reports are there.

    Attributes:
        name, load: what was loaded, and the number of the load in its processes.
        world_size: of the load.
        ranks: those that read for the longest time first: in other phases ranks wait for each other.
        missing_ranks: whose reports are not there.
    """

    name: str
    load: int
    world_size: int
    ranks: list[Rank]
    missing_ranks: list[int]


def join(reports: Iterable[Mapping[str, Any]]) -> list[Joined]:
    """Return the loads that reports are of, in order. Loads of other numbers of ranks are of other jobs.

    Raises:
        ConfigError: two reports are of the same rank of a load.
    """
    loads: dict[tuple[int, str, int], dict[int, Rank]] = {}
    for report in reports:
        which = report["load"], report["name"], report["world_size"]
        ranks, rank = loads.setdefault(which, {}), report["rank"]
        if rank in ranks:
            raise ConfigError(
                f"two reports of rank {rank} of load {which[0]} of {which[1]}, {which[2]} ranks: name the reports of "
                "one job only"
            )
        peak_bytes = sum(report["peak_memory"].values())
        ranks[rank] = Rank(
            rank, report["host"], report["seconds"], report["read_bytes"], report["num_reads"], peak_bytes
        )
    return [
        Joined(
            *(name, load, world_size),
            ranks=sorted(ranks.values(), key=lambda each: (-each.seconds.get("read", 0.0), each.rank)),
            missing_ranks=sorted(set(range(world_size)) - set(ranks)),
        )
        for (load, name, world_size), ranks in sorted(loads.items())
    ]
