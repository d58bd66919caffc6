"""What launchers say of a job in variables of the environment, and what a process without one has to set itself."""

from __future__ import annotations

import os
import re
from datetime import timedelta

from lowmem_load.errors import ConfigError

# What torchrun, deepspeed and accelerate launch set, and what torch's env:// and DeepSpeed read.
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Launchers that start several processes and set none of the above. Taking such a process for a lone one would make
# every rank load the whole model, silently. SLURM_NTASKS is not among them: it is set in shells of salloc too.
FOREIGN_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# How many processes a launcher has started on this machine: torchrun and accelerate launch, deepspeed, Open MPI, MPICH
# and Intel MPI, srun (the last as a list of nodes, "4(x2),3"). The innermost launcher comes first.
LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
)

# Nobody listens there: a lone process needs no rendezvous, but DeepSpeed reads both names. 29500 is torch's default.
_ALONE_ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

# Minutes. torch's own default for gloo. DeepSpeed's and NCCL's 10 are too few: after reading, fast ranks wait in
# `agree` for the slowest one, and that one may sit behind a slow file system.
_DEFAULT_TIMEOUT_MIN = 30


def positive_number(name: str, default: float, unit: str) -> float:
    """Return what a variable of the environment says, or the default.

    Raises:
        ConfigError: it holds no positive number.
    """
    text = os.environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"{name}: the environment has {text!r}, expected a positive number of {unit}")
    return number


def alone(world_size: int | None, rank: int | None) -> dict[str, str]:
    """The variables a launcher would have set for a lone process (or one of the fake backend)."""
    size, rank = world_size or 1, rank or 0
    if not 0 <= rank < size:
        raise ConfigError(f"rank: asked for {rank}, expected 0 <= rank < world_size = {size}")
    foreign = [name for name in FOREIGN_SIZES if os.environ.get(name, "1") != "1"]
    if world_size is None and foreign:
        raise ConfigError(
            f"{foreign[0]} is {os.environ[foreign[0]]}, so this is one of several processes, but none of "
            f"{', '.join(LAUNCHER_NAMES)} is set. Set them from that launcher's variables, use torchrun, or pass "
            "world_size=1 to run alone."
        )
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", **_ALONE_ADDRESS}


def launched(world_size: int | None, rank: int | None) -> dict[str, str]:
    """RANK and WORLD_SIZE as given by arguments, where the launcher set neither; everything else must be there."""
    asked = {name: str(value) for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)) if value is not None}
    found = {name: os.environ[name] for name in LAUNCHER_NAMES if os.environ.get(name)}
    wrong = [f"{n.lower()}: asked for {v}, launcher set {found[n]}" for n, v in asked.items() if found.get(n, v) != v]
    if wrong:
        raise ConfigError("DistributedInterface: the launcher contradicts the arguments: " + "; ".join(wrong))
    missing = [name for name in LAUNCHER_NAMES if name not in found and name not in asked]
    if missing:
        raise ConfigError(
            f"environment: {', '.join(missing)} missing, while "
            f"{', '.join(sorted(found)) or 'arguments'} ask for a launched process group. Start with torchrun, "
            "deepspeed or accelerate launch (whose --cpu starts one process only), or unset all to run as a single "
            "process."
        )
    return asked


def set_missing(wanted: dict[str, str]) -> dict[str, str]:
    """Sets those variables that are unset or empty; returns the ones it set."""
    added = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    os.environ.update(added)
    return added


def unset(added: dict[str, str]) -> None:
    """Removes what `set_missing` set, but for what somebody has changed since: whoever did owns it."""
    for name, value in added.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def default_timeout() -> timedelta:
    """Of collectives, for a group made here: what DeepSpeed is told to take, else ours."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    return timedelta(minutes=integer("DEEPSPEED_TIMEOUT") if minutes else _DEFAULT_TIMEOUT_MIN)


def local_world_size(world_size: int) -> int:
    """Ranks on this machine, as its launcher says; all of `world_size` where none does. Of unequal nodes, the most."""
    for name in LOCAL_SIZES:
        if sizes := [int(size) for size in re.findall(r"(?:^|,)([0-9]+)", os.environ.get(name, ""))]:
            return max(1, min(world_size, max(sizes)))
    return world_size


def cores(local_ranks: int) -> int:
    """Cores for this rank, at least 1: its share of those that it may run on.

    A mask that leaves room for as many others on the machine is taken for this rank's own, as Slurm and mpirun bind;
    any other is one that all ranks of the machine share, as in a container.
    """
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    is_own = allowed < machine and allowed * local_ranks <= machine
    return max(1, allowed if is_own else allowed // local_ranks)


def integer(name: str) -> int:
    """Value of a variable; ConfigError where it is no number."""
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name}: the environment has {text!r}, expected an integer") from error
