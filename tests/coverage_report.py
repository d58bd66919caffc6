"""What the tests run of the package, by folder, and each function that they do not run whole: `make coverage`.

Called with the file that `coverage json` writes; ends with 1 where lines or branches are below `LEAST_PERCENT`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

LEAST_PERCENT = 92.0
"""Of the lines, and of the branches, of the package."""


def percent(covered: int, of: int) -> float:
    return 100.0 * covered / of if of else 100.0


def spell(lines: Iterable[int]) -> str:
    """Returns line numbers in order, what follows one another as `first-last`."""
    runs = groupby(enumerate(sorted(lines)), key=lambda pair: pair[1] - pair[0])
    spans = [[line for _, line in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def table(files: dict[str, Any]) -> list[str]:
    """Returns a line of Markdown for each folder, and one for all."""
    keys = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * len(keys))
    for path, found in files.items():
        folder = "/".join(Path(path).parts[:2]) if len(Path(path).parts) > 2 else Path(path).parts[0]
        for name in (folder, "all"):
            sums[name] = [old + found["summary"][key] for old, key in zip(sums[name], keys, strict=True)]
    rows = ["| folder | lines | % | branches | % |", "|---|---:|---:|---:|---:|"]
    for folder in sorted(sums, key=lambda name: (name == "all", name)):
        lines, num_lines, branches, num_branches = sums[folder]
        rows.append(
            f"| {folder} | {lines}/{num_lines} | {percent(lines, num_lines):.1f} "
            f"| {branches}/{num_branches} | {percent(branches, num_branches):.1f} |"
        )
    return rows


def gaps(path: str, found: dict[str, Any]) -> list[str]:
    """Returns a line for each function of a file of which something is not run: which lines, which ways on."""
    rows = []
    for name, function in found["functions"].items():
        lines = set(function["missing_lines"])
        # A way from or to a line that is not run says nothing new. A negative line is the end of the function.
        ways = [(a, b) for a, b in function["missing_branches"] if a not in lines and b not in lines]
        parts = [f"lines {spell(lines)}"] if lines else []
        parts += [f"from {start} to {'the end' if end < 0 else end}" for start, end in ways]
        if parts:
            rows.append(f"{path} {name or 'module'}: {'; '.join(parts)}")
    return rows


def main() -> int:
    measured = json.loads(Path(sys.argv[1]).read_text())
    files, totals = measured["files"], measured["totals"]
    print("\n".join(row for path, found in files.items() for row in gaps(path, found)))
    print("\n" + "\n".join(table(files)))
    lines = percent(totals["covered_lines"], totals["num_statements"])
    branches = percent(totals["covered_branches"], totals["num_branches"])
    if min(lines, branches) < LEAST_PERCENT:
        print(f"lines {lines:.1f} %, branches {branches:.1f} %: at least {LEAST_PERCENT} % of each are asked for")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
