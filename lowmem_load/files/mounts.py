"""Finds the file system of a file, and what a read from it costs. Reads /proc."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lowmem_load.files.remote_file import REQUEST_BYTES
from lowmem_load.files.stand_ins import is_stand_in
from lowmem_load.planning.reads import ReadCost

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "wekafs", "afs"}
)
"""Types of network file systems. Those whose type starts with "fuse" may be network file systems, too."""

COHERENT = frozenset({"lustre", "gpfs", "ceph", "wekafs"})
"""Types of network file systems whose nodes lock what they cache, so that one sees what another has written."""

NETWORK_CALL_S, NETWORK_BYTES_PER_S = 1e-3, 5e8
"""Cost of a read from a network file system: seconds for each read, and bytes per second of one thread.

Network file systems answer in 0.1 to 10 ms. For EFS, AWS states at least 0.25 ms, and 500 MiB/s for a client
(docs.aws.amazon.com/efs/latest/ug/performance.html). FUSE that waits 1 ms for each request took 1.2 ms and 0.16 GB/s
(`benchmarks/slow_storage.py`, two cores of an AMD EPYC). A load does not measure it: ranks would find different costs,
depending on what the page cache holds, and their plans must not differ.
"""

STORE = ReadCost(0.03, 9e7, request_bytes=REQUEST_BYTES)
"""Cost of a read from a remote store, by one connection: AWS states 85 to 90 MB/s, and tens of milliseconds until the
first byte (S3 performance guidelines)."""

NUM_PROBES = 8
"""Blocks of a file of which the page cache is asked."""

MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """Type of a mounted file system, and the read size of its mount options in bytes; 0 if they state none."""

    kind: str
    rsize: int

    @property
    def is_network(self) -> bool:
        """Whether its files may be on other machines."""
        return self.kind in NETWORK or self.kind.startswith("fuse")


def mount_of(path: str) -> Mount:
    """Return the file system of a file or folder; one of no kind if /proc does not tell."""
    path, mount, longest = os.path.realpath(path), Mount("", 0), -1
    try:
        lines = MOUNTS.read_bytes().split(b"\n")[:-1]  # each ends with a newline
    except OSError:
        return mount
    for line in lines:
        before, _, after = line.partition(b" - ")
        point = _unescaped(before.split(b" ")[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= longest:
            kind, _, options = map(_unescaped, after.split(b" ", 2))  # the source between them may be empty
            sizes = [option.removeprefix("rsize=") for option in options.split(",") if option.startswith("rsize=")]
            longest, mount = len(point), Mount(kind, int(sizes[0]) if sizes and sizes[0].isdigit() else 0)
    return mount


def _unescaped(text: bytes) -> str:
    # mountinfo writes space, tab, newline and backslash in octal.
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), text))


def is_on_network(path: str) -> bool:
    """Return whether a file may be on another machine."""
    return mount_of(path).is_network


def has_caches_apart(folder: str) -> bool:
    """Return whether nodes cache what they write to a folder without asking each other, as those of NFS do."""
    mount = mount_of(folder)
    return mount.is_network and mount.kind not in COHERENT


def read_cost(paths: Iterable[str]) -> ReadCost:
    """Return what reading some files costs, by the types of their file systems.

    On a network file system a block is the larger of `st_blksize` and the `rsize` of the mount. If there are several
    file systems, the largest block counts. Files in a remote store cost as `STORE` says.
    """
    paths, block_bytes = list(paths), 1
    if any(map(is_stand_in, paths)):
        return STORE
    for folder, path in {os.path.dirname(os.path.realpath(path)): path for path in paths}.items():
        mount = mount_of(folder)
        if mount.is_network and os.path.exists(path):
            block_bytes = max(block_bytes, os.stat(path).st_blksize, mount.rsize)
    return ReadCost(NETWORK_CALL_S, NETWORK_BYTES_PER_S, block_bytes) if block_bytes > 1 else ReadCost()


def is_cached(path: str) -> bool:
    """Return whether most of some blocks of a file are in the page cache.

    Where that cannot be asked, files of network file systems are not, and others are.
    """
    # The question brings a block in. So the ranks of a node must not ask for the same ones.
    places, num_cached = random.Random(os.urandom(8)), 0
    try:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else the question would start the readahead
            last = max(0, os.fstat(file.fileno()).st_size - 1)
            for _ in range(NUM_PROBES):
                with contextlib.suppress(BlockingIOError):
                    os.preadv(file.fileno(), [bytearray(1)], places.randint(0, last), os.RWF_NOWAIT)
                    num_cached += 1
    except OSError:  # such as EOPNOTSUPP
        return not is_on_network(path)
    return num_cached > NUM_PROBES // 2
