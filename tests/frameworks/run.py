"""Runs the command of a case in the environment of its framework, as it is or behind `lowmem-load run`."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from tests.frameworks.cases import Case
from tests.frameworks.rank import FOLDER
from tests.ranks import REPO, reserved_port
from tests.venvs import CACHE

HERE = Path(__file__).resolve().parent
EXAMPLES = REPO / "examples"
OUT = CACHE / "frameworks" / "out"
WAYS = ("default", "ours")
TIMEOUT_S, GRACE_S = 1800, 60
"""For a command, which takes about a minute, so that only a hang meets it; and to end then."""
LOG, RANKS, OUTPUT = "log", "ranks", "output"
"""In the folder of a run: what it printed, what each rank has seen, and what it saved."""


EXCEPTION = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ")
"""The last line of a traceback."""


class RunError(Exception):
    """A command has failed or has run past its time; the message ends with what looks like the reason in its log."""


def run(case: Case, way: str, model: Path) -> Path:
    """Run a case by the default loader or ours; return its folder.

    The folder has the configuration files and scripts, and links to the model and the examples, so that the former
    name everything by relative paths and are the same for both.

    Raises:
        RunError: the command failed.
    """
    folder = OUT / case.name / way
    shutil.rmtree(folder, ignore_errors=True)
    (folder / RANKS).mkdir(parents=True)
    for name in ("configs", "scripts"):
        shutil.copytree(HERE / name, folder / name)
    links = {"model": model, "examples": EXAMPLES, "data": EXAMPLES / "data", "ds_z3.json": EXAMPLES / "ds_z3.json"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    environment = {
        **case.environment.venv.variables,
        **case.variables,
        "NPROC_PER_NODE": "2",
        FOLDER: str(folder / RANKS),
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "on_cpu"), str(REPO)])
    with reserved_port() as port:
        environment["MASTER_PORT"] = str(port)
        command = shlex.split(case.command.format(port=port))
        if way == "ours":
            command = ["lowmem-load", "run", "--", *command]
        status = _run(command, folder, environment)
    if status != 0:
        raise RunError(f"{way}: {' '.join(command)} ended with {status}: {reason((folder / LOG).read_text())}")
    return folder


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str | int:
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun's ranks are in sessions of their own: it ends them itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return f"a timeout after {TIMEOUT_S} s"
        finally:  # a launcher that is gone may have left its ranks
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def reason(log: str) -> str:
    """Return the line of a log that most likely says why a command failed: the last exception that a rank printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    launchers = ("ChildFailedError", "CalledProcessError")
    errors = [line for line in lines if EXCEPTION.match(line) and not any(name in line for name in launchers)]
    return (errors or lines or ["nothing was printed"])[-1]
