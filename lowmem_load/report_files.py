"""Reports as JSON files: each rank writes its own where the environment says; `join` makes one table of them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowmem_load.errors import ConfigError
from lowmem_load.report import REPORT_DIR, LoadReport

FORMAT = 2
"""Version of the files; raised when their meaning changes."""

_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("load", "rank", "world_size", "read_bytes", "num_reads"), int),
    **dict.fromkeys(("name", "host"), str),
    **dict.fromkeys(("seconds", "peak_memory"), dict),
}
"""What `join` reads of a report."""

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)


def write_report(report: LoadReport) -> Path | None:
    """Write a report where the environment says; return the file. One that cannot be written is only logged."""
    folder, number = os.environ.get(REPORT_DIR), next(_numbers)
    if not folder:
        return None
    model = re.sub(r"[^\w.-]+", "-", os.path.basename(report.name.rstrip("/"))).strip("-.") or "model"
    path = Path(folder) / f"load{number:03}-{model}-rank{report.rank:05}.json"
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        part.write_text(json.dumps(as_dict(report, number), default=str) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        logger.warning("%s: the report of the load of %s cannot be written: %s", path, report.name, error)
        return None
    return path


def as_dict(report: LoadReport, number: int) -> dict[str, Any]:
    """Return a report as a dict, with the number of the load in its process and the host."""
    fields = {name: value for name, value in asdict(report).items() if not name.startswith("_")}
    return {"format": FORMAT, "load": number, "host": platform.node(), **fields}


def read_reports(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the reports in files and folders; raise ConfigError where there are none, or one cannot be read."""
    files = [file for each in paths for file in (sorted(each.glob("*.json")) if each.is_dir() else [each])]
    if not files:
        raise ConfigError(f"no reports: set {REPORT_DIR} for a job, and name that folder")
    return [_read(path) for path in files]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a report: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: is no report of a load, or one of another release (format {FORMAT} is expected)")
    for key, kind in _KINDS.items():
        if not isinstance(found.get(key), kind):
            raise ConfigError(f"{path}: is no whole report: {key} is {found.get(key)!r:.80}")
    return found


@dataclass(frozen=True, slots=True)
class Rank:
    """The figures of one rank, as in `LoadReport`; `peak_bytes` of host memory, above the start."""

    rank: int
    host: str
    seconds: Mapping[str, float]
    read_bytes: int
    num_reads: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Load number `load` of the processes: ranks whose reports are there, slowest reader first (others wait for it)."""

    name: str
    load: int
    world_size: int
    ranks: list[Rank]
    missing_ranks: list[int]


def join(reports: Iterable[Mapping[str, Any]]) -> list[Joined]:
    """Return the loads that reports are of, in order; raise ConfigError for two of the same rank and load."""
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
