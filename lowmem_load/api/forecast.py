"""What a training reads and needs, and whether it fits: the answer of `lowmem-load plan`. Reads headers only.

docs/howto/plan.md states the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from lowmem_load.api.plan_model import plan_sharded, plan_zero3_rank
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.ds.partition import check_by_deepspeed
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError, listed
from lowmem_load.families import diffusion
from lowmem_load.hf.names import class_and_config, model_config
from lowmem_load.hf.quantizers import four_bit_config, stays_packed
from lowmem_load.hf.remote_names import Checkpoint
from lowmem_load.hf.skeleton import blocks, distributed_config
from lowmem_load.io.uploads import NUM_STREAMS, SLOTS_PER_THREAD
from lowmem_load.pipeline.load import MAX_THREADS
from lowmem_load.planning.load_plan import Costs, LoadPlan, TargetPlan
from lowmem_load.planning.reads import Apply, ReadLimits
from lowmem_load.planning.replicas import once_bytes
from lowmem_load.text import count, size

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes of a trained parameter's fp32 copy, which the optimizer updates, and of its accumulated gradient."""

ADAM_STATE_BYTES = 8
"""Adam's state of a parameter, in fp32, which is assumed for any optimizer."""

HOST_FACTOR = 1.5
"""Safety factor of DeepSpeed's estimate for host memory."""

PROCESS_BYTES = 512 << 20
"""Host memory of a process before the load: Python with torch, DeepSpeed and transformers."""

OVERHEAD_BYTES = 32 << 20
"""Host memory of a load besides its buffers: the plan, threads, page tables. `make bench` measured 14 to 15 MiB."""

METHODS = ("full", "lora", "qlora")
"""What is trained: every parameter, or adapters, on weights as they are or in 4 bits."""

OFFLOADS = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}
"""Devices of optimizer and parameters, for each word of --offload. The fastest training step comes first."""

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
"""The ds_config of a plan that names none."""

