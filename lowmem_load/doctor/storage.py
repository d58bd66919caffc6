"""A folder of checkpoints: its file system, space, and how fast it reads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding
from lowmem_load.errors import CheckpointError
from lowmem_load.quantities import size
from lowmem_load.read.rate import read_rate

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "wekafs", "afs"}
)
"""Types of file systems whose files lie on other machines; those that begin with "fuse" may."""

MIN_BLOCK_BYTES = 128 << 10
"""Below this a network file system answers each read in many small messages."""

MIN_FREE_BYTES = 5 << 30
"""Free space below which saves and compiled ops are in danger."""

MOUNTS = Path("/proc/self/mountinfo")


def check_storage(folder: str | None) -> Iterator[Finding]:
    """Yield what is to be said of the folder, if one is given, and of where temporary files go."""
    yield _space(tempfile.gettempdir())
    if folder is None:
        yield Finding("storage", NOTE, "no folder of checkpoints was named", "lowmem-load doctor /models")
        return
    if not os.path.isdir(folder):
        yield Finding("storage", PROBLEM, f"{folder}: no such folder", "name a folder that holds checkpoints")
        return
    yield _space(folder)
    yield _file_system(folder)
    yield from _speed(folder)


def _space(folder: str) -> Finding:
    free = shutil.disk_usage(folder).free
    low = free < MIN_FREE_BYTES
    return Finding("storage", NOTE if low else OK, f"{folder}: {size(free)} free", "make room there" * low)


def mount_of(folder: str) -> tuple[str, str] | None:
    """Return type and options of the file system that a folder lies on; None where the system does not tell."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    path, found = os.path.realpath(folder), None
    longest = -1
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= longest:
            kind, _, options = after.split(maxsplit=2)
            longest, found = len(point), (kind, options)
    return found


def _file_system(folder: str) -> Finding:
    mount = mount_of(folder)
    block = os.statvfs(folder).f_bsize
    if mount is None:
        return Finding("storage", OK, f"{folder}: blocks of {size(block)}")
    kind, options = mount
    sizes = [option.removeprefix("rsize=") for option in options.split(",") if option.startswith("rsize=")]
    block = int(sizes[0]) if sizes and sizes[0].isdigit() else block
    said = f"{folder}: {kind}, reads in blocks of {size(block)}"
    if kind not in NETWORK and not kind.startswith("fuse"):
        return Finding("storage", OK, said)
    advice = "it is on the network: set LOWMEM_LOAD_READ_CALL_US to what one read takes there (500 to 2000, say)"
    if sizes and block < MIN_BLOCK_BYTES:
        advice += f", and mount it with larger blocks (rsize={1 << 20})"
    return Finding("storage", NOTE, said, advice)


def _speed(folder: str) -> Iterator[Finding]:
    names = sorted(os.listdir(folder))
    paths = [os.path.join(folder, name) for name in names if name.endswith((".safetensors", ".bin"))]
    if not paths:
        return
    try:
        rate = read_rate(paths, num_threads=4)
    except CheckpointError as error:
        yield Finding("storage", PROBLEM, str(error), "mend the file, or its permissions")
        return
    if rate is not None:
        yield Finding("storage", OK, f"{folder}: {rate / 1e9:.2f} GB/s with four reads at a time, cache included")
