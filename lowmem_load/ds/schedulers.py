"""The lr schedulers that the "scheduler" section of a ds_config names.

Source: deepspeed 0.19.8 `runtime/lr_schedules.py`; `_scheduler_from_config` of `runtime/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowmem_load.contract import require
from lowmem_load.ds.releases import SUPPORTED
from lowmem_load.errors import ConfigError


def _check_contract() -> None:
    """Raise IncompatibleVersionError unless DeepSpeed has what is used of it here."""
    require(SUPPORTED, {"deepspeed.runtime.lr_schedules": ("VALID_LR_SCHEDULES",)})


_check_contract()

from deepspeed.runtime import lr_schedules  # noqa: E402  the contract gives the better error


def scheduler_of(section: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """Return the lr scheduler that a ds_config's "scheduler" section names, DeepSpeed's or torch's; None without one.

    Raises:
        ConfigError: there is no such scheduler.
    """
    return scheduler_class(section)(optimizer, **section.get("params", {})) if section else None


def scheduler_class(section: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the class of the lr scheduler that a ds_config's "scheduler" section names.

    Raises:
        ConfigError: there is no such scheduler.
    """
    name = section.get("type")
    owner = lr_schedules if name in lr_schedules.VALID_LR_SCHEDULES else torch.optim.lr_scheduler
    found: Callable[..., Any] | None = getattr(owner, str(name), None)
    if found is None:
        raise ConfigError(f"ds_config scheduler.type: no lr scheduler {name!r} in DeepSpeed or torch")
    return found
