"""The results of cases, results.json, and their table in RESULTS.md."""

import datetime as dt
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import markdown, write_docs
from tests.frameworks.cases import Case, read_cases
from tests.frameworks.compare import is_equal

RESULTS = Path(__file__).with_name("results.json")
FILE = Path(__file__).with_name("RESULTS.md")
COLUMNS = ("framework", "case", "model", "losses and saved tensors", "load peak, default", "lowmem_load")
_UNTOLD = ("python", "peft", "datasets")
"""Packages whose releases only results.json has."""

Results = Mapping[str, Mapping[str, Any]]


def read_results() -> dict[str, dict[str, Any]]:
    """Return the results by name of the case, in the order of cases.yaml."""
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def keep(case: Case, result: Mapping[str, Any]) -> None:
    """Replace the result of a case, here and on the page; those of cases that cases.yaml no longer has go."""
    results = read_results()
    when = {"date": dt.datetime.now(dt.UTC).date().isoformat()}
    results[case.name] = {**when, "lowmem_load": importlib.metadata.version("lowmem-load"), **result}
    kept = {one.name: results[one.name] for one in read_cases() if one.name in results}
    rows = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in kept.items()]  # a case a line, for diffs
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    cases = read_cases()
    lines = [table(cases, kept), "", *_reasons(cases), *_versions(cases, kept)]
    write_docs("tests/frameworks", "\n".join(lines), FILE)


def table(cases: Sequence[Case], results: Results) -> str:
    """Return a row for each case: whether it equals the default loader, and the peaks of its load in MiB."""
    rows: list[Sequence[str]] = [COLUMNS]
    for case in cases:
        result = results.get(case.name, {})
        default, ours = result.get("peaks", {}).get("load", ["", ""])
        rows.append([case.framework, case.what, case.model, verdict(result), _mib(default), _mib(ours)])
    return markdown(rows)


def verdict(result: Mapping[str, Any]) -> str:
    if not result:
        return "not run yet"
    if "error" in result:
        return f"failed: {' '.join(result['error'].split())}".replace("|", "\\|")
    if not result["loads by lowmem_load"]:
        return "lowmem_load loaded nothing"
    saved = result["saved"]
    if is_equal(result):
        return f"equal, {saved['tensors']}"
    losses = result["losses"]["first difference"] or "equal"
    return f"losses: {losses}; tensors: {len(saved['different'])} of {saved['tensors']} differ"


def _mib(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.0f}"


def _reasons(cases: Sequence[Case]) -> list[str]:
    return [f"- {case.framework}, {case.what}: {case.differs}" for case in cases if case.differs]


def _versions(cases: Sequence[Case], results: Results) -> list[str]:
    """Return a line for each set of releases: who ran with it, and when last."""
    found: dict[str, tuple[dict[str, None], str]] = {}
    for case in cases:
        result = results.get(case.name, {})
        if "versions" in result:
            versions = {name: version for name, version in result["versions"].items() if name not in _UNTOLD}
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            frameworks, date = found.get(text, ({}, ""))
            found[text] = ({**frameworks, case.framework: None}, max(result["date"], date))
    return [f"- {', '.join(frameworks)}: {text}; {date}" for text, (frameworks, date) in found.items()]
