"""`lowmem-load doctor`: what this machine lacks for a load, and what to do."""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Annotated

import typer
from packaging.version import Version

from lowmem_load.cli.common import NO, Json, answer, table, working
from lowmem_load.ds.build_locks import lock_text, old_locks
from lowmem_load.text import size

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Levels of findings. A problem makes a run fail or go wrong unless it is mended."""

NEEDED = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "huggingface_hub")

MIN_SHARED_BYTES = 1 << 30
"""Free bytes of /dev/shm. Ranks that read together, DataLoader's workers and NCCL share memory there."""

MIN_BLOCK_BYTES = 128 << 10
"""Block size in bytes below which a network file system answers each read in many small messages."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its subject, such as "storage", its level, the finding in words, and what to do; "" for nothing."""

    area: str
    level: str
    text: str
    advice: str = ""


def doctor(
    folder: Annotated[
        str | None, typer.Argument(help="Folder of checkpoints: check its file system.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only notes and problems.")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine and say what to do.

    Exits with 1 if there is a problem.

    Checks releases against the tested ones, limits of memory, the file system of FOLDER, devices, and the compiler that
    DeepSpeed needs on CPUs. Runs no load and starts no ranks. Run it where the job will run.

    \b
    lowmem-load doctor /models/Llama-3.1-8B
    srun --nodes 2 --ntasks-per-node 1 lowmem-load doctor /models --quiet
    """
    with working():
        findings = list(check_all(folder))
    num_problems = sum(finding.level == PROBLEM for finding in findings)
    shown = [finding for finding in findings if not (quiet and finding.level == OK)]
    rows = [(finding.level, finding.area, finding.text, finding.advice) for finding in shown]
    summary = f"{num_problems} problem{'s' * (num_problems > 1)}" if num_problems else "No problem in what was checked."
    answer(
        as_json,
        [asdict(finding) for finding in findings],
        lambda: [table("", ("", "about", "found", "what to do"), rows), summary],
    )
    if num_problems:
        raise typer.Exit(NO)


def check_all(folder: str | None) -> Iterator[Finding]:
    """Yield the findings of all checks. Those that need torch are left out where it is missing."""
    content = json.loads(files("lowmem_load").joinpath("tested.json").read_text(encoding="utf-8"))
    releases = installed_releases()
    yield from check_versions(releases, [environment["versions"] for environment in content["environments"]])
    yield from check_memory()
    if "torch" in releases:
        if folder is not None:
            yield check_storage(folder)
        yield from check_devices()


def installed_releases() -> dict[str, str]:
    """Return the installed release of each package; absent packages are left out."""
    releases = {"python": platform.python_version()}
    for package in NEEDED:
        try:
            releases[package] = version(package)
        except PackageNotFoundError:
            continue
    return releases


def check_versions(releases: Mapping[str, str], tested: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Compare the releases here with those of the environments that were tested."""
    for package in ("python", *NEEDED):
        known = sorted(Version(Version(versions[package]).public) for versions in tested if package in versions)
        if package not in releases:
            yield Finding("versions", PROBLEM, f"{package} is not installed", f"pip install {package}")
        elif known:
            release, first, last = Version(Version(releases[package]).public), known[0], known[-1]
            level, advice = OK, ""
            if release.release[:2] < first.release[:2]:
                level, advice = PROBLEM, f"install {package} {first} or later"
            elif release.release[:2] > last.release[:2]:
                level, advice = NOTE, "newer than what was tested: watch the first run, or install a tested one"
            yield Finding("versions", level, f"{package} {release}, tested {first} to {last}", advice)


def check_memory() -> Iterator[Finding]:
    """Check the limits of memory that end loads."""
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        yield Finding("memory", PROBLEM, f"addresses are limited to {size(addresses)}", "ulimit -v unlimited")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        advice = "docker run --shm-size 16g, or --ipc host: ranks, workers of DataLoader and NCCL share memory there"
        is_low = free < MIN_SHARED_BYTES
        yield Finding("memory", NOTE if is_low else OK, f"/dev/shm has {size(free)} free", advice * is_low)


def check_storage(folder: str) -> Finding:
    """Check the file system of the folder."""
    from lowmem_load.io.mounts import mount_of

    if not os.path.isdir(folder):
        return Finding("storage", PROBLEM, f"{folder}: no such folder", "name a folder that holds checkpoints")
    mount = mount_of(folder)
    if mount is None or not mount.is_network:
        return Finding("storage", OK, f"{folder}: {'file system not known' if mount is None else mount.kind}")
    block = mount.rsize or os.statvfs(folder).f_bsize
    is_small = bool(mount.rsize) and block < MIN_BLOCK_BYTES
    text = f"{folder}: {mount.kind}, on the network, in blocks of {size(block)}"
    advice = f"mount it with larger blocks (rsize={1 << 20})" * is_small
    return Finding("storage", NOTE if is_small else OK, text, advice)


def check_devices() -> Iterator[Finding]:
    """Check that memory can be pinned for the accelerators, or what CPU ranks need; and DeepSpeed's import."""
    import torch

    if torch.accelerator.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        device = torch.accelerator.current_accelerator()
        yield Finding("devices", OK, f"{torch.accelerator.device_count()} devices of type {device}")
        try:
            torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            advice = "raise ulimit -l, or the container's limit"
            yield Finding("devices", PROBLEM, f"memory cannot be pinned: {first}", advice)
    else:
        yield Finding("devices", NOTE, "ranks would run on the CPU")
        yield from check_compiler()
    for lock, age_s in old_locks():
        yield Finding("devices", PROBLEM, lock_text(lock, age_s), "delete it if nobody builds there")
    try:
        import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed
    except ImportError as error:
        yield Finding("devices", PROBLEM, f"DeepSpeed cannot be imported: {error}", "install a tested release")


def check_compiler() -> Iterator[Finding]:
    """Check that DeepSpeed can compile what its CPU ranks need, the first time that they start.

    Source: deepspeed 0.19.8 `comm/torch.py`, `build_shm_op`; torch 2.13 `utils/cpp_extension.py`.
    """
    for tool, package in ((os.environ.get("CXX", "c++"), "g++"), ("ninja", "ninja")):
        try:
            subprocess.run([*shlex.split(tool), "--version"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            text = f"{tool} does not run ({error}), with which DeepSpeed compiles its deepspeed_shm_comm for CPU ranks"
            yield Finding("devices", PROBLEM, text, f"install {package}, and have it on PATH")
