"""What training needs after a load, whether all of a job fits, and the smallest job that would. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowmem_load.cli.load_forecast import RankNeeds
from lowmem_load.config.settings import Settings
from lowmem_load.phases import Memory
from lowmem_load.planning.load_plan import LoadPlan

ADAM_STATE_BYTES = 8
"""Of Adam for each parameter, in fp32; taken for granted where the ds_config names no optimizer, or an unknown one."""

STATE_BYTES: Mapping[str, int] = {"adagrad": 4, "lion": 4, "muon": 4, "sgd": 0}
"""Of the optimizers of DeepSpeed that keep less; SGD with momentum keeps 4."""

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""For each parameter: its copy in fp32, which the optimizer steps on, and the accumulated gradient."""

HOST_FACTOR = 1.5
"""By which DeepSpeed's estimate raises what it counts on the host."""

PERSISTENCE_THRESHOLD = 100_000
"""Elements. Default of stage3_param_persistence_threshold (deepspeed 0.19.8 `runtime/zero/config.py`)."""

MAX_NODES = 1024
"""Nodes of the largest job that is tried."""

OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
"""Of optimizer and parameters, tried in this order: each costs more time in a step than the one before."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A job: how many ranks, how many of them on a node, and where states and parameters stay between steps.

    `hpz_ranks` hold the parameters a second time between them (zero_hpz_partition_size); 0 where there is no such copy.
    `is_host` says that the accelerator is the CPU, so that all is host memory.
    """

    world_size: int
    gpus_per_node: int
    offload_optimizer: str = "none"
    offload_param: str = "none"
    hpz_ranks: int = 0
    is_host: bool = False

    @property
    def node_size(self) -> int:
        """Ranks of a full node, or all of them if they do not fill one."""
        return min(self.gpus_per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill, the last one perhaps not wholly."""
        return -(-self.world_size // self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides what training needs.

    Attributes:
        num_elements: of all parameters.
        largest_layer: elements of the module with the most parameters of its own.
        persistent_elements: of the small parameters that stay whole on every rank between steps.
        item_bytes: of a parameter, as DeepSpeed runs it.
        optimizer: as the ds_config names it; "" where it names none.
        state_bytes: that the optimizer keeps for each parameter.
    """

    num_elements: int
    largest_layer: int
    persistent_elements: int
    item_bytes: int
    optimizer: str
    state_bytes: int


def model_of(plan: LoadPlan, settings: Settings) -> Model:
    """Return what of a planned model decides what training needs."""
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
    return Model(
        num_elements=sum(target.numel for target in plan.targets),
        largest_layer=max(layers.values(), default=0),
        persistent_elements=persistent_elements,
        item_bytes=settings.dtype.itemsize,
        optimizer=kind,
        state_bytes=_state_bytes(kind.lower(), optimizer.get("params") or {}),
    )


def _state_bytes(kind: str, params: Mapping[str, Any]) -> int:
    return 4 if kind == "sgd" and params.get("momentum") else STATE_BYTES.get(kind, ADAM_STATE_BYTES)


@dataclass(frozen=True, slots=True)
class TrainingNeeds:
    """What training needs, without activations: bytes of each GPU, and of host memory and nvme of each node."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int


def training_needs(model: Model, setup: Setup) -> TrainingNeeds:
    """Return what training needs under ZeRO-3: of the fullest node, where the last one has fewer ranks.

    It is what DeepSpeed's estimator gives (`estimate_zero3_model_states_mem_needs` of deepspeed 0.19.8
    `runtime/zero/stage3.py`) for Adam in 16 bits, with the dtype, the optimizer, nvme, persistent parameters and the
    secondary copy of this ds_config besides, of which it knows nothing.
    """
    parameters = model.num_elements * model.item_bytes
    states = model.num_elements * (MASTER_BYTES + model.state_bytes)
    gradients = model.num_elements * GRADIENT_BYTES
    kept = {"none": 0, "cpu": 0, "nvme": 0}
    kept[setup.offload_param] += parameters
    kept[setup.offload_optimizer] += states
    kept["none" if setup.offload_optimizer == "none" else "cpu"] += gradients  # which never go to nvme
    device = kept["none"] / setup.world_size
    device += 2 * model.largest_layer * model.item_bytes  # whole, with its gradient
    device += model.persistent_elements * model.item_bytes
    device += parameters / setup.hpz_ranks if setup.hpz_ranks else 0
    of_node = setup.node_size / setup.world_size
    host = kept["cpu"] * of_node * HOST_FACTOR
    if setup.offload_optimizer == "none":
        host += model.largest_layer * 4 * setup.node_size * HOST_FACTOR  # while it is made: a layer in fp32
    return TrainingNeeds(int(device), int(host), int(kept["nvme"] * of_node))


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is: bytes of a node's host memory and of a GPU's; None where nothing was said."""

    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What is needed for something of something, beside what there is. Bytes; `available_bytes` None if not known."""

    what: str
    needed_bytes: int
    available_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as is known."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job fits.

    Attributes:
        needs: of loading and training.
        world_size: the smallest that fits with the same settings; None if none does.
        offloads: (offload_optimizer, offload_param) with which it fits at the same world size, in which least is moved;
            None if none does.
    """

    needs: tuple[Need, ...]
    world_size: int | None
    offloads: tuple[str, str] | None

    @property
    def fits(self) -> bool:
        """Whether all needs are met."""
        return all(need.fits for need in self.needs)


def judge(model: Model, setup: Setup, rank: RankNeeds, process: Memory, limits: Limits) -> Verdict:
    """Return whether a job fits, and what would; `process` is what one holds before the load."""

    def fits(**changed: Any) -> bool:
        return all(need.fits for need in needs_of(model, replace(setup, **changed), rank, process, limits))

    return Verdict(
        needs_of(model, setup, rank, process, limits),
        next((size for size in _world_sizes(setup) if fits(world_size=size)), None),
        next((pair for pair in OFFLOADS if fits(offload_optimizer=pair[0], offload_param=pair[1])), None),
    )


def needs_of(model: Model, setup: Setup, rank: RankNeeds, process: Memory, limits: Limits) -> tuple[Need, ...]:
    """Return what loading and training need of the host memory of a node and the device memory of a GPU."""
    ranks, training = setup.node_size, training_needs(model, setup)
    partition = -(-model.num_elements // setup.world_size) * model.item_bytes
    device_load = rank.device_beside_bytes + (partition if setup.offload_param == "none" else 0)
    swap = rank.swap_bytes if setup.offload_param == "nvme" else 0
    processes = ranks * (process.anonymous_bytes + swap) + process.file_bytes  # of libraries, which all share
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
    """Yield powers of two within a node, then whole nodes, and among them the world size that is asked about."""
    sizes = {setup.world_size, *(num_nodes * setup.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((setup.gpus_per_node - 1).bit_length())}
    yield from sorted(sizes)
