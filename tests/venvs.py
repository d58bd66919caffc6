"""Environments with other releases under .cache: torch comes first and alone, then all else in one go."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.ranks import REPO

CACHE = REPO / ".cache"
INSTALL = ("-m", "pip", "install", "--quiet", "--no-warn-conflicts", "--no-compile")
PIP_TRIES = 3
VERSIONS = """
import importlib.metadata as metadata, json, platform, sys
installed = {each.name.lower().replace("-", "_"): each.version for each in metadata.distributions()}
found = {name: installed[name] for name in json.loads(sys.argv[1]) if name in installed}
import torch
print(json.dumps({"python": platform.python_version(), **found, "torch": torch.__version__}))
"""


class InstallError(Exception):
    """An environment cannot be made; the message holds the command and the end of its output."""


def clean_environ() -> dict[str, str]:
    """Returns the variables of this process without those that lead into its own environment."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR"}
    return {name: value for name, value in os.environ.items() if name not in ours}


def run(command: Sequence[str], log: Path, tries: int = 1, **env: str) -> None:
    """Runs a command with its output in `log`.

    Raises:
        InstallError: it failed as often as it may.
    """
    environ = {**clean_environ(), **env}
    for _ in range(tries):
        with log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            if subprocess.call(command, stdout=output, stderr=output, cwd=REPO, env=environ) == 0:
                return
    tail = log.read_text(errors="replace")[-2000:]
    raise InstallError(f"{' '.join(command)} failed; {log} ends with\n{tail}")


@dataclass(frozen=True)
class Venv:
    """An environment of one Python and torch, in a folder."""

    folder: Path
    version: str
    torch: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """The variables under which everything runs in it."""
        return {
            **clean_environ(),
            "PATH": os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")]),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"),
            "HF_HOME": str(self.folder / "home"),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def make(self, packages: Sequence[str], leave_out: Sequence[str] = (), made_of: object = None) -> None:
        """Installs packages and this one, unless that has been done with the same arguments.

        Args:
            leave_out: requirements of the first package that are not installed.
            made_of: what else it is made again for.

        Raises:
            InstallError: something of it failed.
        """
        made = hashlib.sha256(json.dumps([self.version, self.torch, packages, leave_out, made_of]).encode()).hexdigest()
        stamp, log = self.folder / "made_of", self.folder / "install.log"
        if stamp.is_file() and stamp.read_text() == made:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        pip = [str(self.python), *INSTALL]
        self._make_empty(log)
        first = Requirement(packages[0])
        wanted = (
            [*without(self._requirements(first), first.extras, leave_out), *packages[1:]] if leave_out else packages
        )
        run([*pip, *wanted, "-e", str(REPO)], log, PIP_TRIES)
        if leave_out:
            run([*pip, "--no-deps", f"{first.name}{first.specifier}"], log, PIP_TRIES)
        stamp.write_text(made)

    def _make_empty(self, log: Path) -> None:
        """Makes it over the torch of its release, a CUDA build of several GB as a rule, which equal Pythons share."""
        python = find_python(self.version)
        shared = CACHE / "compat" / f"torch-{self.torch}-py{self.version}"
        if not shared.is_dir():
            part = shared.with_name(f"{shared.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            run([python, *INSTALL, "--no-cache-dir", "--target", str(part), f"torch=={self.torch}"], log, PIP_TRIES)
            part.rename(shared)
        run([python, "-m", "venv", str(self.folder / "venv")], log)
        (packages,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        (packages / "torch_of_compat.pth").write_text(f"{shared}\n")
        torchrun = self.python.with_name("torchrun")  # what pip would have installed with torch
        torchrun.write_text(f"#!{self.python}\nfrom torch.distributed.run import main\n\nmain()\n")
        torchrun.chmod(0o755)
        # Older releases of DeepSpeed ask setuptools for pkg_resources, and 3.12 and later come without it.
        run([str(self.python), *INSTALL, "setuptools<81", "wheel"], log, PIP_TRIES)

    def _requirements(self, package: Requirement) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            what = ["--dry-run", "--no-deps", "--report", str(report), f"{package.name}{package.specifier}"]
            run([str(self.python), *INSTALL, *what], self.folder / "install.log")
            (entry,) = json.loads(report.read_text())["install"]
        requirements: list[str] = entry["metadata"].get("requires_dist", [])
        return requirements

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the exact versions of Python, torch and those of some packages that it has."""
        command = [str(self.python), "-c", VERSIONS, json.dumps(list(names))]
        said = subprocess.check_output(command, text=True, env=self.variables, cwd=self.folder)
        versions: dict[str, str] = json.loads(said.splitlines()[-1])
        return versions


def find_python(version: str) -> str:
    """Returns an interpreter of a Python such as "3.12": what PYTHON_3_12 names, or python3.12 of the PATH.

    Raises:
        InstallError: there is none.
    """
    setting = f"PYTHON_{version.replace('.', '_')}"
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for name in [os.environ[setting]] if setting in os.environ else [f"python{version}", "python3", sys.executable]:
        found = shutil.which(name)
        if found and subprocess.getoutput(f"{found} -c {shlex.quote(code)}") == version:
            return found
    raise InstallError(f"no Python {version} found: set {setting} to its path")


def without(requirements: Iterable[str], extras: Iterable[str], leave_out: Iterable[str]) -> list[str]:
    """Returns the requirements of a package that hold here and under some extras, but for those that are left out."""
    left_out = {canonicalize_name(name) for name in leave_out}
    asked = [{"extra": extra} for extra in ("", *extras)]
    kept = []
    for requirement in map(Requirement, requirements):
        applies = not requirement.marker or any(map(requirement.marker.evaluate, asked))
        if applies and canonicalize_name(requirement.name) not in left_out:
            requirement.marker = None
            kept.append(str(requirement))
    return kept
