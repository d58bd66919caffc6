"""What a job reads and needs, and whether it fits: the answer of `lowmem-load plan`. Reads headers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from lowmem_load.api.model_sizes import adapter_elements, config_of, elements, gathered_bytes
from lowmem_load.api.plan_model import device_named, plan_sharded, plan_zero3_rank
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.ds.partition import check_by_deepspeed
from lowmem_load.errors import UnsupportedError, listed
from lowmem_load.hf.quantizers import four_bit_config, is_four_bit
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.hf.skeleton import distributed_config
from lowmem_load.io.uploads import NUM_STREAMS, SLOTS_PER_THREAD
from lowmem_load.pipeline.load import MAX_THREADS
from lowmem_load.planning.load_plan import Costs, LoadPlan
from lowmem_load.planning.reads import Apply, ReadLimits
from lowmem_load.planning.replicas import once_bytes
from lowmem_load.planning.training_memory import (
    ADAM_STATE_BYTES,
    MASTER_BYTES,
    OFFLOADS,
    TEMPORARY_BYTES,
    Job,
    Model,
    Need,
    Training,
    activation_bytes,
    fits,
    memory_needs,
    partition_places,
    smallest_world_size,
)
from lowmem_load.text import count, size

OVERHEAD_BYTES = 16 << 20
"""Bytes of a load beside its plan: threads, page tables, objects. `make bench` measured 14 to 15 MiB."""

MIN_PLANNING_BYTES = 16 << 20
"""Least memory that the plan itself is taken for. What it takes is measured and differs by 1 MiB from call to call, so
it is rounded up to a power of two: equal calls have equal answers."""

STATE_BYTES: Mapping[str, int] = {"adagrad": 4, "lion": 4, "muon": 4, "sgd": 4}
"""State of a parameter, for DeepSpeed's optimizers that keep less than Adam. SGD is taken to have momentum."""

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
"""The ds_config of a plan that names none."""

COMPARED_RANK = 16
"""Rank of the adapters in a comparison that names none."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will need.

    Attributes:
        name: of the checkpoint.
        training, offload: the way to train, and the key in `OFFLOADS`; "" for an offload of another kind.
        about: the job in words, by topic.
        costs: of rank 0; see `LoadPlan`.
        node_bytes, read_seconds: what a node reads, and its time; None without a rate.
        needs: of loading and training.
        world_size: the smallest that fits with the same settings; None if none does.
        offloads: the first pair of `OFFLOADS` that fits at this world size; likewise.
    """

    name: str
    training: str
    offload: str
    about: Mapping[str, str]
    costs: Costs
    node_bytes: int
    read_seconds: float | None
    needs: Sequence[Need]
    world_size: int | None
    offloads: tuple[str, str] | None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices for all needs, as far as is known."""
        return all(need.fits for need in self.needs)


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a rank, and what follows from it. `stock` has the needs of stock by the names of ours."""

    checkpoint: Checkpoint
    plan: LoadPlan  # of rank 0
    model: Model
    job: Job
    about: Mapping[str, str]
    stock: Mapping[str, int]


