"""tested.json: what was tested. Written here, by nobody else."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.compat.environments import Environment, read_environments

FILE = Path(__file__).with_name("tested.json")


def read_results(path: Path = FILE) -> list[dict[str, Any]]:
    """Returns the entries of the environments, in the order of environments.yaml."""
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["environments"]
    return results


def write_results(found: Iterable[tuple[Environment, dict[str, Any]]], path: Path = FILE) -> None:
    """Replaces the entries of some environments; those that environments.yaml no longer has go."""
    entries = {entry["name"]: entry for entry in read_results(path)} if path.is_file() else {}
    for environment, results in found:
        entries[environment.name] = _entry(environment, results)
    order = [environment.name for environment in read_environments()]
    kept = [entries[name] for name in order if name in entries]
    path.write_text(json.dumps({"environments": kept}, indent=1) + "\n", encoding="utf-8")


def _entry(environment: Environment, results: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": environment.name,
        "why": environment.why,
        "date": results["date"],
        "lowmem_load": importlib.metadata.version("lowmem-load"),
        "versions": results["versions"],
        "pins": results["pins"],
        "groups": results["groups"],
        "comparison": results["comparison"],
    }
