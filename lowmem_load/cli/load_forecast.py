"""What a load takes on one rank and on one node, and what stock ZeRO-3 would take, read off plans. Pure.

Peaks are above what the process holds when the load begins, as `LoadReport` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowmem_load.config.settings import Settings
from lowmem_load.io.executor import MIN_STAGING_BYTES
from lowmem_load.io.uploads import NUM_LANES, SLOTS_PER_THREAD
from lowmem_load.pipeline.load import MAX_THREADS
from lowmem_load.planning.cooperative import node_schedule, reads_of, shared_steps, touched_bytes, wanted
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import Apply, Read, ReadLimits, Step

OVERHEAD_BYTES = 16 << 20
"""Of a load, besides what its plan says: threads, page tables, objects of DeepSpeed and the model. Measured by
`make bench`: 14 to 15 MiB for a model of 1.5 billion parameters on 1, 2 and 4 ranks."""

COLLECTIVE_FACTOR = 3
"""How often stock ZeRO-3 sends every byte of the model through collectives: each parameter is broadcast when it is
made, gathered, and broadcast with its values. `make bench` measured 3.0 times the model's bytes.
Source: transformers 5.23 `integrations/deepspeed.py`, deepspeed 0.19.8 `runtime/zero/partition_parameters.py`."""


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What a load takes on one rank. Bytes.

    Attributes:
        partition_bytes: of the partitions, padding included.
        whole_bytes: of what every rank holds whole: parameters beside the partitions, buffers, scales.
        host_bytes: held of host memory when the load is done.
        host_peak_bytes, device_peak_bytes: the most that is held during it.
        host_beside_bytes, device_beside_bytes: of these peaks, all but partitions: what no world size changes.
        swap_bytes: of host memory through which parameters pass that are offloaded to nvme, also in training.
        needed_bytes, read_bytes, num_reads: see `LoadPlan`.
        slow_ways: parameters, and the bytes beyond theirs, by why they are not read straight to where they stay.
    """

    partition_bytes: int
    whole_bytes: int
    host_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    host_beside_bytes: int
    device_beside_bytes: int
    swap_bytes: int
    needed_bytes: int
    read_bytes: int
    num_reads: int
    slow_ways: Mapping[str, tuple[int, int]]


def rank_needs(plan: LoadPlan, settings: Settings, *, is_host: bool) -> RankNeeds:
    """Return what a load takes.

    Args:
        plan: of the rank.
        settings: resolved for the model.
        is_host: whether the accelerator is the CPU.
    """
    held = {True: 0, False: 0}  # on the host, on the device
    for target in plan.targets:
        for destination in target.destinations:
            held[destination.on_host] += destination.numel * target.dtype.itemsize
    beside = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers) + plan.companion_bytes
    held[is_host] += beside
    partition_bytes, swap = plan.partition_bytes, 0
    if settings.offload_device == "nvme":
        partition_bytes, swap = 0, swap_bytes(settings)
        held[True] += swap - plan.partition_bytes
    host_passing, device_passing = _passing(plan, on_device=held[False] > 0)
    host_peak = held[True] + plan.planning_bytes + OVERHEAD_BYTES + host_passing
    device_peak = held[False] + device_passing
    in_host = is_host or settings.offload_device == "cpu"
    return RankNeeds(
        partition_bytes=plan.partition_bytes,
        whole_bytes=plan.replicated_bytes + beside,
        host_bytes=held[True],
        host_peak_bytes=host_peak,
        device_peak_bytes=device_peak,
        host_beside_bytes=host_peak - swap - (partition_bytes if in_host else 0),
        device_beside_bytes=device_peak - (0 if in_host else partition_bytes),
        swap_bytes=swap,
        needed_bytes=plan.needed_bytes,
        read_bytes=plan.read_bytes,
        num_reads=plan.num_reads,
        slow_ways=_slow_ways(plan),
    )


