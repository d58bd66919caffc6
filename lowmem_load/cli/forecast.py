"""What a job reads and needs, and whether it fits: the answer of `lowmem-load plan`. Reads headers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed, so that host_memory() here includes it
from lowmem_load.api.plan_model import device_named, plan_ranks, plan_sharded
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.names import model_config
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.hf.skeleton import distributed_config
from lowmem_load.io.uploads import NUM_STREAMS, SLOTS_PER_THREAD
from lowmem_load.phases import Memory, host_memory
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
"""Bytes of a load beside its plan: threads, page tables, objects. `make bench` measured 14 to 15 MiB."""

COLLECTIVE_FACTOR = 3
"""How often stock ZeRO-3 sends each byte: it broadcasts each parameter, gathers it, and broadcasts its values.
Source: transformers 5.23 `integrations/deepspeed.py`, deepspeed 0.19.8 `runtime/zero/partition_parameters.py`."""

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes of a parameter's fp32 copy, which the optimizer updates, and of its accumulated gradient."""

ADAM_STATE_BYTES = 8
"""Adam's state of a parameter, in fp32. Assumed if the ds_config names no optimizer or an unknown one."""

STATE_BYTES: Mapping[str, int] = {"adagrad": 4, "lion": 4, "muon": 4, "sgd": 4}
"""State of a parameter, for DeepSpeed's optimizers that keep less than Adam. SGD is taken to have momentum."""

HOST_FACTOR = 1.5
"""Safety factor of DeepSpeed's estimate for host memory."""

OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
"""Devices of optimizer and parameters that are tried, the fastest training step first."""

MAX_NODES = 1024
"""Nodes of the largest job that is tried."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job and its machines.

    Attributes:
        world_size, gpus_per_node: ranks of the job and of a full node.
        host_bytes, device_bytes: memory of a node and of a GPU; None for unknown.
        read_rate: bytes per second that a node reads; None for unknown.
        is_host: the accelerator is the CPU, so all memory is host memory.
        offload_optimizer, offload_param: devices that hold states and parameters between steps.
        hpz_ranks: ranks that share a second copy of the parameters (zero_hpz_partition_size); 0 for none.
    """

    world_size: int
    gpus_per_node: int
    host_bytes: int | None = None
    device_bytes: int | None = None
    read_rate: float | None = None
    is_host: bool = False
    offload_optimizer: str = "none"
    offload_param: str = "none"
    hpz_ranks: int = 0

    @property
    def node_size(self) -> int:
        """Ranks of the fullest node."""
        return min(self.gpus_per_node, self.world_size)

    def __str__(self) -> str:
        num_nodes = -(-self.world_size // self.node_size)
        nodes = f"{num_nodes} nodes of {self.node_size}" if num_nodes > 1 else "one node"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} on {nodes}"


