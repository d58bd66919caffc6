"""Tests the environments of environments.yaml: `python -m tests.compat [--environments NAME ...] [--groups NAME ...]`.

What has been run is kept beside each environment, under .cache/compat, and is not run again for the same pins. The
results of those that are chosen go into tests/compat/tested.json, and from there into the tables of
tests/compat/RESULTS.md. Ends with status 1 if an environment could not be made or a test failed; the others still run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.compat import page
from tests.compat.environments import Environment, here, read_environments
from tests.compat.groups import GROUPS, groups_of, run_groups
from tests.compat.install import (
    InstallError,
    compile_extensions,
    fingerprint,
    folder_of,
    install,
    installed_versions,
    python_of,
    variables,
)
from tests.compat.pins import compare_pins
from tests.compat.results import write_results
from tests.ranks import REPO

COMPARISON, PINS = "comparison", "pins"
"""What runs besides the groups of tests."""
WHAT = [*GROUPS, COMPARISON, PINS]
COMPARISON_TIMEOUT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    environments = read_environments()
    by_name = {environment.name: environment for environment in environments}
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__.splitlines()[0])
    parser.add_argument("--environments", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--groups", nargs="+", choices=WHAT, default=WHAT, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="run what has been run for the same pins, too")
    parser.add_argument("--here", action="store_true", help="with this Python and torch; no result is written down")
    chosen = parser.parse_args(arguments)
    failed = []
    for name in chosen.environments:
        environment = here(by_name[name]) if chosen.here else by_name[name]
        try:
            test(environment, chosen.groups, chosen.again)
        except (InstallError, subprocess.SubprocessError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        found = kept(environment)
        if any(group["failed"] for group in found["groups"].values()) or "error" in found[COMPARISON]:
            failed.append(name)
            print(page.exceptions_list([{**found, "name": name}]), flush=True)
        if not chosen.here:
            write_results([(environment, found)])
            page.write()
    if failed:
        print(f"not all is well with {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def test(environment: Environment, groups: Sequence[str], again: bool) -> None:
    """Makes an environment and runs in it what has not been run, keeping each result as it comes.

    Raises:
        InstallError: it cannot be made.
    """
    say(environment, "installing")
    install(environment)
    compile_extensions(environment, ["shm_comm", *(environment.extensions if "modes" in groups else [])])
    found = kept(environment)
    if not found["versions"]:
        found["versions"] = installed_versions(environment)
        keep(environment, found)
    if PINS in groups and (again or not found[PINS]):
        _run(environment, found, PINS, lambda: found.update({PINS: compare_pins(environment)}))
    if COMPARISON in groups and (again or not found[COMPARISON]):
        _run(environment, found, COMPARISON, lambda: found.update({COMPARISON: run_comparison(environment)}))
    chosen = [name for name in groups_of(environment) if name in groups and (again or name not in found["groups"])]
    if chosen:
        _run(environment, found, ", ".join(chosen), lambda: found["groups"].update(run_groups(environment, chosen)))


def _run(environment: Environment, found: dict[str, Any], what: str, step: Callable[[], object]) -> None:
    say(environment, f"running {what}")
    start = time.monotonic()
    step()
    found["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    keep(environment, found)
    results = ", ".join(f"{name} {page.count(group)}" for name, group in found["groups"].items())
    say(environment, f"took {time.monotonic() - start:.0f} s; so far: {results or 'compared'}")


def run_comparison(environment: Environment) -> dict[str, Any]:
    """Runs compare.py in an environment; returns what it found, or {"error": ...}."""
    out, log = folder_of(environment) / "comparison.json", folder_of(environment) / "comparison.log"
    out.unlink(missing_ok=True)
    command = [str(python_of(environment)), "-m", "tests.compat.compare", str(out)]
    with log.open("wb") as output:
        try:
            subprocess.run(
                command,
                stdout=output,
                stderr=output,
                cwd=REPO,
                env=variables(environment),
                check=True,
                timeout=COMPARISON_TIMEOUT_S,
            )
        except subprocess.SubprocessError as error:
            return {"error": f"{type(error).__name__}, see {log.name}"}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def _file(environment: Environment) -> Path:
    return folder_of(environment) / "results.json"


def kept(environment: Environment) -> dict[str, Any]:
    """Returns what has been found in an environment so far, with its present pins."""
    if _file(environment).is_file():
        found: dict[str, Any] = json.loads(_file(environment).read_text())
        if found["fingerprint"] == fingerprint(environment):
            return found
    return {"fingerprint": fingerprint(environment), "versions": {}, "groups": {}, COMPARISON: {}, PINS: {}}


def keep(environment: Environment, found: dict[str, Any]) -> None:
    """Writes down what has been found in an environment."""
    _file(environment).write_text(json.dumps(found, indent=1))


def say(environment: Environment, text: str) -> None:
    """Prints a line of the run."""
    print(f"{dt.datetime.now():%H:%M:%S} {environment.name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