def plan_zero3(
    checkpoint: Checkpoint, ds_config: Any, job: Job, training: Training, *, accelerator: str, **keywords: Any
) -> Planned:
    """Return the plan of a job under ZeRO-3; `keywords` are those of `plan`."""
    config, kind = config_of(checkpoint, keywords), device_named(accelerator).type
    settings = read_settings(ds_config or DS_CONFIG, world_size=job.world_size).for_model(config)
    if settings.stage != 3:
        raise UnsupportedError(f"zero_optimization.stage {settings.stage}: needs are estimated for stage 3 only")
    check_by_deepspeed(settings.ds_config, job.world_size)
    job = _configured_job(job, settings, is_host=kind == "cpu")
    device = torch.device("cpu" if job.is_host else "cuda")  # any other accelerator is planned for alike
    if training.is_four_bit:
        keywords["quantization_config"] = four_bit_config(settings.dtype)
    options = {"world_size": job.world_size, "device": device, **keywords}
    plan = plan_zero3_rank(checkpoint.folder, ds_config or DS_CONFIG, rank=0, **options)
    adapters = adapter_elements(checkpoint, training, keywords)
    model = model_of(plan, settings, training, adapters, is_host=job.is_host)
    model = replace(model, activation_bytes=activation_bytes(config, training))
    optimizer = (settings.ds_config.get("optimizer") or {}).get("type")
    on_devices = "GPUs (cuda)" if kind == "cuda" else f"{kind} devices"
    on_host = "CPUs: all memory is host memory (so says --accelerator or DS_ACCELERATOR)"
    about = {
        "planned for": f"{training} under ZeRO-3, on {on_host if job.is_host else on_devices}",
        "ds_config": "" if ds_config else "none given: stage 3, bf16",
        "model": _model_text(plan, settings.dtype, training, adapters),
        "optimizer": f"{optimizer or 'none in the ds_config: taken for Adam'}, {model.state_bytes} bytes for each "
        "trained parameter, with its fp32 copy",
    }
    sizes = [target.numel * target.dtype.itemsize for target in plan.targets]
    on_rank = partition_places(model, job, plan.partition_bytes)[0]
    stock = {
        "whole": max(sizes, default=0),
        # Rank 0 maps all files.
        "host": file_bytes(plan) + on_rank + (whole_bytes(plan) if job.is_host else 0),
    }
    return Planned(checkpoint, plan, model, job, about, stock)


def plan_mesh(
    checkpoint: Checkpoint, sizes: Mapping[str, int], job: Job, training: Training, **keywords: Any
) -> Planned:
    """Return the plan of a job under FSDP2, of its first rank: uneven shards make it the largest.

    `sizes` are those of the `DistributedConfig`. Trained parameters are in fp32, others in bf16. Stock is accelerate's
    `cpu_ram_efficient_loading`: rank 0 reads the model into host memory and broadcasts it.
    """
    config, dtype = config_of(checkpoint, keywords), torch.float32 if training.is_full else torch.bfloat16
    is_fsdp_alone = sizes["tp_size"] == sizes["ep_size"] == 1
    if config is None and not is_fsdp_alone:
        raise UnsupportedError("a model of diffusers is sharded by FSDP2 alone; drop --tp and --ep")
    if training.is_four_bit:
        keywords["quantization_config"] = four_bit_config(dtype)
    in_file = getattr(config, "quantization_config", None)
    is_packed = training.is_four_bit or (in_file is not None and is_four_bit(in_file))
    sharding: Any = [size for size in (sizes["dp_replicate_size"], sizes["fsdp_size"]) if size > 1] or [1]
    if not (is_fsdp_alone and (is_packed or config is None)):
        sharding = distributed_config(sizes)  # which refuses packed weights
    plan = plan_sharded(checkpoint.folder, sharding, rank=0, world_size=job.world_size, dtype=dtype, **keywords)
    job = replace(job, num_shards=sizes["fsdp_size"] * sizes["tp_size"])
    adapters = adapter_elements(checkpoint, training, keywords)
    numel = sum(destination.numel for target in plan.targets for destination in target.destinations)
    num_trained = adapters or int(numel * job.num_shards * training.share)
    fp32_bytes = num_trained * (0 if training.is_full else MASTER_BYTES)
    on_host, on_device = load_bytes(plan, is_host=False)
    model = Model(
        # Of the first rank, times the shards: dimensions are not divided evenly, and some only by one of both axes.
        parameter_bytes=plan.partition_bytes * job.num_shards + fp32_bytes,
        num_trained=num_trained,
        state_bytes=ADAM_STATE_BYTES,
        gathered_bytes=gathered_bytes(checkpoint, keywords, plan) // sizes["tp_size"],
        whole_bytes=whole_bytes(plan),
        activation_bytes=activation_bytes(config, training),
        host_bytes=on_host,
        device_bytes=on_device,
    )
    axes = ", ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1)
    about = {
        "planned for": f"{training} under FSDP2, on GPUs (cuda)",
        "mesh": axes,
        "model": _model_text(plan, dtype, training, adapters),
        "optimizer": "Adam in fp32, as are the trained parameters and their gradients; computes in bf16",
    }
    whole = [target.numel * target.dtype.itemsize for target in plan.targets]
    # Stock packs on the GPUs.
    stock = {"whole": max(whole, default=0), "host": 0 if is_packed else sum(whole)}
    return Planned(checkpoint, plan, model, job, about, stock)


