"""What a load takes on one rank, read off its plan. Pure.

Peaks are above what the process holds when the load begins, as `LoadReport` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lowmem_load.inspection.conversions import is_run, read_sizes, reads_of
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import Apply, ReadLimits
from lowmem_load.read.executor import MIN_STAGING_BYTES
from lowmem_load.read.uploads import NUM_LANES, SLOTS_PER_THREAD
from lowmem_load.settings.settings import Settings

OVERHEAD_BYTES = 16 << 20
"""Of a load, besides what its plan says: threads, page tables, objects of DeepSpeed and the model. Measured by
`make bench`: 14 to 15 MiB for a model of 1.5 billion parameters on 1, 2 and 4 ranks."""


@dataclass(frozen=True, slots=True)
class SlowWay:
    """Why parameters are not read straight to where they stay: how many, the bytes beyond theirs, and one of them."""

    reason: str
    num_parameters: int
    extra_bytes: int
    example: str


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What a load takes on one rank. Bytes.

    Attributes:
        rank: in the partition group.
        partition_bytes: of the partitions, padding included.
        whole_bytes: of what every rank holds whole: parameters beside the partitions, buffers, scales.
        host_bytes, device_bytes: that are held when the load is done.
        host_peak_bytes, device_peak_bytes: the most that is held during it.
        disk_bytes: that are written for offload_param to nvme.
        needed_bytes, read_bytes, num_reads: see `LoadPlan`.
        read_sizes: how many reads fetch how many bytes.
        slow_ways: by reason.
    """

    rank: int
    partition_bytes: int
    whole_bytes: int
    host_bytes: int
    device_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    disk_bytes: int
    needed_bytes: int
    read_bytes: int
    num_reads: int
    read_sizes: Mapping[int, int]
    slow_ways: tuple[SlowWay, ...]


def rank_needs(plan: LoadPlan, settings: Settings, *, is_host: bool, num_threads: int) -> RankNeeds:
    """Return what a load takes.

    Args:
        plan: of the rank.
        settings: resolved for the model.
        is_host: whether the accelerator is the CPU.
        num_threads: that read.
    """
    host = device = 0
    for target in plan.targets:
        for destination in target.destinations:
            nbytes = destination.numel * target.dtype.itemsize
            host, device = (host + nbytes, device) if destination.on_host else (host, device + nbytes)
    beside = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers) + plan.companion_bytes
    host, device = (host + beside, device) if is_host else (host, device + beside)
    disk = 0
    if settings.offload_device == "nvme":
        disk, host = plan.partition_bytes, host - plan.partition_bytes + swap_bytes(settings)
    host_passing, device_passing = _passing(plan, device=device, num_threads=num_threads)
    return RankNeeds(
        rank=plan.rank,
        partition_bytes=plan.partition_bytes,
        whole_bytes=plan.replicated_bytes + beside,
        host_bytes=host,
        device_bytes=device,
        host_peak_bytes=host + plan.planning_bytes + OVERHEAD_BYTES + host_passing,
        device_peak_bytes=device + device_passing,
        disk_bytes=disk,
        needed_bytes=plan.needed_bytes,
        read_bytes=plan.read_bytes,
        num_reads=plan.num_reads,
        read_sizes=read_sizes(plan),
        slow_ways=_slow_ways(plan),
    )


def _passing(plan: LoadPlan, *, device: int, num_threads: int) -> tuple[int, int]:
    """Return the bytes of host and device memory through which bytes go on their way."""
    fills = [fill for target in plan.targets for fill in target.fills]
    applies = any(isinstance(step, Apply) for fill in fills for step in fill.steps)
    host = plan.largest_temporary_bytes * (num_threads if applies else 1)
    if not device:
        return host + num_threads * (max(MIN_STAGING_BYTES, plan.staging_bytes) if plan.staging_bytes else 0), 0
    slot = ReadLimits().staging_bytes
    ring = (1 << (SLOTS_PER_THREAD * max(2, num_threads) - 1).bit_length()) * slot
    converts = applies or any(read.nest.casts or not is_run(read) for read in reads_of(fills, plan))
    return host + ring, NUM_LANES * slot if converts else 0


def swap_bytes(settings: Settings) -> int:
    """Return the bytes of the buffers of the swapper. Source: deepspeed 0.19.8 `runtime/zero/offload_config.py`."""
    offload = settings.ds_config["zero_optimization"]["offload_param"]
    return int(offload.get("buffer_count", 5)) * int(offload.get("buffer_size", 1e8)) * settings.dtype.itemsize


def _slow_ways(plan: LoadPlan) -> tuple[SlowWay, ...]:
    found: dict[str, SlowWay] = {}
    for path in plan.slow_paths:
        known = found.get(path.reason, SlowWay(path.reason, 0, 0, path.name))
        found[path.reason] = SlowWay(
            path.reason, known.num_parameters + 1, known.extra_bytes + path.extra_bytes, known.example
        )
    return tuple(sorted(found.values(), key=lambda way: -way.extra_bytes))
