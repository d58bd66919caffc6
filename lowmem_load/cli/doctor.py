"""`lowmem-load doctor`: what this machine lacks for a load, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from lowmem_load import foreign_names
from lowmem_load.cli.common import NO, Json, answer, table, working
from lowmem_load.ds.ops import old_locks
from lowmem_load.errors import ConfigError
from lowmem_load.foreign_names import Releases, is_release_between

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Levels of findings. A problem makes a run fail or go wrong unless it is fixed."""

NEEDED = (foreign_names.TORCH, foreign_names.TRANSFORMERS, foreign_names.DEEPSPEED, foreign_names.ACCELERATE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its subject, such as "versions", its level, the finding in words, and what to do; "" for nothing."""

    area: str
    level: str
    text: str
    advice: str = ""


Store = Annotated[
    str,
    typer.Option("--store", help="HOST:PORT of a running job (its MASTER_ADDR and MASTER_PORT): what each rank does."),
]


def doctor(store: Store = "", as_json: Json = False) -> None:
    """Check this machine and say what to do, or say which rank of a running job is at which step, and since when.

    Exits with 1 if there is a problem.

    Checks releases against the supported ones, the compiler that DeepSpeed needs on CPUs, and locks of killed builds.
    Runs no load and starts no ranks. Run it where the job will run.

    \b
    lowmem-load doctor --json
    lowmem-load doctor --store node1:29500
    srun --nodes 2 --ntasks-per-node 1 lowmem-load doctor
    """
    if store:
        _show_steps(store, as_json)
        return
    with working():
        findings = [*check_versions(), *check_compiler(), *check_locks()]
    num_problems = sum(finding.level == PROBLEM for finding in findings)
    rows = [(finding.level, finding.area, finding.text, finding.advice) for finding in findings]
    summary = f"{num_problems} problem{'s' * (num_problems > 1)}" if num_problems else "No problem in what was checked."
    answer(
        as_json,
        [asdict(finding) for finding in findings],
        lambda: [table("", ("", "about", "found", "what to do"), rows), summary],
    )
    if num_problems:
        raise typer.Exit(NO)


def _show_steps(store: str, as_json: bool) -> None:
    """Print what the ranks that meet in a store wrote last about themselves."""
    host, _, port = store.rpartition(":")
    with working():
        if not host or not port.isdigit():
            raise ConfigError(f"--store: {store!r} is not HOST:PORT, such as node1:29500")
        from lowmem_load.distributed.channel import look_into

        seen = look_into(host, int(port))
    rows = []
    for group, rank, beat, is_silent in seen:
        does = beat.last_seen + (" (no heartbeat)" if beat.title and is_silent else "")
        rows.append((group.rstrip("/"), str(rank), f"{beat.group} {beat.number}", does, f"{beat.seconds} s", beat.who))
    answer(
        as_json,
        [{"prefix": one.group, "rank": one.rank, "silent": one.is_silent, **one.heartbeat._asdict()} for one in seen],
        lambda: [table("", ("prefix", "rank", "step", "does", "since", "process"), rows), f"{len(rows)} ranks"],
    )


def check_versions() -> Iterator[Finding]:
    """Compare the installed releases with the supported ones. Nothing is imported."""
    yield from map(_check_version, NEEDED)


def _check_version(supported: Releases) -> Finding:
    package, oldest, newest = supported
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", PROBLEM, f"{package} is not installed", f"pip install {package}")
    text = f"{package} {installed}, tested {oldest} to {newest}"
    if not is_release_between(package, oldest):
        return Finding("versions", PROBLEM, text, f"install {package} {oldest} or later")
    if not is_release_between(package, "0", newest):
        advice = "newer than what was tested: watch the first run, or install a tested one"
        return Finding("versions", NOTE, text, advice)
    return Finding("versions", OK, text)


def check_compiler() -> Iterator[Finding]:
    """Check that DeepSpeed can compile what its CPU ranks need, the first time that they start.

    Source: deepspeed 0.19.8 `comm/torch.py`, `build_shm_op`; torch 2.13 `utils/cpp_extension.py`.
    """
    import torch

    if torch.accelerator.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return
    for tool, package in ((os.environ.get("CXX", "c++"), "g++"), ("ninja", "ninja")):
        try:
            subprocess.run([*shlex.split(tool), "--version"], capture_output=True, check=True)
            yield Finding("compiler", OK, f"{tool} runs")
        except (OSError, subprocess.CalledProcessError) as error:
            text = f"{tool} does not run ({error}), with which DeepSpeed compiles its deepspeed_shm_comm for CPU ranks"
            yield Finding("compiler", PROBLEM, text, f"install {package}, and have it on PATH")


def check_locks() -> Iterator[Finding]:
    """Look for locks of killed builds, at which DeepSpeed waits without a word."""
    for text in old_locks():
        yield Finding("compiler", PROBLEM, text, "delete it if nobody builds there")