MAX_NODES = 1024
"""Nodes of the largest job that is tried."""


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks of a job and of a full node, and the memory of a node and of a GPU: None for no limit."""

    world_size: int
    gpus_per_node: int
    host_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def node_size(self) -> int:
        """Ranks of the fullest node."""
        return min(self.gpus_per_node, self.world_size)

    def __str__(self) -> str:
        num_nodes = -(-self.world_size // self.node_size)
        nodes = f"{num_nodes} nodes of {self.node_size}" if num_nodes > 1 else "one node"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} on {nodes}"


@dataclass(frozen=True, slots=True)
class States:
    """What decides the memory of a training on any number of ranks.

    Attributes:
        parameter_bytes: all partitions together, with those of adapters.
        num_trained: elements that the optimizer updates.
        state_bytes: what the optimizer keeps for each of them, with its fp32 copy if it has one.
        gathered_bytes: what a rank gathers to compute, with the gradients of it.
        whole_bytes: what each rank holds in full: replicated parameters, buffers, scales.
        load_host_bytes, load_device_bytes: what a load takes on a rank besides partitions.
        copies: how often the job holds the partitions (HSDP).
        hpz_ranks: ranks that share a second copy of the parameters (zero_hpz_partition_size); 0 for none.
        swap_bytes: host buffers of a rank for parameters offloaded to nvme.
    """

    parameter_bytes: int
    num_trained: int
    state_bytes: int = MASTER_BYTES + ADAM_STATE_BYTES
    gathered_bytes: int = 0
    whole_bytes: int = 0
    load_host_bytes: int = 0
    load_device_bytes: int = 0
    copies: int = 1
    hpz_ranks: int = 0
    swap_bytes: int = 0


class Needs(NamedTuple):
    """Bytes that loading and training need: of a GPU, of a node's host memory, of a node's nvme."""

    gpu_load: int
    gpu_training: int
    host_load: int
    host_training: int
    nvme: int

    def margin(self, job: Job) -> tuple[str, int] | None:
        """Return the memory that is tightest, and the bytes that are free there; None if no limit is known."""
        gpu, host = max(self.gpu_load, self.gpu_training), max(self.host_load, self.host_training)
        limits = (("GPU", job.device_bytes, gpu), ("host", job.host_bytes, host))
        free = [(where, limit - needed) for where, limit, needed in limits if limit is not None]
        return min(free, key=lambda pair: pair[1], default=None)


@dataclass(frozen=True, slots=True)
class Row:
    """What one way to train and to offload needs.

    `fits_from` is the smallest number of ranks that fits, None if none does. `verdict` is "" without limits.
    """

    method: str
    offload: str
    needs: Mapping[str, int]
    fits_from: int | None
    fits: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job reads, by topic, with the costs of rank 0, and what each way to train needs."""

    name: str
    about: Mapping[str, str]
    costs: Costs
    partition_bytes: int
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of rank 0, what follows from it, and how it is offloaded unless the caller says otherwise."""

    plan: LoadPlan
    states: States
    about: Mapping[str, str]
    offload: tuple[str, str] = ("none", "none")


def forecast(
    checkpoint: Checkpoint,
    job: Job,
    *,
    ds_config: str | None = None,
    mesh: Mapping[str, int] | None = None,
    method: str | None = None,
    lora_rank: int = 16,
    offload: str | None = None,
    **keywords: Any,
) -> Forecast:
    """Return what a job will need.

    Args:
        checkpoint: the model.
        job: its ranks and machines.
        ds_config: the path of a file, for ZeRO-3. None: `DS_CONFIG`.
        mesh: the sizes of a mesh, for FSDP2.
        method: one of `METHODS`. None: all of them.
        lora_rank: of the adapters.
        offload: a key of `OFFLOADS`. None: as in the ds_config, or each of them if it offloads nothing.
        **keywords: as `plan` takes them.

    Raises:
        ConfigError: an argument cannot be used.
        UnsupportedError: this model cannot be trained so.
    """
    if method not in (None, *METHODS):
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if offload not in (None, *OFFLOADS) or (offload == "optimizer" and mesh):
        raise ConfigError(f"offload: expected one of {', '.join(OFFLOADS)} (FSDP2: all or none), got {offload!r}")
    adapters = 0 if method == "full" else lora_rank * linear_features(checkpoint, keywords)
    first: Planned | None = None
    rows: list[Row] = []
    about: dict[str, str] = {}
    for each in METHODS if method is None else [method]:
        try:
            asked = (job, each, 0 if each == "full" else adapters, dict(keywords))
            planned = _plan_fsdp2(checkpoint, mesh, *asked) if mesh else _plan_zero3(checkpoint, ds_config, *asked)
        except (CheckpointError, UnsupportedError) as error:
            if method is not None or each != "qlora":
                raise
            about["QLoRA is not planned"] = str(error)
            continue
        first = first or planned
        title = {"full": "full", "lora": f"LoRA r{lora_rank}", "qlora": f"QLoRA r{lora_rank}"}[each]
        pairs = [OFFLOADS[offload]] if offload else _offloads(planned, is_full=each == "full" and not mesh)
        rows += [_row(planned.states, job, title, pair) for pair in pairs]
    assert first is not None  # only QLoRA is left out
    about = {topic: text for topic, text in {**_about(first, job), **about}.items() if text}
    return Forecast(checkpoint.name, about, first.plan.costs, first.plan.partition_bytes, rows)


def _plan_zero3(
    checkpoint: Checkpoint, ds_config: str | None, job: Job, method: str, adapters: int, keywords: dict[str, Any]
) -> Planned:
    config = config_of(checkpoint, keywords)
    settings = read_settings(ds_config or DS_CONFIG, world_size=job.world_size).for_model(config)
    if settings.stage != 3:
        raise UnsupportedError(f"zero_optimization.stage {settings.stage}: needs are estimated for stage 3 only")
    check_by_deepspeed(settings.ds_config, job.world_size)
    if method == "qlora":
        keywords["quantization_config"] = _four_bits(config, settings.dtype)
    plan = plan_zero3_rank(
        checkpoint.folder,
        ds_config or DS_CONFIG,
        rank=0,
        world_size=job.world_size,
        device=torch.device("cuda"),  # any other accelerator is planned for alike
        **keywords,
    )
    device = (settings.ds_config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
    about = {
        "planned for": "ZeRO-3, on GPUs",
        "ds_config": "" if ds_config else "none given: stage 3, bf16",
        "model": _model_text(plan, settings.dtype),
    }
    return Planned(
        plan,
        zero3_states(plan, settings, adapters),
        about,
        (str(getattr(device, "value", device)), settings.offload_device),
    )


def zero3_states(plan: LoadPlan, settings: Settings, adapters: int = 0) -> States:
    """Return what decides the memory under ZeRO-3, given the plan of any rank and settings for the model.

    `adapters` is the number of their elements, which alone are trained; 0 for full training.
    """
    layers: dict[str, int] = {}
    for target in plan.targets:
        for module in {name.rpartition(".")[0] for name in target.names}:
            layers[module] = layers.get(module, 0) + _elements(target)
    largest, item_bytes = max(layers.values(), default=0), settings.dtype.itemsize
    numel, zero = sum(map(_elements, plan.targets)), settings.ds_config["zero_optimization"]
    # Source: deepspeed 0.19.8 `runtime/zero/config.py`, for the defaults.
    gathered = max(largest, min(numel, int(zero.get("stage3_max_live_parameters", 1e9))))
    gradients = int(zero.get("reduce_bucket_size", 5e8))
    if not adapters:
        gradients += largest  # whole, before it goes into the bucket
    host_bytes, device_bytes = load_bytes(plan)
    return States(
        parameter_bytes=sum(t.numel * t.dtype.itemsize for t in plan.targets) + adapters * item_bytes,
        num_trained=adapters or numel,
        gathered_bytes=(gathered + gradients) * item_bytes,
        whole_bytes=whole_bytes(plan),
        load_host_bytes=host_bytes,
        load_device_bytes=device_bytes,
        hpz_ranks=settings.secondary_size,
        swap_bytes=settings.swap_bytes,
    )


def _plan_fsdp2(
    checkpoint: Checkpoint, sizes: Mapping[str, int], job: Job, method: str, adapters: int, keywords: dict[str, Any]
) -> Planned:
    """Plan for the first rank: uneven shards make it the largest. Trained parameters are in fp32, others in bf16."""
    dtype = torch.float32 if method == "full" else torch.bfloat16
    config = config_of(checkpoint, keywords)
    is_fsdp_alone = sizes["tp_size"] == sizes["ep_size"] == 1
    if config is None and not is_fsdp_alone:
        raise UnsupportedError("a model of diffusers is sharded by FSDP2 alone; drop --tp and --ep")
    if method == "qlora":
        if not is_fsdp_alone:
            raise UnsupportedError("4-bit weights are sharded by FSDP2 alone; drop --tp and --ep")
        keywords["quantization_config"] = _four_bits(config, dtype)
    in_file = getattr(config, "quantization_config", None)
    is_packed = method == "qlora" or stays_packed(in_file)
    sharding: Any = [size for size in (sizes["dp_replicate_size"], sizes["fsdp_size"]) if size > 1] or [1]
    if not (is_fsdp_alone and (is_packed or config is None)):
        sharding = distributed_config(sizes)  # which refuses packed weights
    plan = plan_sharded(checkpoint.folder, sharding, rank=0, world_size=job.world_size, dtype=dtype, **keywords)
    copies = sizes["dp_replicate_size"]
    num_shards = job.world_size // copies
    numel = sum(destination.numel for target in plan.targets for destination in target.destinations)
    host_bytes, device_bytes = load_bytes(plan)
    states = States(
        # Of the first rank, times the shards: dimensions are not divided evenly, and some only by one of both axes.
        parameter_bytes=plan.partition_bytes * num_shards + adapters * MASTER_BYTES,
        num_trained=adapters or numel * num_shards,
        state_bytes=ADAM_STATE_BYTES,
        gathered_bytes=_gathered_by_fsdp2(checkpoint, keywords, plan) // sizes["tp_size"],
        whole_bytes=whole_bytes(plan),
        load_host_bytes=host_bytes,
        load_device_bytes=device_bytes,
        copies=copies,
    )
    about = {
        "planned for": "FSDP2, on GPUs",
        "mesh": ", ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1),
        "model": _model_text(plan, dtype),
    }
    return Planned(plan, states, about)


def _gathered_by_fsdp2(checkpoint: Checkpoint, keywords: Mapping[str, Any], plan: LoadPlan) -> int:
    """Return what FSDP2 gathers at a time: two blocks, one ahead of its use, and what is in none, which stays gathered.

    Of packed weights one is dequantized at a time.
    """
    model = without_values(checkpoint, keywords)
    nbytes = {name: target.numel * target.dtype.itemsize for target in plan.targets for name in target.names}
    whole = {id(parameter): nbytes[name] for name, parameter in model.named_parameters()}
    in_blocks = [{id(parameter): whole[id(parameter)] for parameter in block.parameters()} for block in blocks(model)]
    inside = {key for block in in_blocks for key in block}
    root = sum(size for key, size in whole.items() if key not in inside)
    dequantized = max((2 * _elements(target) for target in plan.targets if target.companions), default=0)
    return root + sum(sorted(sum(block.values()) for block in in_blocks)[-2:]) + dequantized


def _four_bits(config: Any, dtype: torch.dtype) -> Any:
    if config is None:
        raise UnsupportedError("diffusers itself quantizes its models")
    if find_spec("bitsandbytes") is None:
        raise UnsupportedError("it needs bitsandbytes (pip install 'lowmem-load[qlora]')")
    return four_bit_config(dtype)


def _elements(target: TargetPlan) -> int:
    """Return the elements of a parameter; of a quantized one, those that its packed values stand for."""
    return 2 * target.numel * target.dtype.itemsize if target.companions else target.numel


def whole_bytes(plan: LoadPlan) -> int:
    """Return the bytes that every rank holds in full: replicated parameters, buffers, scales."""
    buffers = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers)
    return plan.replicated_bytes + plan.companion_bytes + buffers


def load_bytes(plan: LoadPlan) -> tuple[int, int]:
    """Return the peaks of host and device memory of a load without partitions, with a core for every thread."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    num_temporary = MAX_THREADS if any(isinstance(step, Apply) for step in steps) else 1
    slot_bytes = ReadLimits().staging_bytes
    host = OVERHEAD_BYTES + plan.costs.largest_temporary_bytes * num_temporary
    return host + SLOTS_PER_THREAD * MAX_THREADS * slot_bytes, NUM_STREAMS * slot_bytes + whole_bytes(plan)


