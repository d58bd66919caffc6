"""Switches off a `deepspeed.zero.Init` that the caller has entered while a load runs, and compares it with the load.

Inside one, each module is partitioned when its `__init__` returns, and `torch.empty` and the like return its dtype.
Lightning calls `configure_model` inside one. Nothing here imports DeepSpeed: without it there is no zero.Init.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowmem_load.contract import DEEPSPEED, require, require_attributes
from lowmem_load.errors import UnsupportedError

_ZERO = "deepspeed.runtime.zero.partition_parameters"


@contextlib.contextmanager
def set_aside() -> Iterator[Any]:
    """Inside, a zero.Init that was entered around this has no effect. Yields the outermost one, or None."""
    zero: Any = sys.modules.get(_ZERO)
    if zero is None:
        yield None
        return
    require(DEEPSPEED, {_ZERO: ("restore_init_context", "shutdown_init_context", "top_level_context")})
    init = zero.top_level_context
    if init is None or not getattr(init, "patched", False):
        yield None
        return
    zero.shutdown_init_context()
    try:
        yield init
    finally:
        zero.restore_init_context()


def refuse_another(init: Any, *, dtype: torch.dtype, device: str, world_size: int) -> None:
    """Raise unless a zero.Init around a load, as `set_aside` yields it, makes the same parameters as the load.

    `device` is where partitions stay: "cpu", "nvme", or the accelerator's type.
    """
    if init is None:
        return
    require_attributes(DEEPSPEED, init, ("dp_world_size", "dtype", "remote_device"))
    device_found = str(getattr(init.remote_device, "value", init.remote_device)).partition(":")[0]  # it may be an enum
    found = (init.dtype, device_found, init.dp_world_size)
    if found != (dtype, device, world_size):
        raise UnsupportedError(
            f"inside a deepspeed.zero.Init that makes {found[0]} parameters on {found[1]} for {found[2]} rank(s); "
            f"the ds_config of this load asks for {dtype} on {device} for {world_size}: give zero.Init the same "
            "ds_config (config_dict_or_path=), or load outside of it"
        )


def refuse_partitioned(model: nn.Module) -> None:
    """Raise UnsupportedError if a parameter of a described model is a ZeRO-3 parameter already."""
    if _ZERO not in sys.modules:
        return
    from lowmem_load.ds.parameters import is_partitioned

    for name, parameter in model.named_parameters():
        if is_partitioned(parameter):
            raise UnsupportedError(
                f"{name}: was partitioned by a zero.Init before its values were known; it was entered inside the "
                f"load, such as in the __init__ of {type(model).__name__} or of a module of it: remove it there"
            )
