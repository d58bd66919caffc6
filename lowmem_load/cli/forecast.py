"""What a job reads and needs, and whether it fits: the answer of `lowmem-load plan`. Reads headers only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed, so that host_memory() here includes it
from lowmem_load.api.plan_model import device_named, plan_ranks, plan_sharded
from lowmem_load.cli.job_memory import Job, Model, Need, held_bytes, memory_needs, world_sizes
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.names import model_config
from lowmem_load.hf.remote_names import Located
from lowmem_load.hf.sharding import distributed_config
from lowmem_load.io.uploads import NUM_STREAMS, SLOTS_PER_THREAD
from lowmem_load.phases import host_memory
from lowmem_load.pipeline.load import MAX_THREADS
from lowmem_load.planning.load_plan import Costs, LoadPlan
from lowmem_load.planning.reads import Apply, ReadLimits
from lowmem_load.planning.sharing import (
    byte_ranges,
    chunk_bytes_of,
    node_requests,
    node_schedule,
    shared_reads,
    touched_bytes,
)
from lowmem_load.text import count, size

OVERHEAD_BYTES = 16 << 20
"""Bytes of a load beside its plan: threads, page tables, objects of DeepSpeed and the model. `make bench` measured 14
to 15 MiB for a model of 1.5 billion parameters on 1, 2 and 4 ranks."""

COLLECTIVE_FACTOR = 3
"""How often stock ZeRO-3 sends each byte of the model: it broadcasts each parameter when it creates it, gathers it, and
broadcasts its values. `make bench` measured 3.0.
Source: transformers 5.23 `integrations/deepspeed.py`, deepspeed 0.19.8 `runtime/zero/partition_parameters.py`."""

ADAM_STATE_BYTES = 8
"""Adam's state of a parameter, in fp32. Assumed if the ds_config names no optimizer or an unknown one."""

STATE_BYTES: Mapping[str, int] = {"adagrad": 4, "lion": 4, "muon": 4, "sgd": 0}
"""State of a parameter, for DeepSpeed's optimizers that keep less than Adam. SGD with momentum keeps 4 bytes."""

MESH_STATE_BYTES = 16
"""Of an element under FSDP2: parameter, gradient and Adam's two moments, in fp32."""

PERSISTENCE_THRESHOLD = 100_000
"""Elements. Default of stage3_param_persistence_threshold (deepspeed 0.19.8 `runtime/zero/config.py`)."""

OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
"""Devices of optimizer and parameters that are tried, the fastest training step first."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will need.

    Attributes:
        name: of the checkpoint.
        about: the job in words, by topic.
        costs: of rank 0; see `LoadPlan`.
        node_bytes, read_seconds: what a node reads, and its time; None without a rate.
        needs: of loading and training.
        world_size: the smallest that fits with the same settings; None if none does, and for FSDP2.
        offloads: the first pair of `OFFLOADS` that fits at this world size; likewise.
    """

    name: str
    about: Mapping[str, str]
    costs: Costs
    node_bytes: int
    read_seconds: float | None
    needs: Sequence[Need]
    world_size: int | None = None
    offloads: tuple[str, str] | None = None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices for all needs, as far as is known."""
        return all(need.fits for need in self.needs)


def forecast_zero3(checkpoint: Located, ds_config: Any, job: Job, *, accelerator: str, **keywords: Any) -> Forecast:
    """Return what a job under ZeRO-3 will need; `keywords` are those of `plan`."""
    process, kind = host_memory(), device_named(accelerator).type
    is_host = kind == "cpu"
    settings = read_settings(ds_config, world_size=job.world_size)
    settings = settings.for_model(model_config(checkpoint.folder, keywords))
    if settings.stage != 3 or settings.shard_size != settings.world_size:
        what = f"stage {settings.stage}" if settings.stage != 3 else f"mics_shard_size {settings.shard_size}"
        raise UnsupportedError(
            f"zero_optimization.{what}: needs are estimated for stage 3 with partitions over all ranks only"
        )
    device = torch.device("cpu" if is_host else "cuda")  # any other accelerator is planned for alike
    options = {"world_size": job.world_size, "device": device, **keywords}
    (plan,) = plan_ranks(checkpoint.folder, ds_config, ranks=[0], **options)
    job = _configured(job, settings, is_host=is_host)
    model, node = model_of(plan, settings, is_host=is_host), [plan]
    if plan.shareable_bytes and job.offload_param != "nvme":
        node = plan_ranks(checkpoint.folder, ds_config, ranks=range(job.node_size), **options)

    def fits(**changed: Any) -> bool:
        return all(need.fits for need in memory_needs(model, replace(job, **changed), process))

    needs = [*load_needs(plan, model, job), *memory_needs(model, job, process)]
    return replace(
        _forecast(checkpoint, node, job, _about(model, job, settings, kind), needs),
        world_size=next((size for size in world_sizes(job) if fits(world_size=size)), None),
        offloads=next((pair for pair in OFFLOADS if fits(offload_optimizer=pair[0], offload_param=pair[1])), None),
    )


def forecast_mesh(checkpoint: Located, sizes: Mapping[str, int], job: Job, **keywords: Any) -> Forecast:
    """Return what a job under FSDP2 will need on its first rank: uneven shards make it the largest.

    `sizes` are those of the `DistributedConfig`, `keywords` those of `plan`. Training is taken for Adam's in fp32.
    """
    plan = plan_sharded(
        *(checkpoint.folder, distributed_config(sizes)),
        rank=0,
        world_size=job.world_size,
        dtype=torch.float32,
        **keywords,
    )
    mesh = ", ".join(f"{key} {each}" for key, each in sizes.items() if each > 1)
    about = {
        "planned for": "full training under FSDP2, on GPUs",
        "model": f"{count(sum(target.numel for target in plan.targets))} parameters in float32",
        "job": job.in_words + (f": {mesh}" if mesh else ""),
        "training": "parameters, gradients and Adam's moments in fp32; the largest parameter in bf16",
        "not counted": "activations, and layers that are gathered ahead",
    }
    numel = sum(each.numel for target in plan.targets for each in target.destinations)
    gathered = max((target.numel for target in plan.targets), default=0) * torch.bfloat16.itemsize
    training = numel * MESH_STATE_BYTES + gathered + whole_bytes(plan)
    _, passing = load_bytes(plan, is_host=False)
    needs = [
        Need("shards", plan.partition_bytes),
        Need(f"read in {plan.costs.num_reads:,} reads", plan.costs.read_bytes),
        Need("device memory of a GPU while loading", plan.partition_bytes + passing, 0, job.device_bytes),
        Need("device memory of a GPU in training", training, 0, job.device_bytes),
    ]
    return _forecast(checkpoint, [plan], job, about, needs)


def _forecast(
    checkpoint: Located, node: Sequence[LoadPlan], job: Job, about: Mapping[str, str], needs: Sequence[Need]
) -> Forecast:
    """Return a forecast. `node` are the plans of the ranks of a node that may read together, or that of rank 0."""
    plan, together = node[0], read_together(node)
    node_bytes, reading = job.node_size * plan.costs.read_bytes, {}
    if together is not None:
        num_ranks, wanted_bytes, alone_bytes, shared_bytes = together
        node_bytes -= wanted_bytes - shared_bytes
        reading["read together"] = f"{size(shared_bytes)} by {num_ranks} ranks, instead of {size(alone_bytes)}"
    if plan.read_cost.request_bytes:
        num_requests = node_requests(node) * (1 if len(node) > 1 else job.node_size)
        reading["requests to the store"] = f"{num_requests:,} by a node, beside those for small files"
    seconds = None if job.read_rate is None else node_bytes / job.read_rate
    took = "; --read-rate gives the time" if seconds is None else f" in {timedelta(seconds=math.ceil(seconds))}"
    return Forecast(
        name=checkpoint.name,
        about={
            "planned for": about["planned for"],
            "checkpoint": f"{size(sum(file.nbytes for file in plan.files))} in {len(plan.files)} files",
            **about,
            "a node reads": size(node_bytes) + took,
            **reading,
        },
        costs=plan.costs,
        node_bytes=node_bytes,
        read_seconds=seconds,
        needs=needs,
    )


def _about(model: Model, job: Job, settings: Settings, device: str) -> dict[str, str]:
    optimizer = str(
        (settings.ds_config.get("optimizer") or {}).get("type") or "none in the ds_config: taken for Adam's"
    )
    where = "on CPUs: all memory is host memory (so says --accelerator or DS_ACCELERATOR)"
    return {
        "planned for": f"full training under ZeRO-3, {where if job.is_host else _on(device)}",
        "model": f"{count(model.num_elements)} parameters in {str(settings.dtype).removeprefix('torch.')}; "
        f"{count(model.persistent_elements)} of small tensors stay whole in training",
        "job": job.in_words,
        "offload": f"parameters: {job.offload_param}, optimizer: {job.offload_optimizer}",
        "optimizer": f"{optimizer}, {model.state_bytes} bytes of state a parameter",
        "not counted": "activations, and what stage3_max_live_parameters lets be gathered",
    }


def _on(device: str) -> str:
    return "on GPUs" if device == "cuda" else f"on {device} devices"


def _configured(job: Job, settings: Settings, *, is_host: bool) -> Job:
    """Return the job with what the ds_config says."""
    offload = (settings.ds_config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
    return replace(
        job,
        is_host=is_host,
        offload_optimizer=str(getattr(offload, "value", offload)),
        offload_param=settings.offload_device,
        hpz_ranks=settings.secondary_size,
    )


def model_of(plan: LoadPlan, settings: Settings, *, is_host: bool) -> Model:
    """Return what decides the needs of a job, given the plan of any rank and settings resolved for the model."""
    layers: dict[str, int] = {}
    for target in plan.targets:
        for module in {name.rpartition(".")[0] for name in target.names}:
            layers[module] = layers.get(module, 0) + target.numel
    section = settings.ds_config["zero_optimization"]
    threshold = section.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
    at_most = section.get("stage3_model_persistence_threshold", sys.maxsize)
    persistent_elements = 0
    for target in plan.targets:
        if target.numel <= min(threshold, at_most - persistent_elements):
            persistent_elements += target.numel
    optimizer = settings.ds_config.get("optimizer") or {}
    kind = str(optimizer.get("type") or "").lower()
    has_momentum = kind == "sgd" and (optimizer.get("params") or {}).get("momentum")
    host_bytes, device_bytes = load_bytes(plan, is_host=is_host)
    return Model(
        num_elements=sum(target.numel for target in plan.targets),
        largest_layer=max(layers.values(), default=0),
        persistent_elements=persistent_elements,
        item_bytes=settings.dtype.itemsize,
        state_bytes=4 if has_momentum else STATE_BYTES.get(kind, ADAM_STATE_BYTES),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        swap_bytes=settings.swap_bytes,
    )


def whole_bytes(plan: LoadPlan) -> int:
    """Return the bytes that every rank holds in full: replicated parameters, buffers, scales."""
    buffers = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers)
    return plan.replicated_bytes + plan.companion_bytes + buffers


def load_bytes(plan: LoadPlan, *, is_host: bool) -> tuple[int, int]:
    """Return the peaks of host and device memory of a load without partitions, with a core for every thread."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    host = plan.planning_bytes + OVERHEAD_BYTES
    host += plan.costs.largest_temporary_bytes * (MAX_THREADS if any(isinstance(step, Apply) for step in steps) else 1)
    if is_host:
        return host + MAX_THREADS * plan.costs.staging_bytes + whole_bytes(plan), 0
    slot_bytes = ReadLimits().staging_bytes
    return host + SLOTS_PER_THREAD * MAX_THREADS * slot_bytes, NUM_STREAMS * slot_bytes + whole_bytes(plan)


