"""Print a run of `benchmarks.scale` as a table for the documentation: `python -m benchmarks.scale_table FILE.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published import MODELS

MIB = 2**20

COLUMNS = (
    "model",
    "tensors",
    "rank/world",
    "",
    "describe",
    "plan",
    "read",
    "over",
    "partition",
    "reads",
    "read/needed",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_table", description=__doc__)
    parser.add_argument("results", type=Path, help="what `python -m benchmarks.scale --json` has written")
    found = json.loads(parser.parse_args(arguments).results.read_text(encoding="utf-8"))
    print("\n".join(table(found["rows"])))


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the rows; those that were only drawn are left out."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in rows:
        if row["is_row"]:
            what = [row["model"], f"{MODELS[row['model']].num_tensors:,}", f"{row['rank']}/{row['world_size']}"]
            cells = [f"failed: {row['failed']}", *[""] * 6] if "failed" in row else _figures(row)
            yield f"| {' | '.join([*what, row['version'], *cells])} |"


def _figures(row: dict[str, Any]) -> list[str]:
    seconds = [row["phases_s"].get(phase) for phase in ("describe", "plan", "read")]
    return [
        *("" if each is None else f"{each:.1f}" for each in seconds),
        *(f"{row[name] / MIB:,.0f}" for name in ("over_bytes", "partition_bytes")),
        f"{row['touched']['num_reads']:,}",
        f"{row['read_bytes'] / row['needed_bytes']:.2f}",
    ]


if __name__ == "__main__":
    main()
