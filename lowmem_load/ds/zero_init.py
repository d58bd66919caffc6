"""Switches off a `deepspeed.zero.Init` that the caller has entered while a load runs, and compares it with the load.

Inside a zero.Init every module is partitioned when its `__init__` returns, and `torch.empty`, `torch.zeros`, ... return
its dtype, whatever was asked for. Lightning calls `configure_model` inside one. Nothing here imports DeepSpeed: if it
is not imported, there is no zero.Init.

Written for deepspeed 0.16.4 to 0.19.8.
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
    """Inside, a zero.Init that was entered around this has no effect, as inside `deepspeed.initialize`.

    Yields the outermost one; None if there is none.
    """
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
    """Raise unless a zero.Init around a load makes the same parameters as the load.

    Stock ZeRO-3 makes them as that zero.Init says, whatever ds_config transformers sees.

    Args:
        init: as `set_aside` yields it.
        dtype: of the load's parameters.
        device: where its partitions stay: "cpu", "nvme", or the accelerator's type.
        world_size: ranks among which they are partitioned.

    Raises:
        UnsupportedError: names both settings.
    """
    if init is None:
        return
    require_attributes(DEEPSPEED, init, ("dp_world_size", "dtype", "remote_device"))
    found = (init.dtype, _device_type(init.remote_device), init.dp_world_size)
    if found != (dtype, device, world_size):
        raise UnsupportedError(
            f"inside a deepspeed.zero.Init that makes {found[0]} parameters on {found[1]} for {found[2]} rank(s); "
            f"the ds_config of this load asks for {dtype} on {device} for {world_size}: give zero.Init the same "
            "ds_config (config_dict_or_path=), or load outside of it"
        )


def refuse_partitioned(model: nn.Module) -> None:
    """Raise if a parameter of a described model is a ZeRO-3 parameter already.

    Raises:
        UnsupportedError: names the first.
    """
    if _ZERO not in sys.modules:
        return
    from lowmem_load.ds.parameters import is_partitioned

    for name, parameter in model.named_parameters():
        if is_partitioned(parameter):
            raise UnsupportedError(
                f"{name}: was partitioned by a zero.Init before its values were known; it was entered inside the "
                f"load, such as in the __init__ of {type(model).__name__} or of a module of it: remove it there"
            )


def _device_type(device: Any) -> str:
    """Return "cpu", "nvme" or the accelerator's type for a torch.device, DeepSpeed's enum or a string."""
    return str(getattr(device, "value", device)).partition(":")[0]
