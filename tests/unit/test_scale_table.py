"""The table for the documentation has the rows of a run, failed ones as such, and not what was measured to be drawn."""

from __future__ import annotations

from typing import Any

from benchmarks.scale_table import table


def test_rows_are_those_of_the_run() -> None:
    row = {"model": "deepseek-v3-fp8", "rank": 517, "world_size": 1024, "num_layers": None, "is_row": True}
    figures: dict[str, Any] = {
        "num_tensors": 91_991,
        "phases_s": {"describe": 4.96, "plan": 0.5},
        "over_bytes": 67 << 20,
        "partition_bytes": 1250 << 20,
        "needed_bytes": 1000,
        "read_bytes": 7740,
        "touched": {"num_reads": 4602},
    }
    failed = {**row, "version": "before", "failed": "took more than 200 s"}
    drawn = {**row, "version": "now", "is_row": False, **figures}
    _, _, *lines = table([failed, {**row, "version": "now", **figures}, drawn])
    assert lines == [
        "| deepseek-v3-fp8 | 91,991 | 517/1024 | before | failed: took more than 200 s |  |  |  |  |  |  |",
        "| deepseek-v3-fp8 | 91,991 | 517/1024 | now | 5.0 | 0.5 |  | 67 | 1,250 | 4,602 | 7.74 |",
    ]
