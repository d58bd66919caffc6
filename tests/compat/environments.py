"""The environments that are tested: environments.yaml as data, and which pairs of releases meet in one of them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

FILE = Path(__file__).with_name("environments.yaml")
MOST = 10
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True)
class Environment:
    """One entry of environments.yaml, whose head says what each field means."""

    name: str
    why: str
    python: str
    torch: str
    deepspeed: str
    transformers: str
    accelerate: str
    extra: Mapping[str, str] = field(default_factory=dict)
    framework: str = ""
    extensions: Sequence[str] = ()

    @property
    def pins(self) -> dict[str, str]:
        """Version by package; torch comes first."""
        return {**{name: getattr(self, name) for name in PACKAGES}, **self.extra}

    @property
    def has_pipelines(self) -> bool:
        """Whether what tests/pipelines imports is installed."""
        return {"trl", "peft", "datasets"} <= self.extra.keys()


def read_environments(path: Path = FILE) -> tuple[list[Environment], dict[str, list[str]]]:
    """Returns the environments, and the lines of releases by axis ("python" is one)."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Environment(**entry) for entry in data["environments"]], data["lines"]


def here(environment: Environment) -> Environment:
    """Returns an environment with the Python and torch of this process in place of its own, for CI: see .ci/run."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch = Version(importlib.metadata.version("torch")).public
    if (environment.python, environment.torch) == (python, torch):
        return environment
    return dataclasses.replace(environment, name=f"{environment.name}-here", python=python, torch=torch)


def line_of(version: str, lines: Sequence[str]) -> str:
    """Returns the line that a release belongs to: the last that begins with it or before.

    Raises:
        ValueError: the release is older than all lines.
    """
    begun = [line for line in lines if Version(line) <= Version(version)]
    if not begun:
        raise ValueError(f"{version} is older than {lines[0]}")
    return begun[-1]


def uncovered_pairs(
    environments: Iterable[Mapping[str, str]], lines: Mapping[str, Sequence[str]]
) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Returns the pairs ((axis, line), (axis, line)) of two axes that are together in no environment.

    Args:
        environments: version by axis, of each.
        lines: by axis.
    """
    found: set[Any] = set()
    for versions in environments:
        where = [(axis, line_of(versions[axis], of_axis)) for axis, of_axis in lines.items()]
        found.update(itertools.combinations(where, 2))
    return [
        ((left, one), (right, other))
        for left, right in itertools.combinations(lines, 2)
        for one, other in itertools.product(lines[left], lines[right])
        if ((left, one), (right, other)) not in found
    ]
