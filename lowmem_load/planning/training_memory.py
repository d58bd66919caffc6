"""Memory of a training, by the formulas that docs/howto/plan.md states. Plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lowmem_load.errors import UnsupportedError

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes of a trained parameter's fp32 copy, which the optimizer updates, and of its accumulated gradient."""

ADAM_STATE_BYTES = 8
"""Adam's state of a parameter, in fp32. Assumed if the ds_config names no optimizer or an unknown one."""

TEMPORARY_BYTES = 8
"""Two values in fp32 that torch's AdamW makes of each element of a partition on CPUs. DeepSpeed's optimizers make none.
Source: torch 2.13 `optim/adam.py`, `_single_tensor_adam`."""

HOST_FACTOR = 1.5
"""Safety factor of DeepSpeed's estimate for host memory."""

PROCESS_BYTES = 512 << 20
"""Host memory of a process before the load: Python with torch, DeepSpeed and transformers. A process with builds for
CPUs holds 384 MiB; what CUDA maps comes on top. A constant, so that equal calls have equal answers."""

OFFLOADS = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}
"""Devices of optimizer and parameters, for each word of --offload. The fastest training step comes first."""

MAX_NODES = 1024
"""Nodes of the largest job that is tried."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained: everything, a share of the parameters, or adapters; and how.

    Attributes:
        lora_rank: of adapters on every Linear but the output layer; 0 for none. They alone are trained.
        share: of the parameters that are trained, without adapters.
        is_four_bit: the base is quantized to 4 bits while it loads.
        tokens: of a rank in a step, for activations; 0 for not counted.
        is_checkpointed: with gradient checkpointing.
    """

    lora_rank: int = 0
    share: float = 1.0
    is_four_bit: bool = False
    tokens: int = 0
    is_checkpointed: bool = False

    @property
    def is_full(self) -> bool:
        """Whether every parameter is trained."""
        return not self.lora_rank and self.share == 1

    def __str__(self) -> str:
        if self.lora_rank:
            return f"{'QLoRA' if self.is_four_bit else 'LoRA'} r{self.lora_rank}"
        return "full training" if self.is_full else f"training of {100 * self.share:.3g}% of the parameters"


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
        num_shards: ranks that share the parameters; 0 for all.
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
    num_shards: int = 0

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
    """What decides the needs of a job of any size. Bytes.

    Attributes:
        parameter_bytes: all partitions together, with those of adapters.
        num_trained: elements that the optimizer updates.
        state_bytes: what the optimizer keeps for each of them, with its fp32 copy.
        step_bytes: what its step takes for each of them, beside the gradient in fp32.
        gathered_bytes: weights that a rank gathers to compute, and their gradients.
        whole_bytes: what each rank holds whole: scales, buffers.
        activation_bytes: of a rank; 0 for not counted.
        host_bytes, device_bytes: peaks of a rank during the load, without partitions and swap buffers.
        swap_bytes: host buffers for parameters offloaded to nvme, also in training.
    """

    parameter_bytes: int
    num_trained: int
    state_bytes: int = MASTER_BYTES + ADAM_STATE_BYTES
    step_bytes: int = 0
    gathered_bytes: int = 0
    whole_bytes: int = 0
    activation_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    swap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one thing needs, those of stock at least (0: not compared), and those that exist, if known."""

    what: str
    needed_bytes: int
    stock_bytes: int = 0
    available_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, as far as is known."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


def memory_needs(model: Model, job: Job) -> list[Need]:
    """Return the host memory and nvme of a node and the device memory of a GPU that loading and training need."""
    ranks, (device_training, host_training, disk_training) = job.node_size, training_bytes(model, job)
    on_host, on_device = partition_places(model, job, -(-model.parameter_bytes // (job.num_shards or job.world_size)))
    host_load = ranks * (PROCESS_BYTES + model.host_bytes + on_host)
    host_training += ranks * PROCESS_BYTES
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


def partition_places(model: Model, job: Job, partition_bytes: int) -> tuple[int, int]:
    """Return the bytes of host and device memory that the partitions of a rank take while it loads."""
    if job.offload_param == "nvme":
        return model.swap_bytes, 0
    return (partition_bytes, 0) if job.is_host or job.offload_param == "cpu" else (0, partition_bytes)


def training_bytes(model: Model, job: Job) -> tuple[int, int, int]:
    """Return what training needs: of each GPU, and of host memory and nvme of the fullest node.

    For full training with Adam in 16 bits, without activations, this is DeepSpeed's own estimate
    (`estimate_zero3_model_states_mem_needs` of deepspeed 0.19.8 `runtime/zero/stage3.py`), but for the layer in fp32
    that stock creates in host memory before it partitions it.
    """
    by_device = {"none": 0, "cpu": 0, "nvme": 0}
    by_device[job.offload_param] += model.parameter_bytes
    by_device[job.offload_optimizer] += model.num_trained * model.state_bytes
    # Gradients never go to nvme.
    gradient_bytes = GRADIENT_BYTES + model.step_bytes
    by_device["none" if job.offload_optimizer == "none" else "cpu"] += model.num_trained * gradient_bytes
    num_shards = job.num_shards or job.world_size
    device = by_device["none"] / num_shards + model.gathered_bytes + model.whole_bytes + model.activation_bytes
    device += model.parameter_bytes / job.hpz_ranks if job.hpz_ranks else 0
    host = by_device["cpu"] * job.node_size / num_shards * HOST_FACTOR
    return int(device), int(host), int(by_device["nvme"] * job.node_size / num_shards)


def activation_bytes(config: Any, training: Training) -> int:
    """Return the activations of a step over `training.tokens` (sequences of a rank, times their length), in 16 bits.

    A layer keeps 24 bytes for each hidden and 8 for each intermediate element of a token, or its input alone with
    gradient checkpointing, which holds one layer whole. The loss takes 12 bytes for each token and vocabulary entry.
    Measured with Llama of transformers 5.24: 21 to 24, 8 and 12. Attention is one that keeps no matrix of scores.
    """
    if not training.tokens:
        return 0
    if config is None:
        raise UnsupportedError("--tokens: activations are estimated for transformers' models only")
    text = config.get_text_config()
    fields = ("hidden_size", "num_hidden_layers", "vocab_size")
    hidden, layers, vocabulary = (getattr(text, name, None) for name in fields)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    if not (hidden and layers and vocabulary and width):
        raise UnsupportedError(f"--tokens: the model's config lacks one of {', '.join(fields)}, intermediate_size")
    layer = 24 * hidden + 8 * width * experts
    kept = 2 * hidden * layers + layer if training.is_checkpointed else layers * layer
    return int(training.tokens * (kept + 12 * vocabulary))


def jobs_of_other_sizes(job: Job) -> Iterator[Job]:
    """Yield the job with fewer and more ranks: powers of two within a node, whole nodes, and its own size.

    In a mesh, the ranks that share a parameter grow with the job; replicas and other dimensions stay.
    """
    sizes = {job.world_size, *(num_nodes * job.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((job.gpus_per_node - 1).bit_length())}
    copies = job.world_size // (job.num_shards or job.world_size)
    for size in sorted(size for size in sizes if size % copies == 0):
        yield replace(job, world_size=size, num_shards=size // copies if job.num_shards else 0)


def smallest_world_size(model: Model, job: Job) -> int | None:
    """Return the smallest world size that fits with the same settings; None if none does."""
    sizes = (other.world_size for other in jobs_of_other_sizes(job) if fits(model, other))
    return next(sizes, None)


def fits(model: Model, job: Job) -> bool:
    """Return whether the memory of the machines suffices, as far as it is known."""
    return all(need.fits for need in memory_needs(model, job))
