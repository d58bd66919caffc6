"""What a load needs on one rank and on one node, and what stock ZeRO-3 needs. Pure.

Peaks are above the memory that the process holds when the load begins, as in `LoadReport`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowmem_load.config.settings import Settings
from lowmem_load.io.uploads import NUM_STREAMS, SLOTS_PER_THREAD
from lowmem_load.pipeline.load import MAX_THREADS
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import Apply, Read, ReadLimits, Step
from lowmem_load.planning.sharing import byte_ranges, node_schedule, reads_of, shared_steps, touched_bytes

OVERHEAD_BYTES = 16 << 20
"""Bytes of a load beside its plan: threads, page tables, objects of DeepSpeed and the model. `make bench` measured 14
to 15 MiB for a model of 1.5 billion parameters on 1, 2 and 4 ranks."""

COLLECTIVE_FACTOR = 3
"""How often stock ZeRO-3 sends each byte of the model: it broadcasts each parameter when it creates it, gathers it, and
broadcasts its values. `make bench` measured 3.0.
Source: transformers 5.23 `integrations/deepspeed.py`, deepspeed 0.19.8 `runtime/zero/partition_parameters.py`."""


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What a load needs on one rank, in bytes.

    Attributes:
        partition_bytes: the partitions, padding included.
        whole_bytes: what every rank holds in full: replicated parameters, buffers, scales.
        host_bytes: host memory held when the load is done.
        host_peak_bytes, device_peak_bytes: peaks during the load.
        host_beside_bytes, device_beside_bytes: these peaks without the partitions, which no world size changes.
        swap_bytes: host buffers for parameters offloaded to nvme, also needed in training.
        needed_bytes, read_bytes, num_reads: see `LoadPlan`.
        slow_ways: number of parameters and extra bytes, by the reason for not reading them straight into place.
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


@dataclass(frozen=True, slots=True)
class NodeReads:
    """What the ranks of one node read together, in bytes. A file system that reads whole blocks counts whole blocks.

    Attributes:
        num_ranks: ranks of the node that take part.
        wanted_bytes: the shared reads without the rest of their blocks.
        alone_bytes: what the ranks would read if each read alone.
        shared_bytes: what they read together instead.
    """

    num_ranks: int
    wanted_bytes: int
    alone_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class StockNeeds:
    """What stock ZeRO-3 needs at least for the same load, in bytes.

    Attributes:
        read_bytes: rank 0 reads all files; the other ranks read nothing.
        host_peak_bytes: rank 0 maps all files, beside its partitions if these are on the host.
        whole_parameter_bytes: every rank holds the largest parameter in full.
        collective_bytes: each rank receives or sends.
    """

    read_bytes: int
    host_peak_bytes: int
    whole_parameter_bytes: int
    collective_bytes: int


def rank_needs(plan: LoadPlan, settings: Settings, *, is_host: bool) -> RankNeeds:
    """Return what a load needs on the rank of a plan.

    Args:
        plan: the plan of the rank.
        settings: resolved for the model.
        is_host: whether the accelerator is the CPU.
    """
    held = {True: 0, False: 0}  # by whether it is on the host
    for target in plan.targets:
        for destination in target.destinations:
            held[destination.on_host] += destination.numel * target.dtype.itemsize
    beside = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers) + plan.companion_bytes
    held[is_host] += beside
    partition_bytes, swap = plan.partition_bytes, 0
    if settings.offload_device == "nvme":
        partition_bytes, swap = 0, _swap_bytes(settings)
        held[True] += swap - plan.partition_bytes
    host_passing, device_passing = _passing_bytes(plan, on_device=held[False] > 0)
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


def _swap_bytes(settings: Settings) -> int:
    """Return the bytes of the swapper's buffers. Source: deepspeed 0.19.8 `runtime/zero/offload_config.py`."""
    offload = settings.ds_config["zero_optimization"]["offload_param"]
    return int(offload.get("buffer_count", 5)) * int(offload.get("buffer_size", 1e8)) * settings.dtype.itemsize


def _passing_bytes(plan: LoadPlan, *, on_device: bool) -> tuple[int, int]:
    """Return the bytes of the host and device buffers that reads pass through, with a core for every thread."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    host = plan.largest_temporary_bytes * (MAX_THREADS if any(isinstance(step, Apply) for step in steps) else 1)
    if not on_device:
        return host + MAX_THREADS * plan.staging_bytes, 0
    slot_bytes = ReadLimits().staging_bytes
    ring_bytes = SLOTS_PER_THREAD * MAX_THREADS * slot_bytes
    return host + ring_bytes, NUM_STREAMS * slot_bytes if any(map(_changes, steps)) else 0


def _changes(step: Step) -> bool:
    """Return whether a step on a device does more than copy elements in their order."""
    if isinstance(step, Read):
        return bool(step.nest.casts) or any(axis.source != axis.destination for axis in (*step.outer, *step.nest.axes))
    return isinstance(step, Apply)


def _slow_ways(plan: LoadPlan) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for path in plan.slow_paths:
        number, extra_bytes = found.get(path.reason, (0, 0))
        found[path.reason] = number + 1, extra_bytes + path.extra_bytes
    return found


def node_reads(plans: Sequence[LoadPlan]) -> NodeReads | None:
    """Return what the ranks of one node read together, given their plans; None if each reads alone."""
    chosen = [shared_steps(plan) for plan in plans]
    ranges = [byte_ranges(read for step in steps for read in reads_of(step)) for steps in chosen if steps]
    if len(ranges) < 2:
        return None
    block_bytes = max(plan.read_cost.block_bytes for plan in plans)
    found = node_schedule(ranges, block_bytes)
    if found is None:
        return None
    alone_bytes = sum(touched_bytes(each, block_bytes) for each in ranges)
    return NodeReads(found.num_ranks, found.wanted_bytes, alone_bytes, found.touched_bytes(block_bytes))


def stock_needs(plan: LoadPlan, *, held_on_host_bytes: int) -> StockNeeds:
    """Return what stock ZeRO-3 needs for a planned load.

    Args:
        plan: the plan of any rank.
        held_on_host_bytes: host memory that a rank holds when the load is done.
    """
    file_bytes = sum(file.nbytes for file in plan.files)
    sizes = [target.numel * target.dtype.itemsize for target in plan.targets]
    return StockNeeds(
        read_bytes=file_bytes,
        host_peak_bytes=file_bytes + held_on_host_bytes,
        whole_parameter_bytes=max(sizes, default=0),
        collective_bytes=COLLECTIVE_FACTOR * sum(sizes) if plan.world_size > 1 else 0,
    )
