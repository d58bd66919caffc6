"""What each rank of a load reads and needs: the answer of `lowmem-load plan`. Reads headers only.

docs/howto/plan.md explains the rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch

from lowmem_load.config.settings import read_settings
from lowmem_load.engines.partition import check_by_deepspeed
from lowmem_load.errors import UnsupportedError, listed
from lowmem_load.files.stand_ins import origin
from lowmem_load.files.uploads import NUM_STREAMS, SLOTS_PER_THREAD
from lowmem_load.load.load import MAX_THREADS
from lowmem_load.load.load_model import plan_rank
from lowmem_load.load.request import class_and_config
from lowmem_load.models.model_folder import find_checkpoint
from lowmem_load.models.quantizers import dequantizing, four_bit_config, stays_packed
from lowmem_load.models.skeleton import distributed_config
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import Apply, ReadLimits
from lowmem_load.planning.replicas import once_bytes
from lowmem_load.text import count, size

OVERHEAD_BYTES = 32 << 20
"""Host memory of a load in addition to its buffers: plan, threads, page tables. `make bench` measured 14 to 15 MiB."""

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
"""The ds_config of a plan that names none."""


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of a job, and of its fullest node; the sizes of its mesh, for FSDP2, or its ds_config, for ZeRO."""

    world_size: int
    node_size: int
    mesh: Mapping[str, int] | None
    ds_config: str | None

    def __str__(self) -> str:
        num_nodes = -(-self.world_size // self.node_size)
        nodes = f"{num_nodes} nodes of {self.node_size}" if num_nodes > 1 else "one node"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} on {nodes}"


def needs_of(
    name: str, job: Job, *, revision: str | None, four_bit: bool, dequantize: bool, **keywords: Any
) -> dict[str, Any]:
    """Return what a load reads and needs on rank 0, which owns the most: in words ("about") by topic, and in figures.

    `host_bytes` and `device_bytes` are the peaks of a rank while loading, partitions included, on top of the process.
    `keywords` are those of `lowmem_load.plan`.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process; the plan is for the job's
    folder = find_checkpoint(name, subfolder=keywords["subfolder"], revision=revision)
    _, config = class_and_config(folder, keywords["auto_class"], keywords)
    if dequantize:
        keywords["quantization_config"] = dequantizing(folder, keywords)
    plan_rank_0 = _plan_zero if job.mesh is None else _plan_fsdp2
    plan, about, where, swap_bytes = plan_rank_0(folder, job, config, keywords, four_bit=four_bit)
    host_bytes, device_bytes = load_bytes(plan)
    host_bytes += plan.partition_bytes if where == "cpu" else swap_bytes
    device_bytes += plan.partition_bytes if where == "none" else 0
    about |= _about(plan, job, where)
    about["memory while loading"] = (
        f"GPU {size(device_bytes)} and host {size(host_bytes)} for a rank, "
        f"host {size(job.node_size * host_bytes)} for a node, not counting the processes themselves"
    )
    peaks = {"host_bytes": host_bytes, "device_bytes": device_bytes}
    keys = {"missing_keys": plan.missing_keys, "unexpected_keys": plan.unexpected_keys}
    needs = {"name": origin(name), "about": about, "costs": asdict(plan.costs), "partition_bytes": plan.partition_bytes}
    return {**needs, **peaks, **keys}


def _plan_zero(
    folder: str, job: Job, config: Any, keywords: dict[str, Any], *, four_bit: bool
) -> tuple[LoadPlan, dict[str, str], str, int]:
    """Return the plan of rank 0, what it was made for, where partitions stay, and the bytes of swap buffers."""
    ds_config = job.ds_config or DS_CONFIG
    settings = read_settings(ds_config, world_size=job.world_size).for_model(config)
    check_by_deepspeed(settings.ds_config, job.world_size // settings.ds_config.get("sequence_parallel_size", 1))
    if four_bit:
        keywords["quantization_config"] = _four_bits(config, settings.dtype)
    device = torch.device("cuda")  # any other accelerator is planned for alike
    plan = plan_rank(folder, ds_config, rank=0, world_size=job.world_size, device=device, **keywords)
    about = {"planned for": f"ZeRO-{settings.stage}, on GPUs"}
    if job.ds_config is None:
        about["ds_config"] = "none given: stage 3, bf16"
    return plan, about, settings.offload_device, settings.swap_bytes


def _plan_fsdp2(
    folder: str, job: Job, config: Any, keywords: dict[str, Any], *, four_bit: bool
) -> tuple[LoadPlan, dict[str, str], str, int]:
    """Return the same of the first rank of a mesh, which uneven shards make the largest."""
    sizes = dict(job.mesh or {})
    is_fsdp_alone = sizes["tp_size"] == sizes["ep_size"] == 1
    if not is_fsdp_alone and (config is None or four_bit):
        what = "a model of diffusers is" if config is None else "4-bit weights are"
        raise UnsupportedError(f"{what} sharded by FSDP2 alone; drop --tp and --ep")
    if four_bit:
        keywords |= {"quantization_config": _four_bits(config, torch.bfloat16), "dtype": "bfloat16"}
    is_packed = four_bit or stays_packed(getattr(config, "quantization_config", None))
    sharding: Any = [size for size in (sizes["dp_replicate_size"], sizes["fsdp_size"]) if size > 1] or [1]
    if not (is_fsdp_alone and (is_packed or config is None)):
        sharding = distributed_config(sizes)  # which refuses packed weights
    plan = plan_rank(folder, sharding=sharding, rank=0, world_size=job.world_size, **keywords)
    mesh = ", ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1)
    return plan, {"planned for": "FSDP2, on GPUs", **({"mesh": mesh} if mesh else {})}, "none", 0


def _four_bits(config: Any, dtype: torch.dtype) -> Any:
    if config is None:
        raise UnsupportedError("--four-bit: diffusers itself quantizes its models")
    if find_spec("bitsandbytes") is None:
        raise UnsupportedError("--four-bit: needs bitsandbytes (pip install 'lowmem-load[qlora]')")
    return four_bit_config(dtype)


def _full_bytes(plan: LoadPlan) -> int:
    """Return the bytes that every rank has in full: replicated parameters, buffers, scales."""
    buffers = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers)
    return plan.replicated_bytes + plan.companion_bytes + buffers


def load_bytes(plan: LoadPlan) -> tuple[int, int]:
    """Return the peaks of host and device memory of a load without partitions, with a core for every thread."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    num_temporary = MAX_THREADS if any(isinstance(step, Apply) for step in steps) else 1
    slot_bytes = ReadLimits().staging_bytes
    host = OVERHEAD_BYTES + plan.costs.largest_temporary_bytes * num_temporary
    return host + SLOTS_PER_THREAD * MAX_THREADS * slot_bytes, NUM_STREAMS * slot_bytes + _full_bytes(plan)


