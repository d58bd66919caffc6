"""The environments and cases of cases.yaml as data; its head says what each field means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.venvs import CACHE, Venv

FILE = Path(__file__).with_name("cases.yaml")


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages that a framework runs with; the framework is the first."""

    venv: Venv
    packages: Sequence[str]
    leave_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One command of a framework, which is run as it is and behind `lowmem-load run`."""

    environment: Environment
    framework: str
    what: str
    command: str
    variables: Mapping[str, str] = field(default_factory=dict)
    model: str = "mini"
    differs: str = ""

    @property
    def name(self) -> str:
        return f"{self.framework}, {self.what}".lower().replace(", ", "-").replace(" ", "-")


def read_cases(path: Path = FILE) -> list[Case]:
    """Return the cases, in the order of the file.

    Raises:
        ValueError: two have the same name.
    """
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    environments = {
        name: Environment(Venv(CACHE / "frameworks" / name, entry.pop("python"), entry.pop("torch")), **entry)
        for name, entry in data["environments"].items()
    }
    cases = []
    for entry in data["cases"]:
        environment, lora = environments[entry.pop("environment")], entry.pop("lora", None)
        cases.append(Case(environment, **entry))
        if lora is not None:
            what, command = entry["what"].replace("full", "LoRA"), f"{entry['command']} {lora}"
            cases.append(Case(environment, entry["framework"], what, command, entry.get("variables", {})))
    names = [case.name for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: several cases are called {', '.join(twice)}")
    return cases