def swap_bytes(settings: Settings) -> int:
    """Return the bytes of the buffers of the swapper. Source: deepspeed 0.19.8 `runtime/zero/offload_config.py`."""
    offload = settings.ds_config["zero_optimization"]["offload_param"]
    return int(offload.get("buffer_count", 5)) * int(offload.get("buffer_size", 1e8)) * settings.dtype.itemsize


def _passing(plan: LoadPlan, *, on_device: bool) -> tuple[int, int]:
    """Return the bytes of host and device memory through which bytes go on their way, on a rank with enough cores."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    host = plan.largest_temporary_bytes * (MAX_THREADS if any(isinstance(step, Apply) for step in steps) else 1)
    if not on_device:
        return host + MAX_THREADS * (max(MIN_STAGING_BYTES, plan.staging_bytes) if plan.staging_bytes else 0), 0
    slot_bytes = ReadLimits().staging_bytes
    ring_bytes = SLOTS_PER_THREAD * MAX_THREADS * slot_bytes
    return host + ring_bytes, NUM_LANES * slot_bytes if any(map(_changes, steps)) else 0


def _changes(step: Step) -> bool:
    """Return whether a step does more on a device than to copy elements in the order in which they lie."""
    if isinstance(step, Read):
        return bool(step.nest.casts) or any(axis.source != axis.destination for axis in (*step.outer, *step.nest.axes))
    return isinstance(step, Apply)


def _slow_ways(plan: LoadPlan) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for path in plan.slow_paths:
        number, extra_bytes = found.get(path.reason, (0, 0))
        found[path.reason] = number + 1, extra_bytes + path.extra_bytes
    return found


@dataclass(frozen=True, slots=True)
class NodeReads:
    """What the ranks of one node read together. Bytes; of a file system that reads whole blocks, those of the blocks.

    Attributes:
        num_ranks: of the node, that take part.
        wanted_bytes: of the reads that they do together, without what else is in their blocks.
        alone_bytes: that they would read for these if each read alone.
        shared_bytes: that they read for these instead.
    """

    num_ranks: int
    wanted_bytes: int
    alone_bytes: int
    shared_bytes: int


def node_reads(plans: Sequence[LoadPlan]) -> NodeReads | None:
    """Return what the ranks of one node, of these plans, will read together; None where each reads alone."""
    chosen = [shared_steps(plan) for plan in plans]
    ranges = [wanted(read for step in steps for read in reads_of(step)) for steps in chosen if steps]
    if len(ranges) < 2:
        return None
    block_bytes = max(plan.read_cost.block_bytes for plan in plans)
    found = node_schedule(ranges, block_bytes)
    if found is None:
        return None
    alone_bytes = sum(touched_bytes(each, block_bytes) for each in ranges)
    return NodeReads(found.num_ranks, found.wanted_bytes, alone_bytes, found.touched_bytes(block_bytes))


@dataclass(frozen=True, slots=True)
class StockNeeds:
    """What stock ZeRO-3 takes for the same load, at least. Bytes.

    Attributes:
        read_bytes: that rank 0 reads: all files. The other ranks read nothing.
        host_peak_bytes: of rank 0: all files, mapped, beside its partition where that is on the host.
        whole_parameter_bytes: that every rank holds besides, of the largest parameter, whole.
        collective_bytes: that each rank receives or sends.
    """

    read_bytes: int
    host_peak_bytes: int
    whole_parameter_bytes: int
    collective_bytes: int


def stock_needs(plan: LoadPlan, *, held_on_host_bytes: int) -> StockNeeds:
    """Return what stock takes for a planned load.

    Args:
        plan: of any rank.
        held_on_host_bytes: of a rank when the load is done.
    """
    file_bytes = sum(file.nbytes for file in plan.files)
    sizes = [target.numel * target.dtype.itemsize for target in plan.targets]
    return StockNeeds(
        read_bytes=file_bytes,
        host_peak_bytes=file_bytes + held_on_host_bytes,
        whole_parameter_bytes=max(sizes, default=0),
        collective_bytes=COLLECTIVE_FACTOR * sum(sizes) if plan.world_size > 1 else 0,
    )
