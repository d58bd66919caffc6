"""Which of the accelerator's devices a rank uses: chosen before there is a process group, on all ranks or on none."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lowmem_load.distributed import environment
from lowmem_load.errors import ConfigError, RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FAREWELL_S = 5.0
"""Seconds in which the other ranks hear of a failure, before the one that has the store may end."""


def accelerator() -> Any:
    """Return DeepSpeed's accelerator. It takes seconds to import, and decides on the accelerator then."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def this_device() -> torch.device:
    """Return the device of this rank; plain `cpu` on CPU."""
    name = accelerator().device_name()
    return torch.device("cpu") if name == "cpu" else torch.device(name, environment.integer("LOCAL_RANK"))


def choose_device() -> None:
    """Make LOCAL_RANK's device the current one: before NCCL starts, which would else put all ranks on the first.

    Raises:
        ConfigError: this process sees no such device.
    """
    found, local_rank = accelerator(), environment.integer("LOCAL_RANK")
    count = local_rank + 1 if found.device_name() == "cpu" else found.device_count()
    if not 0 <= local_rank < count:
        visible = "".join(f", {name}={os.environ[name]}" for name in found.visible_devices_envs() if name in os.environ)
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, but this process sees {count} {found.device_name()} device(s){visible}: "
            "start no more ranks on a machine than it has devices; where each rank is shown one device of its own, set "
            "LOCAL_RANK=0 in all of them"
        )
    found.set_device(local_rank)


def choose_devices(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Choose the device of each rank. Collective, through the store that the ranks meet in.

    Raises:
        RankError: some rank sees no such device as it is to use.
    """
    error: ConfigError | None = None
    try:
        choose_device()
    except ConfigError as caught:
        error = caught
        store.set("device/failed", f"{rank} {error}")
    _all_have_come(store, "device/chosen", world_size, timeout)
    if store.check(["device/failed"]):
        failed, _, text = store.get("device/failed").decode().partition(" ")
        with contextlib.suppress(RuntimeError):  # somebody is gone already
            _all_have_come(store, "device/heard", world_size, timedelta(seconds=FAREWELL_S))
        raise RankError("choosing a device", {int(failed): text}) from error


def _all_have_come(store: Store, name: str, world_size: int, timeout: timedelta) -> None:
    if store.add(f"{name}/count", 1) == world_size:
        store.set(name, "all")
    store.wait([name], timeout)