@dataclass(frozen=True, slots=True)
class Model:
    """What decides the needs of a job of any size.

    Attributes:
        num_elements: of all parameters.
        largest_layer: elements of the module with the most parameters of its own.
        item_bytes, state_bytes: of an element in training, and what the optimizer keeps for it.
        host_bytes, device_bytes: peaks of a rank during the load, without partitions and swap buffers.
        swap_bytes: host buffers for parameters offloaded to nvme, also in training.
    """

    num_elements: int
    largest_layer: int
    item_bytes: int
    state_bytes: int
    host_bytes: int = 0
    device_bytes: int = 0
    swap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one thing needs, those of stock ZeRO-3 at least (0: not compared), and those that exist, if known."""

    what: str
    needed_bytes: int
    stock_bytes: int = 0
    available_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, as far as is known."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


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


def forecast_zero3(checkpoint: Checkpoint, ds_config: Any, job: Job, *, accelerator: str, **keywords: Any) -> Forecast:
    """Return what a job under ZeRO-3 will need; `keywords` are those of `plan`."""
    process, kind = host_memory(), device_named(accelerator).type
    settings = read_settings(ds_config, world_size=job.world_size)
    settings = settings.for_model(model_config(checkpoint.folder, keywords))
    if settings.stage != 3 or settings.shard_size != settings.world_size:
        what = f"stage {settings.stage}" if settings.stage != 3 else f"mics_shard_size {settings.shard_size}"
        raise UnsupportedError(
            f"zero_optimization.{what}: needs are estimated for stage 3 with partitions over all ranks only"
        )
    job = _configured_job(job, settings, is_host=kind == "cpu")
    device = torch.device("cpu" if job.is_host else "cuda")  # any other accelerator is planned for alike
    options = {"world_size": job.world_size, "device": device, **keywords}
    node = plan_ranks(checkpoint.folder, ds_config, ranks=[0], **options)
    model = model_of(node[0], settings, is_host=job.is_host)
    if node[0].shareable_bytes and job.offload_param != "nvme":
        node = plan_ranks(checkpoint.folder, ds_config, ranks=range(job.node_size), **options)

    def fits(**changes: Any) -> bool:
        return all(need.fits for need in memory_needs(model, replace(job, **changes), process))

    optimizer = (settings.ds_config.get("optimizer") or {}).get("type")
    on_host = "on CPUs: all memory is host memory (so says --accelerator or DS_ACCELERATOR)"
    on_devices = "on GPUs" if kind == "cuda" else f"on {kind} devices"
    about = {
        "planned for": f"full training under ZeRO-3, {on_host if job.is_host else on_devices}",
        "model": f"{count(model.num_elements)} parameters in {str(settings.dtype).removeprefix('torch.')}",
        "job": str(job),
        "offload": f"parameters: {job.offload_param}, optimizer: {job.offload_optimizer}",
        "optimizer": f"{optimizer or 'none in the ds_config: taken for Adam'}, {model.state_bytes} bytes a parameter",
        "not counted": "activations, small tensors (they stay whole), layers that are gathered ahead",
    }
    return replace(
        _forecast(checkpoint, node, job, about),
        needs=[*load_needs(node[0], model, job), *memory_needs(model, job, process)],
        world_size=next((size for size in world_sizes(job) if fits(world_size=size)), None),
        offloads=next((pair for pair in OFFLOADS if fits(offload_optimizer=pair[0], offload_param=pair[1])), None),
    )


def forecast_mesh(checkpoint: Checkpoint, sizes: Mapping[str, int], job: Job, **keywords: Any) -> Forecast:
    """Return what a job under FSDP2 will need on its first rank: uneven shards make it the largest.

    `sizes` are those of the `DistributedConfig`, `keywords` those of `plan`. Training is taken for Adam's in fp32.
    """
    mesh, fp32 = distributed_config(sizes), torch.float32
    plan = plan_sharded(checkpoint.folder, mesh, rank=0, world_size=job.world_size, dtype=fp32, **keywords)
    axes = ", ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1)
    about = {
        "planned for": "full training under FSDP2, on GPUs",
        "model": f"{count(sum(target.numel for target in plan.targets))} parameters in float32",
        "job": f"{job}: {axes}" if axes else str(job),
        "training": "parameters, gradients and Adam's moments in fp32; the largest parameter in bf16",
        "not counted": "activations, and layers that are gathered ahead",
    }
    numel = sum(destination.numel for target in plan.targets for destination in target.destinations)
    gathered = max((target.numel for target in plan.targets), default=0) * torch.bfloat16.itemsize
    training = numel * (MASTER_BYTES + GRADIENT_BYTES + ADAM_STATE_BYTES) + gathered + whole_bytes(plan)
    loading = plan.partition_bytes + load_bytes(plan, is_host=False)[1]
    needs = [
        Need("shards", plan.partition_bytes),
        Need(f"read in {plan.costs.num_reads:,} reads", plan.costs.read_bytes),
        Need("device memory of a GPU while loading", loading, available_bytes=job.device_bytes),
        Need("device memory of a GPU in training", training, available_bytes=job.device_bytes),
    ]
    return replace(_forecast(checkpoint, [plan], job, about), needs=needs)


def _forecast(checkpoint: Checkpoint, node: Sequence[LoadPlan], job: Job, about: Mapping[str, str]) -> Forecast:
    """Return what is read. `node` are the plans of the ranks of a node that may read together, or that of rank 0."""
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
    files = f"{size(sum(file.nbytes for file in plan.files))} in {len(plan.files)} files"
    head = {"planned for": about["planned for"], "checkpoint": files}
    about = {**head, **about, "a node reads": size(node_bytes) + took, **reading}
    return Forecast(checkpoint.name, about, plan.costs, node_bytes, seconds, needs=[])


def _configured_job(job: Job, settings: Settings, *, is_host: bool) -> Job:
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
    optimizer = str((settings.ds_config.get("optimizer") or {}).get("type") or "").lower()
    host_bytes, device_bytes = load_bytes(plan, is_host=is_host)
    return Model(
        num_elements=sum(target.numel for target in plan.targets),
        largest_layer=max(layers.values(), default=0),
        item_bytes=settings.dtype.itemsize,
        state_bytes=STATE_BYTES.get(optimizer, ADAM_STATE_BYTES),
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


def held_bytes(model: Model, job: Job, partition_bytes: int) -> tuple[int, int]:
    """Return the bytes of host and device memory that the partitions of a rank take while it loads."""
    if job.offload_param == "nvme":
        return model.swap_bytes, 0
    return (partition_bytes, 0) if job.is_host or job.offload_param == "cpu" else (0, partition_bytes)


def load_needs(plan: LoadPlan, model: Model, job: Job) -> Iterator[Need]:
    """Yield what a rank reads and holds, beside what stock needs at least. The peak is above what a process holds."""
    sizes = [target.numel * target.dtype.itemsize for target in plan.targets]
    file_bytes, whole = sum(file.nbytes for file in plan.files), whole_bytes(plan)
    on_host, _ = held_bytes(model, job, plan.partition_bytes)
    of_stock = file_bytes + on_host + (whole if job.is_host else 0)  # rank 0 maps all files
    yield Need("partition", plan.partition_bytes)
    yield Need("whole on every rank", whole, max(sizes, default=0))
    yield Need(f"read in {plan.costs.num_reads:,} reads", plan.costs.read_bytes, file_bytes)
    if job.world_size > 1:
        yield Need("through collectives", 0, COLLECTIVE_FACTOR * sum(sizes))
    yield Need("peak of host memory", model.host_bytes + on_host, of_stock)


def memory_needs(model: Model, job: Job, process: Memory) -> list[Need]:
    """Return the host memory and nvme of a node and the device memory of a GPU that loading and training need.

    `process` is the memory of a process before the load. Processes share the files of libraries.
    """
    ranks, (device_training, host_training, disk_training) = job.node_size, training_bytes(model, job)
    on_host, on_device = held_bytes(model, job, -(-model.num_elements // job.world_size) * model.item_bytes)
    processes = ranks * process.anonymous_bytes + process.file_bytes
    host_load = processes + ranks * (model.host_bytes + on_host)
    host_training += processes
    if job.offload_param == "nvme":
        host_training += ranks * model.swap_bytes
    if job.is_host:
        host_training += ranks * device_training
    needs = [
        Need("host memory of a node while loading", host_load, available_bytes=job.host_bytes),
        Need("host memory of a node in training", host_training, available_bytes=job.host_bytes),
    ]
    if not job.is_host:
        device_load, available = model.device_bytes + on_device, job.device_bytes
        needs.append(Need("device memory of a GPU while loading", device_load, available_bytes=available))
        needs.append(Need("device memory of a GPU in training", device_training, available_bytes=available))
    if disk_training:
        needs.append(Need("nvme of a node in training", disk_training))
    return needs


def training_bytes(model: Model, job: Job) -> tuple[int, int, int]:
    """Return what training needs without activations: of each GPU, and of host memory and nvme of the fullest node.

    For Adam in 16 bits this is DeepSpeed's own estimate (`estimate_zero3_model_states_mem_needs` of deepspeed 0.19.8
    `runtime/zero/stage3.py`), which leaves out other dtypes and optimizers, nvme and hpZ.
    """
    parameters = model.num_elements * model.item_bytes
    held = {"none": 0, "cpu": 0, "nvme": 0}
    held[job.offload_param] += parameters
    held[job.offload_optimizer] += model.num_elements * (MASTER_BYTES + model.state_bytes)
    # Gradients never go to nvme.
    held["none" if job.offload_optimizer == "none" else "cpu"] += model.num_elements * GRADIENT_BYTES
    device = held["none"] / job.world_size
    device += 2 * model.largest_layer * model.item_bytes  # gathered, and its gradient
    device += parameters / job.hpz_ranks if job.hpz_ranks else 0
    share_of_node = job.node_size / job.world_size
    host = held["cpu"] * share_of_node * HOST_FACTOR
    if job.offload_optimizer == "none":
        host += model.largest_layer * 4 * job.node_size * HOST_FACTOR  # a layer in fp32, while it is created
    return int(device), int(host), int(held["nvme"] * share_of_node)


def world_sizes(job: Job) -> list[int]:
    """Return the world sizes to try: powers of two within a node, whole nodes, and the one that the user asks for."""
    sizes = {job.world_size, *(num_nodes * job.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((job.gpus_per_node - 1).bit_length())}
    return sorted(sizes)


def read_together(plans: Sequence[LoadPlan]) -> tuple[int, int, int, int] | None:
    """Return what the ranks of a node read together, given their plans; None if each reads alone.

    Number of ranks; bytes that they want; bytes of the blocks that they would read alone, and that they read instead.
    """
    ranges = [byte_ranges(reads) for reads in map(shared_reads, plans) if reads]
    cost = max((plan.read_cost for plan in plans), key=lambda cost: cost.block_bytes)
    schedule = node_schedule(ranges, cost, chunk_bytes_of(cost)) if len(ranges) > 1 else None
    if schedule is None:
        return None
    alone_bytes = sum(touched_bytes(of_rank, cost.block_bytes) for of_rank in ranges)
    return schedule.num_ranks, schedule.wanted_bytes, alone_bytes, schedule.touched_bytes(cost.block_bytes)
