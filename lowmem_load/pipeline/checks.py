"""Checks before anything is read: which loads can be streamed, and whether what ranks hold and write fits."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from lowmem_load.config.settings import Settings
from lowmem_load.distributed.nodes import free_heap_bytes, machine, rooms
from lowmem_load.ds.zero3_target import refuse_other_zero_init, refuse_partitioned
from lowmem_load.errors import (
    ConfigError,
    LowMemLoadError,
    MemoryShortageError,
    ModelBuildError,
    UnsupportedError,
)
from lowmem_load.families.call import Call
from lowmem_load.hf.quantizers import packed_format
from lowmem_load.io.executor import MIN_DEVICE_THREADS
from lowmem_load.io.stand_ins import is_stand_in
from lowmem_load.io.uploads import Uploads
from lowmem_load.pipeline.describe import Described
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.text import size, spell_ranks

PLACED_BY_STOCK = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""

SHARDS = ("distributed_config", "tp_plan", "tp_size")
"""Keywords by which `from_pretrained` shards a model."""


class Use(NamedTuple):
    """What one rank needs of a disk or of memory, and what is free there, bytes. Uses of equal `pool` add up."""

    place: str  # for messages
    pool: str
    needed_bytes: int
    free_bytes: int


def may_work_in_stock(error: Exception) -> bool:
    """Return whether an error of all ranks is about streaming, not about files, the ds_config or other ranks."""
    # Errors of other classes come from transformers or the model, which may not be ready for symbolic tensors.
    return isinstance(error, UnsupportedError | ModelBuildError) or not isinstance(error, LowMemLoadError | OSError)


def is_left_alone(call: Call, settings: Settings) -> bool:
    """Return whether transformers does a load by itself, also inside `streaming()`."""
    return settings.stage < 3 and any(call.kwargs.get(name) for name in PLACED_BY_STOCK)


def check_sharing(share: Any) -> None:
    """Raise ConfigError for a value that `share_reads` does not have."""
    if share not in get_args(ShareReads):
        raise ConfigError(f"share_reads: asked for {share!r}, expected one of {', '.join(get_args(ShareReads))}")


def check_left_alone(call: Call) -> None:
    """Raise UnsupportedError for what cannot be done where transformers reads the files."""
    if is_stand_in(call.path):
        raise UnsupportedError(
            f"{call.name}: transformers itself reads the files of this load, which a remote store has; download the "
            "checkpoint and name its folder"
        )


def is_local(call: Call) -> bool:
    """Return whether nothing can come from the Hub, not even the base model of an adapter."""
    folder = os.path.join(call.path, call.kwargs.get("subfolder") or "")
    return os.path.isdir(call.path) and not os.path.isfile(os.path.join(folder, "adapter_config.json"))


def refuse_device_map(call: Call, settings: Settings) -> None:
    """Raise ConfigError for a device_map under ZeRO-3."""
    if settings.stage == 3 and call.kwargs.get("device_map") is not None:
        raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")


def check_described(described: Described) -> None:
    """Raise for what cannot be planned."""
    refuse_partitioned(described.model)
    described.constructor.check(described.name, described.model)
    packed_format(described.model).check(described.name, described.model)
    described.target.check(described.model)


def check_around(init: Any, described: Described) -> None:
    """Raise if a zero.Init around this load makes other parameters than the load."""
    settings, device = described.settings, described.settings.offload_device
    device = described.target.device.type if device == "none" else device
    refuse_other_zero_init(init, dtype=settings.dtype, device=device, world_size=settings.world_size)


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


def check_room(name: str, uses: Sequence[Sequence[Use]]) -> None:
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


def check_memory(name: str, uses: Sequence[Sequence[Use]]) -> None:
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


def _too_large(uses: Sequence[Sequence[Use]]) -> Iterator[tuple[str, Use]]:
    """Yield the uses of all ranks that add up to more than is free, with the ranks as text."""
    pools: dict[str, list[tuple[int, Use]]] = {}
    for rank, of_rank in enumerate(uses):
        for use in of_rank:
            pools.setdefault(use.pool, []).append((rank, use))
    for pool, shared in pools.items():
        needed, free = sum(use.needed_bytes for _, use in shared), min(use.free_bytes for _, use in shared)
        if needed > free:
            yield spell_ranks(sorted({rank for rank, _ in shared})), Use(shared[0][1].place, pool, needed, free)
