"""Reports of many ranks as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open. Pure.

Format: the Trace Event Format's JSON object; complete events ("X") of microseconds, one process for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def trace_of(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the trace: phases of each rank, files below them, and host memory at the end of each phase."""
    known = list(reports)
    first = min((span["begin_s"] for report in known for span in report["spans"]), default=0.0)
    events = [event for report in known for event in _events(report, first)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(report: Mapping[str, Any], first: float) -> Iterator[dict[str, Any]]:
    rank = report["rank"]
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} ({report['host']})"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": f"load of {report['name']}"}}
    for span in report["spans"]:
        yield _complete(span["phase"], rank, 0, span["begin_s"] - first, span["end_s"] - span["begin_s"], {})
        memory = {"host memory, MiB": span["memory_bytes"] / 2**20}
        yield {"ph": "C", "pid": rank, "name": "memory", "ts": (span["end_s"] - first) * 1e6, "args": memory}
    ends: list[float] = []  # of the last file in each lane
    for path, reads in sorted(report["files"].items(), key=lambda item: item[1]["begin_s"]):
        lane = next((number for number, end in enumerate(ends) if end <= reads["begin_s"]), len(ends))
        ends[lane : lane + 1] = [reads["end_s"]]
        details = {name: reads[name] for name in ("read_bytes", "num_reads", "seconds")}
        name = path.rpartition("/")[2]
        yield _complete(name, rank, 1 + lane, reads["begin_s"] - first, reads["end_s"] - reads["begin_s"], details)


def _complete(
    name: str, rank: int, lane: int, begin_s: float, seconds: float, details: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": rank, "tid": lane, "ts": begin_s * 1e6, "dur": seconds * 1e6,
        "args": dict(details),
    }  # fmt: skip
