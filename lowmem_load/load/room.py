"""Whether what the ranks of a load hold and write fits: into the memory of each node, and onto its disks."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lowmem_load.distributed.nodes import free_heap_bytes, machine, rooms
from lowmem_load.errors import ConfigError, MemoryShortageError
from lowmem_load.files.executor import MIN_DEVICE_THREADS
from lowmem_load.files.uploads import Uploads
from lowmem_load.load.describe import Described
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.text import size, spell_ranks


class Use(NamedTuple):
    """What one rank needs of a disk or of memory, and what is free there, bytes. Uses of equal `pool` add up."""

    place: str  # for messages
    pool: str
    needed_bytes: int
    free_bytes: int


Uses = Sequence[Sequence[Sequence[Any]]]
"""What each rank uses; a `Use` that came from another one is a list."""


def disk_uses(needed: Mapping[str, int]) -> list[Use]:
    """Return what this rank will write, given in bytes by folder, with what is free there to users other than root.

    A network file system counts once per machine, because nothing shows for sure that two machines share it.
    """
    return [
        Use(folder, f"{machine()} {os.stat(folder).st_dev}", nbytes, shutil.disk_usage(folder).free)
        for folder, nbytes in needed.items()
    ]


def memory_uses(rank: int, plan: LoadPlan, described: Described, num_threads: int, message_bytes: int = 0) -> list[Use]:
    """Return the host memory that a load will need on this rank at least, with what is free of all that bounds it.

    `message_bytes` are those of messages to other ranks.
    """
    target = described.target
    need = target.host_bytes(plan.targets)
    new_bytes = need.new + plan.costs.largest_temporary_bytes + plan.companion_bytes - free_heap_bytes()
    new_bytes += message_bytes
    if target.device.type == "cpu":
        buffers = [buffer for buffer in plan.buffers if buffer.fill is not None]  # others are in memory already
        new_bytes += sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)
        new_bytes += plan.costs.staging_bytes
    elif described.settings.offload_device == "none":
        new_bytes += Uploads.missing_bytes(max(MIN_DEVICE_THREADS, num_threads))
    return [
        Use(room.place, room.pool, max(0, new_bytes + (0 if room.is_mapped else need.untouched)), room.free_bytes)
        for room in rooms(rank)
    ]


def check_room(name: str, uses: Uses) -> None:
    """Raise ConfigError, which names each file system that is too full, unless all that the ranks will write fits."""
    problems = [
        f"{use.place}: rank(s) {writers} will write {size(use.needed_bytes)} to its file system, and "
        f"{size(use.free_bytes)} are free there"
        for writers, use in _too_large(uses)
    ]
    if problems:
        raise ConfigError(
            f"{name}: offload_param.nvme_path: {'; '.join(problems)}. Free space, or name another folder; nothing has "
            "been read yet"
        )


def check_memory(name: str, uses: Uses) -> None:
    """Raise MemoryShortageError, which names each node and limit that is too small, unless the load fits into memory.

    `uses` has those of each rank.
    """
    problems = [
        f"rank(s) {ranks} need {size(use.needed_bytes)}, and {size(use.free_bytes)} are free ({use.place})"
        for ranks, use in _too_large(uses)
    ]
    if problems:
        raise MemoryShortageError(
            f"{name}: does not fit into host memory: {'; '.join(problems)}. Use more nodes or fewer ranks on each, "
            "offload_param to nvme (there already: a smaller buffer_size), end other processes, or raise the limit; "
            "nothing has been allocated or read yet"
        )


def _too_large(uses: Uses) -> Iterator[tuple[str, Use]]:
    """Yield the uses of all ranks that add up to more than is free, with the ranks as text."""
    pools: dict[str, list[tuple[int, Use]]] = {}
    for rank, of_rank in enumerate(uses):
        for use in (Use(*values) for values in of_rank):
            pools.setdefault(use.pool, []).append((rank, use))
    for pool, shared in pools.items():
        needed, free = sum(use.needed_bytes for _, use in shared), min(use.free_bytes for _, use in shared)
        if needed > free:
            yield spell_ranks(sorted({rank for rank, _ in shared})), Use(shared[0][1].place, pool, needed, free)
