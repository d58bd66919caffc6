"""The tables of docs/pipelines, written from results.json: `python -m benchmarks.frameworks.page`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.frameworks.cases import Case, read_cases
from benchmarks.frameworks.compare import is_equal
from benchmarks.frameworks.results import read_results
from tests.ranks import REPO

FOLDER = REPO / "docs" / "pipelines"
ALL = "all"
"""The marker of the table of all frameworks; that of a framework is its name."""
MARKED = re.compile(r"(<!-- written by benchmarks/frameworks: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Results = Mapping[str, Mapping[str, Any]]


def write() -> None:
    """Replace what is between the markers of the pages."""
    cases, results = read_cases(), read_results()
    for path in sorted(FOLDER.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = with_tables(before, cases, results)
        if after != before:
            path.write_text(after, encoding="utf-8")


def with_tables(text: str, cases: Sequence[Case], results: Results) -> str:
    """Return a page with its tables as the results have them.

    Raises:
        ValueError: a marker names no framework.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[2]
        chosen = [case for case in cases if name in (ALL, case.framework)]
        if not chosen:
            raise ValueError(f"no case is of the framework {name!r}")
        table = summary(chosen, results) if name == ALL else framework(chosen, results)
        return f"{match[1]}\n{table}\n\n{match[4]}"

    return MARKED.sub(replaced, text)


def summary(cases: Sequence[Case], results: Results) -> str:
    """Return one row for each case: whether it is equal, and what the load takes."""
    rows = [["framework", "case", "model", "losses and saved tensors", "load peak, stock", "load peak, lowmem_load"]]
    for case in cases:
        result = results.get(case.name, {})
        rows.append([case.framework, case.what, case.model, verdict(result), *_peaks(result, "load", bold=True)])
    return _markdown(rows)


def framework(cases: Sequence[Case], results: Results) -> str:
    """Return the versions that the cases of a framework ran with, a row for each, and why which differ."""
    header = ["case", "model", "losses, stock", "losses, lowmem_load", "saved tensors", "loads streamed"]
    rows = [[*header, *(f"{name}, {way}" for name in ("load", "load, anon", "run, anon") for way in ("stock", "ours"))]]
    for case in cases:
        result = results.get(case.name, {})
        if "losses" not in result:
            rows.append([case.what, case.model, verdict(result), *[""] * (len(rows[0]) - 3)])
            continue
        peaks = [cell for name in ("load", "load anon", "run anon") for cell in _peaks(result, name)]
        rows.append([case.what, case.model, *_losses(result), _saved(result), str(result["streamed loads"]), *peaks])
    reasons = [f"- {case.what}: {case.differs}" for case in cases if case.differs]
    return "\n\n".join([*_versions(cases, results), _markdown(rows), *(["\n".join(reasons)] if reasons else [])])


def verdict(result: Mapping[str, Any]) -> str:
    """Return in a few words what a case came to."""
    if not result:
        return "not run yet"
    if "error" in result:
        return f"failed: {_cell(result['error'])}"
    if not result["streamed loads"]:
        return "nothing was streamed"
    if is_equal(result):
        return f"equal, {result['saved']['tensors']} tensors"
    return "; ".join([f"losses: {_losses(result)[1]}", f"tensors: {_saved(result)}"])


def _losses(result: Mapping[str, Any]) -> tuple[str, str]:
    losses = result["losses"]
    return " ".join(f"{loss:.5g}" for loss in losses["stock"]), losses["first difference"] or "equal"


def _saved(result: Mapping[str, Any]) -> str:
    saved = result["saved"]
    number = len(saved["different"])
    return f"{number} of {saved['tensors']} differ" if number else f"{saved['tensors']}, equal"


def _peaks(result: Mapping[str, Any], name: str, *, bold: bool = False) -> list[str]:
    if "peaks" not in result:
        return ["", ""]
    stock, ours = (f"{peak:.0f}" for peak in result["peaks"][name])
    return [stock, f"**{ours}**" if bold else ours]


def _versions(cases: Sequence[Case], results: Results) -> list[str]:
    found: dict[str, str] = {}
    for case in cases:
        result = results.get(case.name, {})
        if "versions" in result:
            text = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
            found[text] = max(result["date"], found.get(text, ""))
    return [f"{text}; {date}." for text, date in found.items()]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    write()
