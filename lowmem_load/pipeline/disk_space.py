"""Before anything is read: whether what all ranks of a machine will write to files fits on their file systems."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowmem_load.distributed.nodes import machine
from lowmem_load.distributed.verdict import spell_ranks
from lowmem_load.errors import ConfigError


class DiskUse(NamedTuple):
    """What one rank will write below one folder.

    Attributes:
        folder: that exists.
        file_system: equal for ranks that share one. Ranks of several machines that share a network file system are
            taken for sharing none: nothing tells it for sure.
        needed_bytes: that will be written.
        free_bytes: that are free there now, to users other than root.
    """

    folder: str
    file_system: str
    needed_bytes: int
    free_bytes: int


def disk_uses(needed: Mapping[str, int]) -> list[DiskUse]:
    """Return what this rank will write, given by folder in bytes, with what is free there."""
    return [
        DiskUse(folder, f"{machine()} {os.stat(folder).st_dev}", nbytes, shutil.disk_usage(folder).free)
        for folder, nbytes in needed.items()
    ]


def check_room(name: str, uses: Sequence[Sequence[DiskUse]]) -> None:
    """Raise unless all that the ranks will write fits.

    Args:
        name: what is loaded.
        uses: of each rank, by rank.

    Raises:
        ConfigError: names the folder, and what is needed and free there, of each file system that is too full.
    """
    sharing: dict[str, list[tuple[int, DiskUse]]] = {}
    for rank, held in enumerate(uses):
        for use in held:
            sharing.setdefault(use.file_system, []).append((rank, use))
    problems = []
    for shared in sharing.values():
        needed, free = sum(use.needed_bytes for _, use in shared), min(use.free_bytes for _, use in shared)
        if needed > free:
            writers = spell_ranks(sorted({rank for rank, _ in shared}))
            problems.append(
                f"{shared[0][1].folder}: rank(s) {writers} will write {needed} bytes to its file system, and {free} "
                "are free there"
            )
    if problems:
        raise ConfigError(
            f"{name}: offload_param.nvme_path: {'; '.join(problems)}. Free space, or name another folder; nothing has "
            "been read yet"
        )
