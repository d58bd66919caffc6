"""What a job needs of host memory, device memory and nvme. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_load.phases import Memory

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes of a parameter's fp32 copy, which the optimizer updates, and of its accumulated gradient."""

HOST_FACTOR = 1.5
"""Safety factor of DeepSpeed's estimate for host memory."""

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

    @property
    def in_words(self) -> str:
        """Ranks and nodes: "12 ranks, 8 on one node and 4 on another"."""
        num_full, rest = divmod(self.world_size, self.node_size)
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        if num_full == 1 and not rest:
            return f"{ranks} on one node"
        full = "one node" if num_full == 1 else f"each of {num_full} nodes"
        return f"{ranks}, {self.node_size} on {full}" + (f" and {rest} on another" if rest else "")


@dataclass(frozen=True, slots=True)
class Model:
    """What decides the needs of a job of any size.

    Attributes:
        num_elements: of all parameters.
        largest_layer: elements of the module with the most parameters of its own.
        persistent_elements: of small parameters, which every rank holds in full between steps.
        item_bytes, state_bytes: of an element in training, and what the optimizer keeps for it.
        host_bytes, device_bytes: peaks of a rank during the load, without partitions and swap buffers.
        swap_bytes: host buffers for parameters offloaded to nvme, also in training.
    """

    num_elements: int
    largest_layer: int
    persistent_elements: int
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


def held_bytes(model: Model, job: Job, partition_bytes: int) -> tuple[int, int]:
    """Return the bytes of host and device memory that the partitions of a rank take while it loads."""
    if job.offload_param == "nvme":
        return model.swap_bytes, 0
    return (partition_bytes, 0) if job.is_host or job.offload_param == "cpu" else (0, partition_bytes)


def training_bytes(model: Model, job: Job) -> tuple[int, int, int]:
    """Return what training needs without activations: of each GPU, and of host memory and nvme of the fullest node.

    For Adam in 16 bits this is DeepSpeed's own estimate (`estimate_zero3_model_states_mem_needs` of deepspeed 0.19.8
    `runtime/zero/stage3.py`), which leaves out other dtypes and optimizers, nvme, small parameters and hpZ.
    """
    parameters = model.num_elements * model.item_bytes
    held = {"none": 0, "cpu": 0, "nvme": 0}
    held[job.offload_param] += parameters
    held[job.offload_optimizer] += model.num_elements * (MASTER_BYTES + model.state_bytes)
    # Gradients never go to nvme.
    held["none" if job.offload_optimizer == "none" else "cpu"] += model.num_elements * GRADIENT_BYTES
    device = held["none"] / job.world_size
    device += 2 * model.largest_layer * model.item_bytes  # gathered, and its gradient
    device += model.persistent_elements * model.item_bytes
    device += parameters / job.hpz_ranks if job.hpz_ranks else 0
    share_of_node = job.node_size / job.world_size
    host = held["cpu"] * share_of_node * HOST_FACTOR
    if job.offload_optimizer == "none":
        host += model.largest_layer * 4 * job.node_size * HOST_FACTOR  # a layer in fp32, while it is created
    return int(device), int(host), int(held["nvme"] * share_of_node)


def memory_needs(model: Model, job: Job, process: Memory) -> list[Need]:
    """Return the host memory and nvme of a node and the device memory of a GPU that loading and training need.

    `process` is the memory of a process before the load. Processes share the files of libraries.
    """
    ranks, (device_training, host_training, disk_training) = job.node_size, training_bytes(model, job)
    on_host, on_device = held_bytes(model, job, -(-model.num_elements // job.world_size) * model.item_bytes)
    processes = ranks * process.anonymous_bytes + process.file_bytes
    host_training += processes
    if job.offload_param == "nvme":
        host_training += ranks * model.swap_bytes
    if job.is_host:
        host_training += ranks * device_training
    host_load = processes + ranks * (model.host_bytes + on_host)
    needs = [
        Need("host memory of a node while loading", host_load, 0, job.host_bytes),
        Need("host memory of a node in training", host_training, 0, job.host_bytes),
    ]
    if not job.is_host:
        device_load = model.device_bytes + on_device
        needs.append(Need("device memory of a GPU while loading", device_load, 0, job.device_bytes))
        needs.append(Need("device memory of a GPU in training", device_training, 0, job.device_bytes))
    if disk_training:
        needs.append(Need("nvme of a node in training", disk_training))
    return needs


def world_sizes(job: Job) -> list[int]:
    """Return the world sizes to try: powers of two within a node, whole nodes, and the one that the user asks for."""
    sizes = {job.world_size, *(num_nodes * job.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((job.gpus_per_node - 1).bit_length())}
    return sorted(sizes)