def forecast(planned: Planned, training: Training) -> Forecast:
    """Return what a job will need."""
    plan, job, model = planned.plan, planned.job, planned.model
    node_bytes, reading = job.node_size * plan.costs.read_bytes, {}
    if (read := plan.costs.read_bytes) > (needed := plan.costs.needed_bytes):
        reading["read / needed"] = f"{read / needed:.2f}: what lies apart in the files is read with the gaps between"
    if plan.read_cost.request_bytes:
        num_requests = plan.costs.num_reads * job.node_size
        reading["requests to the store"] = f"{num_requests:,} by a node, beside those for small files"
    if (of_rank := once_bytes(plan)) < plan.costs.read_bytes:
        rate = "" if job.read_rate is None else f" in {_time(job.node_size * of_rank / job.read_rate)}"
        whole, once = (size(nbytes * job.world_size) for nbytes in (plan.costs.read_bytes, of_rank))
        reading["replicas read once"] = f"{size(of_rank * job.node_size)} by a node{rate}; {once} by all, not {whole}"
    seconds = None if job.read_rate is None else node_bytes / job.read_rate
    took = "; --read-rate gives the time" if seconds is None else f" in {_time(seconds)}"
    not_counted = [] if training.tokens else ["activations (--tokens estimates them)"]
    not_counted.append("small tensors that stay whole")
    if not model.step_bytes:
        not_counted.append("temporary memory of the optimizer")
    checkpointing = "with" if training.is_checkpointed else "without"
    about = {
        "planned for": planned.about["planned for"],
        "checkpoint": f"{size(file_bytes(plan))} in {len(plan.files)} file{'s' * (len(plan.files) > 1)}",
        "model": planned.about["model"],
        "job": str(job),
        **planned.about,
        "offload": f"parameters: {job.offload_param}, optimizer: {job.offload_optimizer}",
        "a step": f"{training.tokens:,} tokens of a rank, {checkpointing} gradient checkpointing"
        * bool(training.tokens),
        "not counted": ", ".join(not_counted),
        "in no file": _missing_text(plan),
        "a node reads": size(node_bytes) + took,
        **reading,
    }
    pair = job.offload_optimizer, job.offload_param
    return Forecast(
        name=planned.checkpoint.name,
        training=str(training).removesuffix(" training"),
        offload=next((word for word, devices in OFFLOADS.items() if devices == pair), ""),
        about={topic: text for topic, text in about.items() if text},
        costs=plan.costs,
        node_bytes=node_bytes,
        read_seconds=seconds,
        needs=[*load_needs(planned), *memory_needs(model, job)],
        world_size=smallest_world_size(model, job),
        offloads=next((pair for pair in OFFLOADS.values() if fits(model, _offloaded(job, pair))), None),
    )


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=math.ceil(seconds))


def compare(planned: Planned, training: Training) -> Iterator[Forecast]:
    """Yield a forecast for each way to offload."""
    for word, pair in OFFLOADS.items():
        # Adapters have little to offload; FSDP2 offloads all or nothing.
        if word != "optimizer" or (training.is_full and not planned.job.num_shards):
            yield forecast(replace(planned, job=_offloaded(planned.job, pair)), training)


def _offloaded(job: Job, pair: tuple[str, str]) -> Job:
    return replace(job, offload_optimizer=pair[0], offload_param=pair[1])


