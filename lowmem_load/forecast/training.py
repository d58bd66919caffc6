"""What training needs after a load: DeepSpeed's own estimate, corrected by what the ds_config says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_load.ds.estimates import model_states
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.settings.settings import Settings

ADAM_STATE_BYTES, HALF_BYTES = 8, 2
"""For each parameter, what DeepSpeed's estimate takes for the optimizer's states, and for a parameter itself."""

HOST_FACTOR = 1.5
"""By which DeepSpeed's estimate raises what it counts on the host."""

STATE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "cpuadam", "fusedadam"), 8),
    **dict.fromkeys(("adagrad", "lion", "muon"), 4),
    "sgd": 0,
}
"""Of optimizers that a ds_config can name, fp32 states for each parameter; SGD with momentum has 4."""

PERSISTENCE_THRESHOLD = 100_000
"""Elements. Default of stage3_param_persistence_threshold (deepspeed 0.19.8 `runtime/zero/config.py`)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A job: how many ranks, how many of them on a node, and where states and parameters stay between steps.

    `hpz_ranks` hold the parameters a second time between them (zero_hpz_partition_size); 1 where there is no such copy.
    """

    world_size: int
    gpus_per_node: int
    offload_optimizer: str = "none"
    offload_param: str = "none"
    hpz_ranks: int = 1

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill, the last one perhaps not wholly."""
        return -(-self.world_size // self.gpus_per_node)

    @property
    def full_nodes(self) -> float:
        """Nodes' worth of ranks: a full node holds one part in so many of the job, wherever the other ranks are."""
        return self.world_size / min(self.gpus_per_node, self.world_size)


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides what training needs.

    Attributes:
        num_elements: of all parameters.
        largest_layer: elements of the module with the most parameters of its own.
        persistent_parameters, persistent_elements: that stay whole on every rank between steps.
        item_bytes: of a parameter, as DeepSpeed runs it.
        optimizer: as the ds_config names it; "" where it names none.
        state_bytes: that the optimizer keeps for each parameter.
    """

    num_elements: int
    largest_layer: int
    persistent_parameters: int
    persistent_elements: int
    item_bytes: int
    optimizer: str
    state_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingNeeds:
    """What training needs, without activations. Bytes.

    Attributes:
        device_bytes: of each GPU; host_bytes: of each node. Corrected for dtype, optimizer and persistent parameters.
        deepspeed_device_bytes, deepspeed_host_bytes: as DeepSpeed's estimator gives them.
        disk_bytes: of each node, of what is offloaded to nvme, which DeepSpeed's estimator knows nothing of.
    """

    device_bytes: int
    host_bytes: int
    deepspeed_device_bytes: int
    deepspeed_host_bytes: int
    disk_bytes: int


def model_of(plan: LoadPlan, settings: Settings) -> Model:
    """Return what of a planned model decides what training needs."""
    layers: dict[str, int] = {}
    for target in plan.targets:
        for module in {name.rpartition(".")[0] for name in target.names}:
            layers[module] = layers.get(module, 0) + target.numel
    section = settings.ds_config["zero_optimization"]
    threshold = section.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
    at_most = section.get("stage3_model_persistence_threshold", sys.maxsize)
    persistent_parameters = persistent_elements = 0
    for target in plan.targets:
        if target.numel <= min(threshold, at_most - persistent_elements):
            persistent_parameters, persistent_elements = persistent_parameters + 1, persistent_elements + target.numel
    optimizer = settings.ds_config.get("optimizer") or {}
    kind = str(optimizer.get("type") or "")
    return Model(
        num_elements=sum(target.numel for target in plan.targets),
        largest_layer=max(layers.values(), default=0),
        persistent_parameters=persistent_parameters,
        persistent_elements=persistent_elements,
        item_bytes=settings.dtype.itemsize,
        optimizer=kind,
        state_bytes=_state_bytes(kind.lower(), optimizer.get("params") or {}),
    )


def _state_bytes(kind: str, params: Mapping[str, Any]) -> int:
    if kind == "sgd" and params.get("momentum"):
        return 4
    return STATE_BYTES.get(kind, ADAM_STATE_BYTES)


def training_needs(model: Model, setup: Setup) -> TrainingNeeds:
    """Return what training needs under ZeRO-3: of the fullest node, where the last one has fewer ranks."""
    offloads_optimizer, offloads_parameters = setup.offload_optimizer != "none", setup.offload_param != "none"
    host, device = model_states(
        *(model.num_elements, model.largest_layer),
        gpus_per_node=min(setup.gpus_per_node, setup.world_size),
        num_nodes=setup.full_nodes,
        offloads_optimizer=offloads_optimizer,
        offloads_parameters=offloads_optimizer and offloads_parameters,
    )
    states = (model.state_bytes - ADAM_STATE_BYTES) * model.num_elements
    parameters = (model.item_bytes - HALF_BYTES) * model.num_elements
    own_host, own_device, disk = float(host), float(device), 0.0
    for extra, where in ((states, setup.offload_optimizer), (parameters, setup.offload_param)):
        if where == "none":
            own_device += extra / setup.world_size
        else:
            own_host += extra / setup.full_nodes * HOST_FACTOR
    if offloads_parameters and not offloads_optimizer:  # which DeepSpeed's estimator has no case for
        moved = model.item_bytes * model.num_elements
        own_device, own_host = own_device - moved / setup.world_size, own_host + moved / setup.full_nodes * HOST_FACTOR
    for each, where in (
        (model.num_elements * (12 + model.state_bytes - ADAM_STATE_BYTES), setup.offload_optimizer),
        (model.num_elements * model.item_bytes, setup.offload_param),
    ):
        if where == "nvme":
            own_host, disk = own_host - each / setup.full_nodes * HOST_FACTOR, disk + each / setup.full_nodes
    own_device += 2 * (model.item_bytes - HALF_BYTES) * model.largest_layer  # whole with its gradient
    own_device += model.persistent_elements * model.item_bytes
    if setup.hpz_ranks > 1:
        own_device += model.num_elements * model.item_bytes / setup.hpz_ranks
    return TrainingNeeds(int(own_device), int(max(0.0, own_host)), device, host, int(disk))
