"""What a job needs to load and to train, whether it fits, and the smallest job that would: `lowmem-load plan`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed, so that host_memory() here includes it
from lowmem_load.api.plan_model import plan_ranks
from lowmem_load.cli.load_forecast import NodeReads, RankNeeds, StockNeeds, node_reads, rank_needs, stock_needs
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.hf.names import model_config
from lowmem_load.hf.quantizers import dequantizing
from lowmem_load.io.hub_checkpoint import OpenCheckpoint
from lowmem_load.phases import Memory, host_memory
from lowmem_load.planning.load_plan import LoadPlan

ADAM_STATE_BYTES = 8
"""Adam's state of a parameter, in fp32. Assumed if the ds_config names no optimizer or an unknown one."""

STATE_BYTES: Mapping[str, int] = {"adagrad": 4, "lion": 4, "muon": 4, "sgd": 0}
"""State of a parameter, for DeepSpeed's optimizers that keep less than Adam. SGD with momentum keeps 4 bytes."""

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes of a parameter's fp32 copy, which the optimizer updates, and of its accumulated gradient."""

HOST_FACTOR = 1.5
"""Safety factor of DeepSpeed's estimate for host memory."""

PERSISTENCE_THRESHOLD = 100_000
"""Elements. Default of stage3_param_persistence_threshold (deepspeed 0.19.8 `runtime/zero/config.py`)."""

MAX_NODES = 1024
"""Nodes of the largest job that `judge` tries."""

OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
"""Devices of optimizer and parameters that `judge` tries, the fastest training step first."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A job.

    Attributes:
        world_size, gpus_per_node: ranks of the job and of a full node.
        offload_optimizer, offload_param: devices that hold states and parameters between steps.
        hpz_ranks: ranks that share a second copy of the parameters (zero_hpz_partition_size); 0 for none.
        is_host: the accelerator is the CPU, so all memory is host memory.
    """

    world_size: int
    gpus_per_node: int
    offload_optimizer: str = "none"
    offload_param: str = "none"
    hpz_ranks: int = 0
    is_host: bool = False

    @property
    def node_size(self) -> int:
        """Ranks of the fullest node."""
        return min(self.gpus_per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes of the job. The last one may have fewer ranks."""
        return -(-self.world_size // self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Model:
    """What decides the needs of training.

    Attributes:
        num_elements: of all parameters.
        largest_layer: elements of the module with the most parameters of its own.
        persistent_elements: of small parameters, which every rank holds in full between steps.
        item_bytes: of an element in training.
        optimizer: as the ds_config names it; "" for none.
        state_bytes: that the optimizer keeps for each element.
    """

    num_elements: int
    largest_layer: int
    persistent_elements: int
    item_bytes: int
    optimizer: str
    state_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingNeeds:
    """Bytes that training needs without activations: of each GPU, and of host memory and nvme of the fullest node."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of host memory of a node and of device memory of a GPU; None for unknown."""

    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that are needed for one thing, and bytes that exist; None for unknown."""

    what: str
    needed_bytes: int
    available_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, as far as is known."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job fits.

    Attributes:
        needs: of loading and training.
        world_size: the smallest that fits with the same settings; None if none does.
        offloads: the first pair of `OFFLOADS` that fits at this world size; None if none does.
    """

    needs: tuple[Need, ...]
    world_size: int | None
    offloads: tuple[str, str] | None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices for all needs."""
        return all(need.fits for need in self.needs)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will need.

    Attributes:
        name, dtype: of the model.
        file_bytes, num_files: of the checkpoint.
        setup: the job.
        rank: the load on rank 0. Partitions have one size, so other ranks need about the same.
        together: what the ranks of a node read together; None if each reads alone.
        node_bytes, read_seconds: what a node reads, and its time; None without a rate.
        model, training: training, and what decides it.
        verdict: whether the job fits.
        stock: what stock ZeRO-3 needs.
    """

    name: str
    dtype: str
    file_bytes: int
    num_files: int
    setup: Setup
    rank: RankNeeds
    together: NodeReads | None
    node_bytes: int
    read_seconds: float | None
    model: Model
    training: TrainingNeeds
    verdict: Verdict
    stock: StockNeeds


def forecast(
    checkpoint: OpenCheckpoint,
    ds_config: Any,
    *,
    world_size: int,
    gpus_per_node: int,
    device: str,
    limits: Limits,
    read_rate: float | None = None,
    dequantize: bool = False,
    **keywords: Any,
) -> Forecast:
    """Return what a job will need. Reads headers only.

    Args:
        checkpoint: the checkpoint to load.
        ds_config: as for `load_model`.
        world_size: ranks of the job.
        gpus_per_node: ranks of a node.
        device: type of the accelerator.
        limits: the memory of a node and of a GPU.
        read_rate: bytes per second that a node reads.
        dequantize: whether to dequantize quantized weights.
        **keywords: as for `plan`.

    Raises:
        ConfigError: the ds_config or an argument cannot be used.
        CheckpointError: the checkpoint cannot be used.
        UnsupportedError: the load cannot be streamed, or its needs cannot be estimated.
    """
    process, is_host = host_memory(), device == "cpu"
    settings = read_settings(ds_config, world_size=world_size)
    _require_estimable(settings)
    if dequantize:
        keywords["quantization_config"] = dequantizing(checkpoint.folder, keywords)
    options = {"world_size": world_size, "device": _device(device), "open_source": checkpoint.open_source, **keywords}
    (plan,) = plan_ranks(checkpoint.folder, ds_config, ranks=[0], **options)
    settings = settings.for_model(model_config(checkpoint.folder, keywords))
    setup, model = _setup(settings, gpus_per_node, is_host=is_host), model_of(plan, settings)
    rank = rank_needs(plan, settings, is_host=is_host)
    together, node_bytes = None, setup.node_size * plan.read_bytes
    if plan.shareable_bytes and settings.offload_device != "nvme":
        together = node_reads(plan_ranks(checkpoint.folder, ds_config, ranks=range(setup.node_size), **options))
    if together is not None:
        node_bytes -= together.wanted_bytes - together.shared_bytes
    return Forecast(
        name=checkpoint.name,
        dtype=str(settings.dtype).removeprefix("torch."),
        file_bytes=sum(file.nbytes for file in plan.files),
        num_files=len(plan.files),
        setup=setup,
        rank=rank,
        together=together,
        node_bytes=node_bytes,
        read_seconds=None if read_rate is None else node_bytes / read_rate,
        model=model,
        training=training_needs(model, setup),
        verdict=judge(model, setup, rank, process, limits),
        stock=stock_needs(plan, held_on_host_bytes=rank.host_bytes),
    )


def _require_estimable(settings: Settings) -> None:
    """Refuse settings for which the estimate of training would be wrong."""
    if settings.stage != 3 or settings.shard_size != settings.world_size:
        what = f"stage {settings.stage}" if settings.stage != 3 else f"mics_shard_size {settings.shard_size}"
        raise UnsupportedError(
            f"zero_optimization.{what}: needs are estimated for stage 3 with partitions over all ranks only"
        )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"accelerator: expected cuda, cpu or another device of torch, got {name!r}") from error


def _setup(settings: Settings, gpus_per_node: int, *, is_host: bool) -> Setup:
    offload = settings.ds_config["zero_optimization"].get("offload_optimizer") or {}
    optimizer = offload.get("device", "none")
    return Setup(
        settings.world_size,
        gpus_per_node,
        offload_optimizer=str(getattr(optimizer, "value", optimizer)),
        offload_param=settings.offload_device,
        hpz_ranks=settings.secondary_size,
        is_host=is_host,
    )


def model_of(plan: LoadPlan, settings: Settings) -> Model:
    """Return what decides the needs of training, read off the plan of any rank."""
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
    kind = str(optimizer.get("type") or "")
    has_momentum = kind.lower() == "sgd" and (optimizer.get("params") or {}).get("momentum")
    return Model(
        num_elements=sum(target.numel for target in plan.targets),
        largest_layer=max(layers.values(), default=0),
        persistent_elements=persistent_elements,
        item_bytes=settings.dtype.itemsize,
        optimizer=kind,
        state_bytes=4 if has_momentum else STATE_BYTES.get(kind.lower(), ADAM_STATE_BYTES),
    )