# -- memory ------------------------------------------------------------------------------------------------------------


def needs_of(states: States, job: Job, offload: tuple[str, str]) -> Needs:
    """Return what loading and training need.

    For full training with Adam in 16 bits, without activations, this is DeepSpeed's own estimate
    (`estimate_zero3_model_states_mem_needs` of deepspeed 0.19.8 `runtime/zero/stage3.py`), but for the layer in fp32
    that its own load creates in host memory before it partitions it.
    """
    optimizer, parameters = offload
    num_shards, ranks = job.world_size // states.copies, job.node_size
    by_device = {"none": 0, "cpu": 0, "nvme": 0}  # of all shards together
    by_device[parameters] += states.parameter_bytes
    by_device[optimizer] += states.num_trained * states.state_bytes
    # Gradients never go to nvme.
    by_device["none" if optimizer == "none" else "cpu"] += states.num_trained * GRADIENT_BYTES
    gpu_training = by_device["none"] / num_shards + states.gathered_bytes + states.whole_bytes
    if states.hpz_ranks:
        gpu_training += states.parameter_bytes / states.hpz_ranks
    partition_bytes = -(-states.parameter_bytes // num_shards)
    swap_bytes = states.swap_bytes if parameters == "nvme" else 0
    on_host = PROCESS_BYTES + swap_bytes
    return Needs(
        gpu_load=states.load_device_bytes + (partition_bytes if parameters == "none" else 0),
        gpu_training=int(gpu_training),
        host_load=ranks * (on_host + states.load_host_bytes + (partition_bytes if parameters == "cpu" else 0)),
        host_training=ranks * on_host + int(by_device["cpu"] * ranks / num_shards * HOST_FACTOR),
        nvme=int(by_device["nvme"] * ranks / num_shards),
    )


def _fits(states: States, job: Job, offload: tuple[str, str]) -> bool:
    margin = needs_of(states, job, offload).margin(job)
    return margin is None or margin[1] >= 0


def smallest_world_size(states: States, job: Job, offload: tuple[str, str]) -> int | None:
    """Return the smallest number of ranks that fits: powers of two within a node, whole nodes, or the job's own.

    In a mesh, the ranks that share a parameter grow with the job; replicas and other dimensions stay.
    """
    sizes = {job.world_size, *(num_nodes * job.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((job.gpus_per_node - 1).bit_length())}
    jobs = (replace(job, world_size=size) for size in sorted(sizes) if size % states.copies == 0)
    return next((job.world_size for job in jobs if _fits(states, job, offload)), None)


def _offloads(planned: Planned, *, is_full: bool) -> list[tuple[str, str]]:
    """Return the ways to offload that are shown: that of the ds_config, or all that may pay."""
    if planned.offload != OFFLOADS["none"]:
        return [planned.offload]
    # Adapters have little to offload; FSDP2 offloads all or nothing.
    return [devices for word, devices in OFFLOADS.items() if word != "optimizer" or is_full]


def _row(states: States, job: Job, method: str, offload: tuple[str, str]) -> Row:
    word = next((word for word, devices in OFFLOADS.items() if devices == offload), " and ".join(offload))
    needs = needs_of(states, job, offload)
    where, free = needs.margin(job) or ("", 0)
    verdict = f"fits, {where} {size(free)} free" if free >= 0 else f"{where} lacks {size(-free)}"
    fits_from = smallest_world_size(states, job, offload)
    return Row(method, word, needs._asdict(), fits_from, free >= 0, verdict if where else "")


# -- in words ----------------------------------------------------------------------------------------------------------


def _about(planned: Planned, job: Job) -> dict[str, str]:
    plan, states = planned.plan, planned.states
    costs, once, node_bytes = plan.costs, once_bytes(plan), job.node_size * plan.costs.read_bytes
    file_bytes, num_files = sum(file.nbytes for file in plan.files), len(plan.files)
    num_missing = f"{len(plan.missing_keys)} of {len(plan.targets)} tensors: {listed(plan.missing_keys, 3)}"
    requests = f"{costs.num_reads * job.node_size:,} by a node, besides those for small files"
    shared = f"{size(once * job.node_size)} by a node; {size(once * job.world_size)} by all ranks"
    return {
        **planned.about,
        "checkpoint": f"{size(file_bytes)} in {num_files} file{'s' * (num_files > 1)}",
        "job": str(job),
        "rank 0 holds": f"{size(plan.partition_bytes)} of the parameters, and {size(states.whole_bytes)} that all hold",
        "rank 0 reads": f"{size(costs.read_bytes)} in {costs.num_reads:,} reads",
        "a node reads": size(node_bytes),
        "read / needed": f"{costs.read_bytes / costs.needed_bytes:.2f}: what lies apart in the files is read with the "
        "gaps between"
        if costs.read_bytes > costs.needed_bytes
        else "",
        "replicas read once": shared if once < costs.read_bytes else "",
        "requests to the store": requests if plan.read_cost.request_bytes else "",
        "in no file": f"{num_missing}. Is the model's class right (--auto-class)?" if plan.missing_keys else "",
        "not counted": "activations, small tensors that stay whole, temporary memory of the optimizer",
    }


def _model_text(plan: LoadPlan, dtype: torch.dtype) -> str:
    name = "4 bits" if plan.num_quantized else str(dtype).removeprefix("torch.")
    return f"{count(sum(map(_elements, plan.targets)))} parameters in {name}"


# -- from the configuration alone --------------------------------------------------------------------------------------


def config_of(checkpoint: Checkpoint, keywords: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model, given keywords of `plan`; None for a model of diffusers."""
    if diffusion.model_class(checkpoint.folder, keywords.get("auto_class"), keywords) is not None:
        return None
    return model_config(checkpoint.folder, keywords)


def without_values(checkpoint: Checkpoint, keywords: Mapping[str, Any]) -> Any:
    """Return the model of a checkpoint on the meta device; `keywords` are those of `plan`."""
    if (of_diffusers := diffusion.model_class(checkpoint.folder, keywords.get("auto_class"), keywords)) is not None:
        return diffusion.skeleton(of_diffusers, checkpoint.folder, keywords, torch.device("meta"))
    cls, config = class_and_config(checkpoint.folder, keywords.get("auto_class"), keywords)
    with torch.device("meta"):
        return cls(config) if isinstance(cls, type) and issubclass(cls, nn.Module) else cls.from_config(config)


def linear_features(checkpoint: Checkpoint, keywords: Mapping[str, Any]) -> int:
    """Return the inputs and outputs of every Linear but the output layer: what PEFT's "all-linear" adapts."""
    model = without_values(checkpoint, keywords)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
    return sum(linear.in_features + linear.out_features for linear in linears)
