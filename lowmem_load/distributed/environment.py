"""The environment variables of launchers, which tell a process its place in a job, and the live group of torch."""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowmem_load.errors import ConfigError

# What torchrun, deepspeed and accelerate launch set, and what torch's env:// and DeepSpeed read.
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Set by launchers that start several processes and set none of the above. If such a process took itself for a lone one,
# every rank would silently load the full model. SLURM_NTASKS does not count: shells of salloc have it too.
FOREIGN_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

_inherited: list[weakref.ref[Any]] = []  # the group that was live when this process was forked, if any


def _note_fork() -> None:
    _inherited[:] = [weakref.ref(dist.group.WORLD)] if dist.is_initialized() else []


os.register_at_fork(after_in_child=_note_fork)


def has_group() -> bool:
    """Return whether there is a default group."""
    return dist.is_initialized()


def require_live() -> None:
    """Raise ConfigError if there is no default group, or if it was live when this process was forked."""
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: it was destroyed, or not made yet; call torch.distributed.init_process_group "
            "or lowmem_load.llamafactory.DistributedInterface() on every rank before"
        )
    if _inherited and _inherited[0]() is dist.group.WORLD and dist.get_backend() != "fake":
        raise ConfigError(
            f"this process was forked from rank {dist.get_rank()} while its process group was live; the threads that "
            "carry its messages stayed behind, so every exchange would wait forever. Load in the rank itself, or "
            f"start this process by spawn, with none of {', '.join(LAUNCHER_NAMES)} in its environment."
        )


def default_group() -> dist.ProcessGroup:
    """Return the default group, which must be live."""
    group = dist.group.WORLD
    assert group is not None  # as `require_live` has seen
    return group


def backends_by_device(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backends of a live group by device type; torch writes them as `cpu:gloo,cuda:nccl`."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)


def default_store() -> Any:
    """Return the store of the default group. No other group has its keys: torch's own would not form in them, either.

    Source: torch 2.13 distributed_c10d.py.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    if store is None:
        raise ConfigError(f"the process group (backend {dist.get_backend()}) has no store; use gloo or nccl")
    return store


def positive_number(name: str, default: float, unit: str) -> float:
    """Return the value of an environment variable, or the default.

    Raises:
        ConfigError: it is not a positive number.
    """
    text = os.environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"{name}: the environment has {text!r}, expected a positive number of {unit}")
    return number


def alone() -> dict[str, str]:
    """Return the variables that a launcher would set for a lone process."""
    foreign = [name for name in FOREIGN_SIZES if os.environ.get(name, "1") != "1"]
    if foreign:
        raise ConfigError(
            f"{foreign[0]} is {os.environ[foreign[0]]}, so this is one of several processes, but none of "
            f"{', '.join(LAUNCHER_NAMES)} is set. Set them from that launcher's variables, use torchrun, or unset "
            f"{foreign[0]} to run alone."
        )
    # No process listens there: a lone process needs no rendezvous, but DeepSpeed reads both. 29500 is torch's default.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **address}


def require_launched() -> None:
    """Raise ConfigError unless the launcher has set all variables."""
    there = [name for name in LAUNCHER_NAMES if os.environ.get(name)]
    missing = [name for name in LAUNCHER_NAMES if name not in there]
    if missing:
        raise ConfigError(
            f"environment: {', '.join(missing)} missing, while {', '.join(sorted(there))} ask for a launched process "
            "group. Start with torchrun, deepspeed or accelerate launch (whose --cpu starts one process only), or "
            "unset all to run as a single process."
        )


def set_missing(wanted: dict[str, str]) -> dict[str, str]:
    """Set those variables that are unset or empty; return the ones that were set."""
    added = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    os.environ.update(added)
    return added


def unset(added: dict[str, str]) -> None:
    """Remove the variables that `set_missing` set, unless other code has changed them since."""
    for name, value in added.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def default_timeout() -> timedelta:
    """Return the timeout of collectives for a new group: DeepSpeed's variable, else torch's 30 minutes for gloo.

    DeepSpeed's and NCCL's 10 are too few: fast ranks wait for the slowest one, which may read from a slow file system.
    """
    return timedelta(minutes=integer("DEEPSPEED_TIMEOUT") if os.environ.get("DEEPSPEED_TIMEOUT") else 30)


def cores(local_ranks: int) -> int:
    """Return the number of cores for this rank, at least 1.

    An affinity mask so small that each rank of the machine could have one as large is this rank's own: Slurm and mpirun
    bind so. All ranks of the machine share any other mask, as in a container.
    """
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    is_own = allowed < machine and allowed * local_ranks <= machine
    return max(1, allowed if is_own else allowed // local_ranks)


def ranks_on_node(world_size: int) -> int:
    """Return how many ranks the launcher has started on this node; all of them if it does not say."""
    return integer("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else world_size


def integer(name: str) -> int:
    """Return the value of an environment variable; raise ConfigError if it is not an integer."""
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name}: the environment has {text!r}, expected an integer") from error
