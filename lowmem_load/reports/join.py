"""What the reports of many ranks say together: who was slow, and which file. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_load.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. Seconds and bytes.

    Attributes:
        rank, host: whose report it is.
        seconds: of all phases together.
        phases: seconds by phase.
        read_bytes, num_reads: see `LoadReport`.
        grown_bytes: host memory at the most, above the start.
    """

    rank: int
    host: str
    seconds: float
    phases: Mapping[str, float]
    read_bytes: int
    num_reads: int
    grown_bytes: int


@dataclass(frozen=True, slots=True)
class File:
    """One file, as all ranks read it. `bytes_per_s` is of one read at a time; its slowest rank read slowest so."""

    path: str
    read_bytes: int
    num_reads: int
    seconds: float
    bytes_per_s: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, middle and most of a figure over the ranks."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return that of some values, of which there is at least one."""
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True, slots=True)
class Joined:
    """One load, of all ranks whose reports are there.

    Attributes:
        name, load: what was loaded, and the number of the load in its processes.
        world_size: of the load.
        ranks: by rank.
        missing_ranks: whose reports are not there.
        wall_s: from the first rank's begin to the last one's end; of clocks that agree.
        begin_spread_s: between the first rank's begin and the last one's.
        files: slowest first.
        sizes: how many reads fetched at most so many bytes, a power of two.
        spreads: of seconds by phase, and of bytes read.
    """

    name: str
    load: int
    world_size: int
    ranks: tuple[Rank, ...]
    missing_ranks: tuple[int, ...]
    wall_s: float
    begin_spread_s: float
    files: tuple[File, ...]
    sizes: Mapping[int, int]
    spreads: Mapping[str, Spread]

    @property
    def slowest(self) -> Rank:
        """The rank that read for the longest time: in other phases ranks wait for each other."""
        return max(self.ranks, key=lambda rank: rank.phases.get("read", 0.0))


def join(reports: Iterable[Mapping[str, Any]]) -> list[Joined]:
    """Return the loads that reports are of, in order. Loads of other numbers of ranks are of other jobs.

    Raises:
        ConfigError: two reports are of the same rank of a load.
    """
    loads: dict[tuple[int, str, int], dict[int, Mapping[str, Any]]] = {}
    for report in reports:
        which = report["load"], report["name"], report["world_size"]
        ranks = loads.setdefault(which, {})
        if report["rank"] in ranks:
            raise ConfigError(
                f"two reports of rank {report['rank']} of load {which[0]} of {which[1]}, {which[2]} ranks: name the "
                "reports of one job only"
            )
        ranks[report["rank"]] = report
    return [_joined([ranks[rank] for rank in sorted(ranks)]) for _, ranks in sorted(loads.items())]


def _joined(reports: Sequence[Mapping[str, Any]]) -> Joined:
    ranks = tuple(_rank(report) for report in reports)
    begins = [min(span["begin_s"] for span in report["spans"]) for report in reports if report["spans"]]
    ends = [max(span["end_s"] for span in report["spans"]) for report in reports if report["spans"]]
    phases = dict.fromkeys(phase for rank in ranks for phase in rank.phases)
    spreads = {phase: Spread.of([rank.phases.get(phase, 0.0) for rank in ranks]) for phase in phases}
    sizes: dict[int, int] = {}
    for report in reports:
        for reads in report["files"].values():
            for nbytes, number in reads["sizes"].items():
                sizes[int(nbytes)] = sizes.get(int(nbytes), 0) + number
    world_size = reports[0]["world_size"]
    return Joined(
        name=reports[0]["name"],
        load=reports[0]["load"],
        world_size=world_size,
        ranks=ranks,
        missing_ranks=tuple(sorted(set(range(world_size)) - {rank.rank for rank in ranks})),
        wall_s=max(ends) - min(begins) if begins else 0.0,
        begin_spread_s=max(begins) - min(begins) if begins else 0.0,
        files=tuple(sorted(_files(reports), key=lambda file: file.bytes_per_s)),
        sizes=dict(sorted(sizes.items())),
        spreads={**spreads, "bytes read": Spread.of([float(rank.read_bytes) for rank in ranks])},
    )


def _rank(report: Mapping[str, Any]) -> Rank:
    grown = sum(report["peak_memory"].values()) - sum(report["start_memory"].values())
    return Rank(
        report["rank"],
        report["host"],
        sum(report["seconds"].values()),
        report["seconds"],
        report["read_bytes"],
        report["num_reads"],
        grown,
    )


def _files(reports: Sequence[Mapping[str, Any]]) -> list[File]:
    by_path: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for report in reports:
        for path, reads in report["files"].items():
            by_path.setdefault(path, []).append((report["rank"], reads))
    files = []
    for path, reads_of in by_path.items():
        nbytes, seconds = (sum(reads[name] for _, reads in reads_of) for name in ("read_bytes", "seconds"))
        slowest, _ = min(reads_of, key=lambda item: _rate(item[1]["read_bytes"], item[1]["seconds"]))
        number = sum(reads["num_reads"] for _, reads in reads_of)
        files.append(File(path, nbytes, number, seconds, _rate(nbytes, seconds), slowest))
    return files


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / max(seconds, 1e-9)