def load_needs(plan: LoadPlan, model: Model, job: Job) -> Iterator[Need]:
    """Yield what a rank reads and holds, beside what stock needs at least. Peaks are above what a process holds."""
    sizes = [target.numel * target.dtype.itemsize for target in plan.targets]
    file_bytes, whole = sum(file.nbytes for file in plan.files), whole_bytes(plan)
    on_host, on_device = held_bytes(model, job, plan.partition_bytes)
    of_stock = file_bytes + on_host + (whole if job.is_host else 0)  # rank 0 maps all files
    yield Need("partition", plan.partition_bytes)
    yield Need("whole on every rank", whole, max(sizes, default=0))
    yield Need(f"read in {plan.costs.num_reads:,} reads", plan.costs.read_bytes, file_bytes)
    if job.world_size > 1:
        yield Need("through collectives", 0, COLLECTIVE_FACTOR * sum(sizes))
    yield Need("peak of host memory", model.host_bytes + on_host, of_stock)
    if not job.is_host:
        yield Need("peak of device memory", model.device_bytes + on_device)


def read_together(plans: Sequence[LoadPlan]) -> tuple[int, int, int, int] | None:
    """Return what the ranks of a node read together, given their plans; None if each reads alone.

    Number of ranks; bytes that they want; bytes of the blocks that they would read alone, and that they read instead.
    """
    chosen = [shared_reads(plan) for plan in plans]
    ranges = [byte_ranges(reads) for reads in chosen if reads]
    cost = max((plan.read_cost for plan in plans), key=lambda cost: cost.block_bytes)
    block_bytes = cost.block_bytes
    found = node_schedule(ranges, cost, chunk_bytes_of(cost)) if len(ranges) > 1 else None
    if found is None:
        return None
    alone_bytes = sum(touched_bytes(each, block_bytes) for each in ranges)
    return found.num_ranks, found.wanted_bytes, alone_bytes, found.touched_bytes(block_bytes)
