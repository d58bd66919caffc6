"""`lowmem-load doctor`: check whether models load and train on this machine, and say what to do."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Annotated

import typer
from packaging.version import Version

from lowmem_load.cli.bench_worker import available_bytes, memory_limit
from lowmem_load.cli.common import NO, Json, answer, table, working
from lowmem_load.distributed.environment import LAUNCHER_NAMES, alone, launched
from lowmem_load.errors import ConfigError
from lowmem_load.text import size

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Levels of findings. A problem makes a run fail or go wrong unless it is mended."""

NEEDED = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "huggingface_hub")

MIN_SHARED_BYTES = 1 << 30
"""Free bytes of /dev/shm. Ranks that read together, DataLoader's workers and NCCL share memory there."""

MIN_BLOCK_BYTES = 128 << 10
"""Block size in bytes below which a network file system answers each read in many small messages."""

PINNED_BYTES = 1 << 20
"""Bytes of the trial of pinned memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its subject, such as "storage", its level, the finding in words, and what to do; "" for nothing."""

    area: str
    level: str
    found: str
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

    Checks releases against the tested ones, host memory and its limits, the file system of FOLDER, the launcher's
    variables, devices and pinned memory. Run it where the job will run.

    \b
    lowmem-load doctor /models/Llama-3.1-8B
    srun --nodes 2 --ntasks-per-node 1 lowmem-load doctor /models --quiet
    """
    with working():
        findings = list(check_all(folder))
    num_problems = sum(finding.level == PROBLEM for finding in findings)
    shown = [finding for finding in findings if not (quiet and finding.level == OK)]
    rows = [(each.level, each.area, each.found, each.advice) for each in shown]
    summary = f"{num_problems} problem{'s' * (num_problems > 1)}" if num_problems else "No problems."
    answer(
        as_json,
        [asdict(finding) for finding in findings],
        lambda: [table("", ("", "about", "found", "what to do"), rows), summary],
    )
    if num_problems:
        raise typer.Exit(NO)


def check_all(folder: str | None) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    content = json.loads(files("lowmem_load").joinpath("tested.json").read_text(encoding="utf-8"))
    yield from check_versions(installed(), [each["versions"] for each in content["environments"]])
    yield from check_memory()
    yield check_storage(folder)
    yield from check_launcher()
    yield from check_devices()


def installed() -> dict[str, str]:
    """Return the installed release of each package; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in NEEDED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_versions(found: Mapping[str, str], known: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Compare the releases `found` here with those of the environments `known` to work."""
    for package in ("python", *NEEDED):
        releases = sorted({Version(Version(each[package]).public) for each in known if package in each})
        if package not in found:
            yield Finding("versions", PROBLEM, f"{package} is not installed", f"pip install {package}")
        elif releases:
            yield _check_version(package, Version(Version(found[package]).public), releases[0], releases[-1])


def _check_version(package: str, release: Version, first: Version, last: Version) -> Finding:
    found = f"{package} {release}, tested {first} to {last}"
    if release.release[:2] < first.release[:2]:
        return Finding("versions", PROBLEM, found, f"pip install '{package}>={first}'" * (package != "python"))
    if release.release[:2] > last.release[:2]:
        advice = "newer than what was tested: watch the first run, or install a tested one"
        return Finding("versions", NOTE, found, advice)
    return Finding("versions", OK, found)


def check_memory() -> Iterator[Finding]:
    """Check host memory and its limits. What this system does not tell is left out."""
    free, limit = available_bytes(), memory_limit()
    if free is not None:
        yield Finding("memory", OK, f"{size(free)} are free")
    if limit is not None:
        advice = "plan with --host-memory of that size. The page cache counts too, but the kernel gives it back"
        yield Finding("memory", NOTE, f"this container may use {size(limit)}", advice)
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        yield Finding("memory", PROBLEM, f"addresses are limited to {size(addresses)}", "ulimit -v unlimited")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        advice = "docker run --shm-size 16g, or --ipc host: ranks, workers of DataLoader and NCCL share memory there"
        is_low = free < MIN_SHARED_BYTES
        yield Finding("memory", NOTE if is_low else OK, f"/dev/shm has {size(free)} free", advice * is_low)


def check_storage(folder: str | None) -> Finding:
    """Check the file system of the folder."""
    if folder is None:
        return Finding("storage", NOTE, "no folder of checkpoints was named", "lowmem-load doctor /models")
    if not os.path.isdir(folder):
        return Finding("storage", PROBLEM, f"{folder}: no such folder", "name a folder that holds checkpoints")
    try:
        from lowmem_load.io.mounts import mount_of
    except ImportError as error:  # it needs torch
        return Finding("storage", NOTE, f"{folder}: not checked: {error}")
    mount = mount_of(folder)
    if mount is None or not mount.is_network:
        return Finding("storage", OK, f"{folder}: {'file system not known' if mount is None else mount.kind}")
    block = mount.rsize or os.statvfs(folder).f_bsize
    is_small = bool(mount.rsize) and block < MIN_BLOCK_BYTES
    found = f"{folder}: {mount.kind}, on the network, in blocks of {size(block)}"
    return Finding(
        "storage", NOTE if is_small else OK, found, f"mount it with larger blocks (rsize={1 << 20})" * is_small
    )


def check_launcher() -> Iterator[Finding]:
    """Check that the launcher's variables are complete (none means a single process), and list ours."""
    is_launched = any(os.environ.get(name) for name in LAUNCHER_NAMES)
    try:
        launched(None, None) if is_launched else alone(None, None)
    except ConfigError as error:
        advice = "start with torchrun, deepspeed or accelerate launch, or unset them"
        yield Finding("launcher", PROBLEM, str(error), advice)
    else:
        rank = f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}" if is_launched else ""
        yield Finding("launcher", OK, rank or "none: this would be a process of its own")
    ours = sorted(name for name in os.environ if name.startswith("LOWMEM_LOAD_") or name == "DS_ACCELERATOR")
    if ours:
        yield Finding("settings", NOTE, ", ".join(f"{name}={os.environ[name]}" for name in ours))


def check_devices() -> Iterator[Finding]:
    """Check accelerators, pinned memory, and that DeepSpeed can be imported."""
    try:
        import torch
    except ImportError:
        return  # check_versions reports it
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        yield Finding("devices", OK, f"{torch.accelerator.device_count()} devices of type {device}")
        try:
            torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            advice = "raise ulimit -l, or the container's limit"
            yield Finding("devices", PROBLEM, f"memory cannot be pinned: {first}", advice)
    else:
        yield Finding("devices", NOTE, "torch sees no accelerator", "ranks would run on the CPU (DS_ACCELERATOR=cpu)")
    try:
        import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed
    except ImportError as error:
        yield Finding("devices", PROBLEM, f"DeepSpeed cannot be imported: {error}", "install a tested release")
