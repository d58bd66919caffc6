"""Whether a job fits the memory that there is, and the smallest one that would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowmem_load.forecast.training import Model, Setup, training_needs

MAX_NODES = 1024
"""Nodes of the largest job that is tried."""

OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
"""Of optimizer and parameters, tried in this order: each costs more time in a step than the one before."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is: bytes of a node's host memory and of a GPU's; None where nothing was said."""

    host_bytes: int | None
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a load takes whatever the world size is. Bytes.

    Attributes:
        process_bytes: that a process holds before it, of its own.
        shared_bytes: that all processes of a node share, of libraries.
        host_bytes, device_bytes: of the load beside its partitions, of each rank.
        is_host: whether the accelerator is the CPU, so that all is host memory.
        swap_bytes: of host memory of each rank, through which parameters pass that are offloaded to nvme, also in
            training.
    """

    process_bytes: int
    shared_bytes: int
    host_bytes: int
    device_bytes: int
    is_host: bool
    swap_bytes: int = 0


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


def judge(model: Model, setup: Setup, fixed: Fixed, limits: Limits) -> Verdict:
    """Return whether a job fits, and what would."""
    needs = needs_of(model, setup, fixed, limits)
    sizes = (size for size in _world_sizes(setup) if _fits(model, replace(setup, world_size=size), fixed, limits))
    offloads = None
    for optimizer, param in OFFLOADS:
        if _fits(model, replace(setup, offload_optimizer=optimizer, offload_param=param), fixed, limits):
            offloads = optimizer, param
            break
    return Verdict(needs, next(sizes, None), offloads)


def needs_of(model: Model, setup: Setup, fixed: Fixed, limits: Limits) -> tuple[Need, ...]:
    """Return what loading and training need of the host memory of a node and the device memory of a GPU."""
    ranks = min(setup.gpus_per_node, setup.world_size)
    partition = -(-model.num_elements // setup.world_size) * model.item_bytes
    stays_on_device = setup.offload_param == "none"
    training = training_needs(model, setup)
    device_load = fixed.device_bytes + (partition if stays_on_device else 0)
    swap = fixed.swap_bytes if setup.offload_param == "nvme" else 0
    processes = ranks * (fixed.process_bytes + swap) + fixed.shared_bytes
    host_load = processes + ranks * (fixed.host_bytes + (partition if setup.offload_param == "cpu" else 0))
    host_training = processes + training.host_bytes
    if fixed.is_host:
        host_load, host_training = host_load + ranks * device_load, host_training + ranks * training.device_bytes
    host = (
        Need("host memory of a node while loading", host_load, limits.host_bytes),
        Need("host memory of a node in training", host_training, limits.host_bytes),
    )
    if fixed.is_host:
        return host
    return (
        *host,
        Need("device memory of a GPU while loading", device_load, limits.device_bytes),
        Need("device memory of a GPU in training", training.device_bytes, limits.device_bytes),
    )


def _fits(model: Model, setup: Setup, fixed: Fixed, limits: Limits) -> bool:
    return all(need.fits for need in needs_of(model, setup, fixed, limits))


def _world_sizes(setup: Setup) -> Iterator[int]:
    """Yield powers of two within a node, then whole nodes, and among them the world size that is asked about."""
    sizes = {setup.world_size, *(num_nodes * setup.gpus_per_node for num_nodes in range(1, MAX_NODES + 1))}
    sizes |= {1 << power for power in range((setup.gpus_per_node - 1).bit_length())}
    yield from sorted(sizes)