def _configured_job(job: Job, settings: Settings, *, is_host: bool) -> Job:
    """Return the job with what the ds_config says, unless the job says to offload."""
    offload = (settings.ds_config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
    job = replace(job, is_host=is_host, hpz_ranks=settings.secondary_size)
    if job.offload_optimizer != "none":
        return job
    return _offloaded(job, (str(getattr(offload, "value", offload)), settings.offload_device))


def model_of(plan: LoadPlan, settings: Settings, training: Training, adapters: int, *, is_host: bool) -> Model:
    """Return what decides the needs of a job under ZeRO-3, given the plan of any rank and settings for the model."""
    layers: dict[str, int] = {}
    for target in plan.targets:
        for module in {name.rpartition(".")[0] for name in target.names}:
            layers[module] = layers.get(module, 0) + elements(target)
    largest, item_bytes = max(layers.values(), default=0), settings.dtype.itemsize
    optimizer = str((settings.ds_config.get("optimizer") or {}).get("type") or "").lower()
    host_bytes, device_bytes = load_bytes(plan, is_host=is_host)
    numel, zero = sum(map(elements, plan.targets)), settings.ds_config["zero_optimization"]
    # Source: deepspeed 0.19.8 `runtime/zero/config.py`, for the defaults.
    gathered = min(numel, int(zero.get("stage3_max_live_parameters", 1e9)))
    bucket = int(zero.get("reduce_bucket_size", 5e8))
    step_bytes = 0
    if is_host:
        # Gradients are reduced from a copy of the bucket, of which only pages in use count. What is gathered or copied
        # adds to what the step takes, as the allocator keeps freed memory, and a GPU's gives it to the next.
        bucket = 2 * min(bucket, numel)
        step_bytes = item_bytes + (0 if optimizer else TEMPORARY_BYTES)  # the gradient in the model's dtype, too
    gradients = bucket + (0 if training.lora_rank else largest)  # whole, before it goes into the bucket
    return Model(
        parameter_bytes=sum(t.numel * t.dtype.itemsize for t in plan.targets) + adapters * item_bytes,
        num_trained=adapters or int(numel * training.share),
        state_bytes=MASTER_BYTES + STATE_BYTES.get(optimizer, ADAM_STATE_BYTES),
        step_bytes=step_bytes,
        gathered_bytes=(max(largest, gathered) + gradients) * item_bytes,
        whole_bytes=whole_bytes(plan),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        swap_bytes=settings.swap_bytes,
    )


def file_bytes(plan: LoadPlan) -> int:
    """Return the bytes of all files."""
    return sum(file.nbytes for file in plan.files)


def whole_bytes(plan: LoadPlan) -> int:
    """Return the bytes that every rank holds in full: replicated parameters, buffers, scales."""
    buffers = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers)
    return plan.replicated_bytes + plan.companion_bytes + buffers


def load_bytes(plan: LoadPlan, *, is_host: bool) -> tuple[int, int]:
    """Return the peaks of host and device memory of a load without partitions, with a core for every thread."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    host = max(MIN_PLANNING_BYTES, 1 << max(0, plan.planning_bytes - 1).bit_length()) + OVERHEAD_BYTES
    host += plan.costs.largest_temporary_bytes * (MAX_THREADS if any(isinstance(step, Apply) for step in steps) else 1)
    if is_host:
        return host + MAX_THREADS * plan.costs.staging_bytes + whole_bytes(plan), 0
    slot_bytes = ReadLimits().staging_bytes
    return host + SLOTS_PER_THREAD * MAX_THREADS * slot_bytes, NUM_STREAMS * slot_bytes + whole_bytes(plan)


def load_needs(planned: Planned) -> Iterator[Need]:
    """Yield what a rank reads and holds, beside what stock needs at least. The peak is above what a process holds."""
    plan, job, stock = planned.plan, planned.job, planned.stock
    on_host = partition_places(planned.model, job, plan.partition_bytes)[0]
    yield Need("partition", plan.partition_bytes)
    yield Need("whole on every rank", whole_bytes(plan), stock["whole"])
    yield Need(f"read in {plan.costs.num_reads:,} reads", plan.costs.read_bytes, file_bytes(plan))
    yield Need("peak of host memory", planned.model.host_bytes + on_host, stock["host"])


def _missing_text(plan: LoadPlan) -> str:
    if not plan.missing_keys:
        return ""
    missing = f"{len(plan.missing_keys)} of {len(plan.targets)} tensors: {listed(plan.missing_keys, 3)}"
    return f"{missing}. Is the model's class right (--auto-class)?"


def _model_text(plan: LoadPlan, dtype: torch.dtype, training: Training, adapters: int) -> str:
    name = "4 bits" if plan.num_quantized else str(dtype).removeprefix("torch.")
    total = sum(map(elements, plan.targets))
    trained = f"; {count(adapters or int(total * training.share))} trained" if not training.is_full else ""
    return f"{count(total)} parameters in {name}{trained}"