def training_needs(model: Model, setup: Setup) -> TrainingNeeds:
    """Return what training under ZeRO-3 needs on the fullest node.

    For Adam in 16 bits this is DeepSpeed's own estimate (`estimate_zero3_model_states_mem_needs` of deepspeed 0.19.8
    `runtime/zero/stage3.py`). It also covers other dtypes and optimizers, nvme, persistent parameters and the secondary
    copy of hpZ.
    """
    parameters = model.num_elements * model.item_bytes
    states = model.num_elements * (MASTER_BYTES + model.state_bytes)
    gradients = model.num_elements * GRADIENT_BYTES
    held = {"none": 0, "cpu": 0, "nvme": 0}
    held[setup.offload_param] += parameters
    held[setup.offload_optimizer] += states
    held["none" if setup.offload_optimizer == "none" else "cpu"] += gradients  # they never go to nvme
    device = held["none"] / setup.world_size
    device += 2 * model.largest_layer * model.item_bytes  # gathered, and its gradient
    device += model.persistent_elements * model.item_bytes
    device += parameters / setup.hpz_ranks if setup.hpz_ranks else 0
    share_of_node = setup.node_size / setup.world_size
    host = held["cpu"] * share_of_node * HOST_FACTOR
    if setup.offload_optimizer == "none":
        host += model.largest_layer * 4 * setup.node_size * HOST_FACTOR  # a layer in fp32, while it is created
    return TrainingNeeds(int(device), int(host), int(held["nvme"] * share_of_node))


def judge(model: Model, setup: Setup, rank: RankNeeds, process: Memory, limits: Limits) -> Verdict:
    """Return whether a job fits, and what would fit; `process` is the memory of a process before the load."""

    def fits(**changed: Any) -> bool:
        return all(need.fits for need in needs_of(model, replace(setup, **changed), rank, process, limits))

    return Verdict(
        needs_of(model, setup, rank, process, limits),
        next((size for size in _world_sizes(setup) if fits(world_size=size)), None),
        next((pair for pair in OFFLOADS if fits(offload_optimizer=pair[0], offload_param=pair[1])), None),
    )


def needs_of(model: Model, setup: Setup, rank: RankNeeds, process: Memory, limits: Limits) -> tuple[Need, ...]:
    """Return the host memory of a node and the device memory of a GPU that loading and training need."""
    ranks, training = setup.node_size, training_needs(model, setup)
    partition = -(-model.num_elements // setup.world_size) * model.item_bytes
    device_load = rank.device_beside_bytes + (partition if setup.offload_param == "none" else 0)
    swap = rank.swap_bytes if setup.offload_param == "nvme" else 0
    processes = ranks * (process.anonymous_bytes + swap) + process.file_bytes  # they share the files of libraries
    host_load = processes + ranks * (rank.host_beside_bytes + (partition if setup.offload_param == "cpu" else 0))
    host_training = processes + training.host_bytes
    if setup.is_host:
        host_load, host_training = host_load + ranks * device_load, host_training + ranks * training.device_bytes
    host = (
        Need("host memory of a node while loading", host_load, limits.host_bytes),
        Need("host memory of a node in training", host_training, limits.host_bytes),
    )
    device = (
        Need("device memory of a GPU while loading", device_load, limits.device_bytes),
        Need("device memory of a GPU in training", training.device_bytes, limits.device_bytes),
    )
    return host if setup.is_host else host + device


def _world_sizes(setup: Setup) -> Iterator[int]:
    """Yield the world sizes to try: powers of two within a node, whole nodes, and the one that the user asks for."""
    sizes = {setup.world_size, *(num_nodes * setup.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((setup.gpus_per_node - 1).bit_length())}
    yield from sorted(sizes)
