"""A folder of checkpoints: its file system, space, and how fast it reads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding
from lowmem_load.errors import CheckpointError
from lowmem_load.quantities import size
from lowmem_load.read.mounts import NETWORK_BYTES_PER_S, NETWORK_CALL_S, mount_of
from lowmem_load.read.rate import read_rate

MIN_BLOCK_BYTES = 128 << 10
"""Below this a network file system answers each read in many small messages."""

MIN_FREE_BYTES = 5 << 30
"""Free space below which saves and compiled ops are in danger."""


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


def _file_system(folder: str) -> Finding:
    mount = mount_of(folder)
    block = os.statvfs(folder).f_bsize
    if mount is None:
        return Finding("storage", OK, f"{folder}: blocks of {size(block)}")
    block = mount.rsize or block
    said = f"{folder}: {mount.kind}, reads in blocks of {size(block)}"
    if not mount.is_network:
        return Finding("storage", OK, said)
    cost = f"a read is taken to cost {NETWORK_CALL_S * 1e3:g} ms, and bytes {NETWORK_BYTES_PER_S / 1e6:g} MB/s"
    said += f"; it is on the network, where {cost}"
    if mount.rsize and block < MIN_BLOCK_BYTES:
        return Finding("storage", NOTE, said, f"mount it with larger blocks (rsize={1 << 20})")
    return Finding("storage", OK, said)


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
