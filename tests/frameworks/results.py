"""Reads and writes results.json: the result of each case when it last ran."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.frameworks.cases import Case, read_cases
from tests.frameworks.compare import is_equal

FILE = Path(__file__).with_name("results.json")


def read_results(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Return the results by name of the case, in the order of cases.yaml."""
    results: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return results


def keep(case: Case, result: Mapping[str, Any], path: Path = FILE) -> None:
    """Replace the result of a case; those of cases that cases.yaml no longer has go."""
    results = read_results(path)
    when = {"date": dt.datetime.now(dt.UTC).date().isoformat()}
    results[case.name] = {**when, "lowmem_load": importlib.metadata.version("lowmem-load"), **result}
    kept = {one.name: results[one.name] for one in read_cases() if one.name in results}
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in kept.items()]  # a case a line, for diffs
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def as_expected(case: Case, result: Mapping[str, Any]) -> bool:
    """Whether a case has run, and equals stock unless cases.yaml has a reason why it does not."""
    return "error" not in result and (is_equal(result) or bool(case.differs))
