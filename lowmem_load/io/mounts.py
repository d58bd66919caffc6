"""The file systems that files lie on, and what a read of them is taken to cost. Reads /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lowmem_load.planning.reads import ReadCost

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "wekafs", "afs"}
)
"""Types of file systems whose files lie on other machines; those that begin with "fuse" may."""

NETWORK_CALL_S, NETWORK_BYTES_PER_S = 1e-3, 5e8
"""What a read of such a file system is taken to cost, beside its bytes, and what one thread reads in a second.

They answer in some 0.1 to 10 ms. AWS states 0.25 ms and more, and 500 MiB/s for a client, of EFS
(docs.aws.amazon.com/efs/latest/ug/performance.html). FUSE by itself took 0.13 ms and 0.85 GB/s on two cores of an AMD
EPYC, and 1.2 ms and 0.16 GB/s where each of its requests waits 1 ms (`benchmarks/slow_storage.py`). It is not measured
in a load: what the page cache holds would look fast, and a server that had been idle slow, to each rank in another way.
"""

MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """Type of a mounted file system, and the bytes of a read of it that its options state; 0 where they do not."""

    kind: str
    rsize: int

    @property
    def is_network(self) -> bool:
        """Whether its files may lie on other machines."""
        return self.kind in NETWORK or self.kind.startswith("fuse")


def mount_of(path: str) -> Mount | None:
    """Return the file system that a file or folder lies on; None where the system does not tell."""
    try:
        lines = MOUNTS.read_bytes().split(b"\n")[:-1]  # each ends with a newline
    except OSError:
        return None
    path, found = os.path.realpath(path), None
    longest = -1
    for line in lines:
        before, _, after = line.partition(b" - ")
        point = _unescaped(before.split(b" ")[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= longest:
            kind, _, options = map(_unescaped, after.split(b" ", 2))  # the source between them may be empty
            sizes = [option.removeprefix("rsize=") for option in options.split(",") if option.startswith("rsize=")]
            longest, found = len(point), Mount(kind, int(sizes[0]) if sizes and sizes[0].isdigit() else 0)
    return found


def _unescaped(text: bytes) -> str:
    """Return a field of mountinfo as the system's calls take it: there space, tab, newline and backslash are octal."""
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda found: bytes([int(found[1], 8)]), text))


def read_cost(paths: Iterable[str]) -> ReadCost:
    """Return what reading files costs, by the kind of the file systems that they lie on.

    On the network a block is what the file system prefers to read (`st_blksize`), or the `rsize` that it was mounted
    with; of several file systems, the largest.
    """
    mounts: dict[str, Mount | None] = {}
    kinds, block_bytes = set(), 1
    for path in paths:
        folder = os.path.dirname(os.path.realpath(path))
        if folder not in mounts:
            mounts[folder] = mount_of(folder)
        mount = mounts[folder]
        if mount is not None and mount.is_network and os.path.exists(path):
            kinds.add(mount.kind)
            block_bytes = max(block_bytes, os.stat(path).st_blksize, mount.rsize)
    if not kinds:
        return ReadCost()
    return ReadCost(NETWORK_CALL_S, NETWORK_BYTES_PER_S, block_bytes, ", ".join(sorted(kinds)))
