"""Which DeepSpeed configuration is active in transformers: that of TrainingArguments, accelerate or the caller.

Part of the transformers seam, see `loader.py`. transformers keeps a weak reference to the `HfDeepSpeedConfig` that was
made last (integrations/deepspeed.py); every `from_pretrained` asks it whether to load for ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers.integrations.deepspeed as hf_deepspeed
from torch import nn
from transformers import PreTrainedModel


def active_zero3_config() -> Mapping[str, Any] | None:
    """Return the active ds_config when it is one of ZeRO-3, else None. It is transformers' own: read only."""
    if not hf_deepspeed.is_deepspeed_zero3_enabled():
        return None
    config: Mapping[str, Any] = hf_deepspeed.deepspeed_config()
    return config


def was_dropped() -> bool:
    """Return whether a configuration was active until nothing kept its `HfDeepSpeedConfig` alive any more.

    `unset_hf_deepspeed_config`, with which transformers' users end it on purpose, leaves no such trace.
    """
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    return reference is not None and reference() is None


def transformers_models(module: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost transformers models within `module`, such as the one below a PEFT model."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in transformers_models(child)]
