"""Makes the environment of a framework under .cache/frameworks, once for the same packages."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.compat.install import INSTALLED, PIP_TRIES, clean_environ, make_venv, run
from tests.frameworks.cases import Environment
from tests.ranks import REPO

CACHE = REPO / ".cache" / "frameworks"


def folder_of(environment: Environment) -> Path:
    return CACHE / environment.name


def python_of(environment: Environment) -> Path:
    return folder_of(environment) / "venv" / "bin" / "python"


def variables(environment: Environment) -> dict[str, str]:
    """Return the variables under which everything runs in an environment."""
    folder = folder_of(environment)
    return {
        **clean_environ(),
        "PATH": os.pathsep.join([str(python_of(environment).parent), os.environ.get("PATH", "")]),
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        "HF_HOME": str(folder / "home"),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def install(environment: Environment) -> None:
    """Make the environment, unless it is there.

    Raises:
        InstallError: something of it failed.
        subprocess.CalledProcessError: pip finds no metadata of the framework.
    """
    folder, stamp = folder_of(environment), folder_of(environment) / "packages"
    if stamp.is_file() and stamp.read_text() == fingerprint(environment):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "install.log"
    pip = make_venv(folder / "venv", environment.python, environment.torch, log)
    framework, *others = environment.packages
    if not environment.leave_out:
        run([*pip, *environment.packages, "-e", str(REPO)], log, tries=PIP_TRIES)
    else:
        asked = Requirement(framework)
        wanted = without(_requirements(pip, asked), asked.extras, environment.leave_out)
        run([*pip, *wanted, *others, "-e", str(REPO)], log, tries=PIP_TRIES)
        run([*pip, "--no-deps", f"{asked.name}{asked.specifier}"], log, tries=PIP_TRIES)
    stamp.write_text(fingerprint(environment))


def without(requirements: Iterable[str], extras: Iterable[str], leave_out: Iterable[str]) -> list[str]:
    """Return the requirements of a package that hold here and under some extras, but for those that are left out.

    Args:
        requirements: as the metadata of the package have them.
        extras: of the package, that are asked for.
        leave_out: names of packages.
    """
    left_out = {canonicalize_name(name) for name in leave_out}
    asked = [{"extra": extra} for extra in ("", *extras)]
    kept = []
    for requirement in map(Requirement, requirements):
        applies = not requirement.marker or any(map(requirement.marker.evaluate, asked))
        if applies and canonicalize_name(requirement.name) not in left_out:
            kept.append(f"{requirement.name}{_extras(requirement)}{requirement.specifier}")
    return kept


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _requirements(pip: Sequence[str], framework: Requirement) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        what = ["--dry-run", "--no-deps", "--report", str(report), f"{framework.name}{framework.specifier}"]
        subprocess.run([*pip, *what], check=True, env=clean_environ(), cwd=folder)
        (entry,) = json.loads(report.read_text())["install"]
    requirements: list[str] = entry["metadata"].get("requires_dist", [])
    return requirements


REPORTED = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "datasets")


def installed_versions(environment: Environment) -> dict[str, str]:
    """Return the exact versions of what matters in an environment, the framework first."""
    names = [Requirement(environment.packages[0]).name, *REPORTED]
    command = [str(python_of(environment)), "-c", INSTALLED, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environ())
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def fingerprint(environment: Environment) -> str:
    """Return what an environment is made of, as a digest: it is made again when this changes."""
    made_of = [environment.python, environment.torch, *environment.packages, *environment.leave_out]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
