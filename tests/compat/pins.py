"""What a framework asks for, against what an environment has; and whether pip resolves both together with our own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.compat.environments import Environment
from tests.compat.install import python_of, variables
from tests.ranks import REPO


def compare_pins(environment: Environment) -> dict[str, Any]:
    """Returns, where the environment stands for a framework: its requirements that the pins break, and pip's answer."""
    if not environment.framework:
        return {}
    wanted = Requirement(environment.framework)
    # what is installed already would not be in the report
    report, error = _resolve(environment, [f"{wanted.name}{wanted.specifier}", "--no-deps", "--ignore-installed"])
    if report is None:
        return {"framework": environment.framework, "broken": [error], "resolves": "no"}
    (entry,) = report["install"]
    requirements = entry["metadata"].get("requires_dist", [])
    return {
        "framework": environment.framework,
        "broken": broken(requirements, environment.pins, wanted.extras),
        "resolves": _resolves(environment),
    }


def broken(requirements: list[str], pins: dict[str, str], extras: set[str]) -> list[str]:
    """Returns the requirements of a framework that some pins do not meet.

    Args:
        requirements: as its metadata has them.
        pins: version by package.
        extras: of the framework, that are asked for.
    """
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    found = []
    for text in requirements:
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        asked = [{"extra": extra} for extra in ("", *sorted(extras))]
        if version is None or (requirement.marker and not any(map(requirement.marker.evaluate, asked))):
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{text}, and {requirement.name} is {version}")
    return found


def _resolves(environment: Environment) -> str:
    """Returns "yes", or why pip finds no versions for the framework, the environment's pins and this package."""
    pins = [f"{name}=={version}" for name, version in environment.pins.items()]
    report, error = _resolve(environment, [environment.framework, *pins, str(REPO)])
    return "yes" if report is not None else error


def _resolve(environment: Environment, what: list[str]) -> tuple[dict[str, Any] | None, str]:
    """Returns pip's report of what it would install, or None and its error. No wheels are downloaded as a rule."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [str(python_of(environment)), "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report)]
        # flash-attn has no wheels, and its metadata need torch and no compiler.
        env = {**variables(environment), "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        done = subprocess.run(
            [*command, "--no-build-isolation", *what], capture_output=True, text=True, env=env, check=False, cwd=folder
        )
        if done.returncode == 0:
            return json.loads(report.read_text()), ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return None, (errors or [done.stderr[-300:]])[0]
