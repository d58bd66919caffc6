"""A plugin of pytest (`-p tests.compat.record`) that writes down each test as it ends, also if the run is killed later.

The file that COMPAT_RECORD names gets a line of JSON for each: its file, its name, what came of it, and why.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

MESSAGE_CHARS = 300


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that passes has a report of its call; one that fails or is skipped may end before or after."""
    if report.when != "call" and report.passed:
        return
    file, _, name = report.nodeid.partition("::")
    _write({"file": file, "name": name, "outcome": report.outcome, "why": _why(report)})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported fails; one that is skipped as a whole is one skipped test."""
    if not report.passed:
        _write({"file": report.nodeid, "name": "import", "outcome": report.outcome, "why": _why(report)})


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")[:MESSAGE_CHARS]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:MESSAGE_CHARS]


def _write(entry: dict[str, str]) -> None:
    with Path(os.environ["COMPAT_RECORD"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
