"""The command lowmem-load: it starts fast, and `run` replaces it with the given command."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import lowmem_load
from lowmem_load.integrations.startup_hook import FOLDER, SWITCH
from tests.ranks import REPO

COMMAND = [sys.executable, "-m", "lowmem_load"]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", SWITCH)}
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**environment, **env},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_subcommands_and_the_version_are_shown() -> None:
    found = run()
    assert "Usage: lowmem-load [OPTIONS] COMMAND" in found.stdout + found.stderr
    assert "  run  " in found.stdout + found.stderr
    assert run("--version").stdout == f"lowmem-load {lowmem_load.__version__}\n"
    assert lowmem_load.__version__ == version("lowmem-load")


@pytest.mark.parametrize(
    ("options", "value"),
    [([], "1"), (["--"], "1"), (["--strict"], "strict"), (["--no-download", "--strict", "--"], "strict,no-download")],
)
def test_run_passes_arguments_unchanged_and_returns_the_exit_code(options: list[str], value: str) -> None:
    script = f'printf "%s|" "$@" "$PYTHONPATH" "${SWITCH}"; exit 7'
    arguments = ["--help", "--strict", "a b", "--", ""]
    found = run("run", *options, "sh", "-c", script, "sh", *arguments, PYTHONPATH="/a 'b'")
    assert found.stdout == "|".join([*arguments, f"{FOLDER}:/a 'b'", value, ""])
    assert (found.returncode, found.stderr) == (7, "")


def test_run_replaces_the_process() -> None:
    started = subprocess.Popen(
        [*COMMAND, "run", "--", "sh", "-c", "echo $$; exec sleep 60"], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        assert int(started.stdout.readline()) == started.pid
        started.terminate()
        assert started.wait(30) == -15
    finally:
        started.kill()
        started.communicate()


def test_run_names_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    missing = run("run", "no-such-launcher", "--nproc", "2")
    assert missing.returncode == 127
    assert missing.stderr == "lowmem-load run: no-such-launcher: No such file or directory\n"
    refused = run("run", str(tmp_path))
    assert (refused.returncode, refused.stderr) == (126, f"lowmem-load run: {tmp_path}: Permission denied\n")
    assert run("run").returncode == 2
