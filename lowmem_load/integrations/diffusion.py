"""diffusers under `install` and `streaming`: its models become ZeRO-3 partitions, or are lazy for accelerate's FSDP2.

Under ZeRO-3 autoencoders are left to diffusers, as is all that loads while accelerate's `zero3_init_flag` is off:
diffusers' scripts switch it off around models that no engine will train, whose forward needs whole weights.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from lowmem_load import foreign_names
from lowmem_load.api.load_model import load_by_active_config
from lowmem_load.families import diffusion
from lowmem_load.families.call import Call
from lowmem_load.hf.active import active_zero3_config
from lowmem_load.integrations.accelerate import is_for_fsdp2, load_lazily
from lowmem_load.integrations.hooks import replaced_once_imported
from lowmem_load.pipeline.load import Options


def diffusers_loads(options: Options, *, everywhere: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, models of diffusers are streamed: in this thread if diffusers is imported, or in all."""

    def load(call: Call) -> tuple[nn.Module, dict[str, Any]]:
        if active_zero3_config() is not None:
            return load_by_active_config(call, options)
        return load_lazily(call, options)

    if not everywhere:
        return diffusion.intercepted(load, _is_wanted)
    return replaced_once_imported(
        [foreign_names.DIFFUSERS_FROM_PRETRAINED], lambda: diffusion.handlers(load, _is_wanted)
    )


def _is_wanted(cls: type, kwargs: Mapping[str, Any]) -> bool:
    if active_zero3_config() is None:
        return is_for_fsdp2(kwargs)
    return not (diffusion.is_autoencoder(cls) or _is_switched_off())


def _is_switched_off() -> bool:
    """Return whether accelerate's plugin says that models are not partitioned as they are made.

    Source: accelerate 1.15 `utils/dataclasses.py`, `DeepSpeedPlugin.zero3_init_context_manager`.
    """
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return False
    plugin = getattr(state.AcceleratorState(), "deepspeed_plugin", None)
    return plugin is not None and not plugin.zero3_init_flag