# -- in words ----------------------------------------------------------------------------------------------------------


def _about(plan: LoadPlan, job: Job, where: str) -> dict[str, str]:
    """Return what a plan of rank 0 says, by topic."""
    costs, once, num_files = plan.costs, once_bytes(plan), len(plan.files)
    memory = {"none": "GPU memory", "cpu": "host memory"}.get(where, where)
    # Packed parameters count as those that they stand for.
    numels = [2 * each.numel * each.dtype.itemsize if each.companions else each.numel for each in plan.targets]
    largest = plan.targets[numels.index(max(numels))]
    dtype = "4 bits" if plan.num_quantized else str(largest.dtype).removeprefix("torch.")
    rows = {
        "model": f"{count(sum(numels))} parameters in {dtype}",
        "checkpoint": f"{size(sum(file.nbytes for file in plan.files))} in {num_files} file{'s' * (num_files > 1)}",
        "job": str(job),
        "rank 0 owns": f"{size(plan.partition_bytes)} of the parameters in {memory}, and {size(_full_bytes(plan))} "
        "that all have",
        "rank 0 reads": f"{size(costs.read_bytes)} in {costs.num_reads:,} reads",
        "a node reads": size(job.node_size * costs.read_bytes),
    }
    if (ratio := costs.read_bytes / max(costs.needed_bytes, 1)) > 1:
        rows["read / needed"] = f"{ratio:.2f}: what lies apart in the files is read with the gaps between"
    if once < costs.read_bytes:
        rows["replicas read once"] = f"{size(once * job.node_size)} by a node; {size(once * job.world_size)} by all"
    if plan.read_cost.request_bytes:
        num_requests = costs.num_reads * job.node_size
        rows["requests to the store"] = f"{num_requests:,} by a node, apart from those for small files"
    if costs.staging_bytes:
        rows["staging"] = f"{size(costs.staging_bytes)} for each reading thread"
    if missing := plan.missing_keys:
        names = f"{len(missing)} of {len(plan.targets)} tensors: {listed(missing, 3)}"
        rows["in no file"] = f"{names}. Is the model's class right (--auto-class)?"
    if plan.unexpected_keys:
        rows["not in the model"] = listed(plan.unexpected_keys, 3)
    return rows
