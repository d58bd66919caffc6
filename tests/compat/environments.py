"""The environments that are tested: environments.yaml as data."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from packaging.version import Version

FILE = Path(__file__).with_name("environments.yaml")
MOST = 6
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


def read_environments(path: Path = FILE) -> list[Environment]:
    """Returns the environments, in the order of the file."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Environment(**entry) for entry in data["environments"]]


def here(environment: Environment) -> Environment:
    """Returns an environment with the Python and torch of this process in place of its own, for CI: see .ci/run."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch = Version(importlib.metadata.version("torch")).public
    if (environment.python, environment.torch) == (python, torch):
        return environment
    return dataclasses.replace(environment, name=f"{environment.name}-here", python=python, torch=torch)
