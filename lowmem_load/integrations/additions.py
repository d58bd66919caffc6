"""What was added to a model of 4-bit weights since it was loaded, adapters as a rule, in the dtype that stock trains.

DeepSpeed's engine casts the parameters of a model to the dtype in which it runs, unless any of them is partitioned
already (deepspeed 0.19.8 `engine.py`, `_configure_distributed_model`). In stock no weight of a quantized model is, so
that adapters, which PEFT keeps in float32, train in bf16 or fp16 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowmem_load.api.load_model import load_report
from lowmem_load.config.precision import Precision
from lowmem_load.config.settings import read_settings
from lowmem_load.ds.parameters import is_partitioned
from lowmem_load.errors import ConfigError
from lowmem_load.hf.active import transformers_models


def config_of(given: Mapping[str, Any]) -> Any:
    """Return the ds_config among the arguments of `deepspeed.initialize`; None if there is none."""
    configs = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    return next((config for config in configs if config is not None), None)


def cast_additions(given: Mapping[str, Any]) -> None:
    """Cast what `deepspeed.initialize` gets whole, beside streamed 4-bit weights, as its engine casts it in stock."""
    model, ds_config = given.get("model"), config_of(given)
    if not isinstance(model, nn.Module) or not any(map(_is_packed, transformers_models(model))):
        return
    try:
        settings = read_settings(ds_config, world_size=1)
    except ConfigError:  # DeepSpeed is about to say what is wrong with it
        return
    if settings.precision is Precision.FP32:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_partitioned(parameter):
            parameter.data = parameter.data.to(settings.dtype)


def _is_packed(model: nn.Module) -> bool:
    try:
        return load_report(model).num_quantized > 0
    except ValueError:  # loaded by somebody else
        return False
