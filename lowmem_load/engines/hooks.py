"""Handlers of functions of DeepSpeed, and what an engine says about its weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import deepspeed
from deepspeed import DeepSpeedEngine
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.foreign_names import DEEPSPEED, ForeignName, require

_STATE, _MAY_GATHER = "_zero3_consolidated_16bit_state_dict", "zero_gather_16bit_weights_on_model_save"

require(
    DEEPSPEED, {"deepspeed": ("initialize",), "deepspeed:DeepSpeedEngine": (_STATE, _MAY_GATHER, "load_checkpoint")}
)

Handler: TypeAlias = "Callable[[dict[str, Any]], Any]"
"""Gets the arguments that are given by name; returns the result of the call, or None to let the call go on."""

FULL_MODEL = "_full_model"
"""Attribute of the `Shell` that a partial engine gives to `deepspeed.initialize`: the full model."""

# DeepSpeed's own: a wrapper of somebody else, set later, may take *args and **kwargs.
_SIGNATURES = {
    foreign_names.INITIALIZE: inspect.signature(deepspeed.initialize),
    foreign_names.LOAD_CHECKPOINT: inspect.signature(DeepSpeedEngine.load_checkpoint),
}


def asked_first(name: ForeignName, handler: Handler) -> Callable[..., Any]:
    """Return a handler for `replaced`: it asks `handler` first, and then the function of DeepSpeed."""

    def call(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            arguments = _SIGNATURES[name].bind(*args, **kwargs).arguments
        except TypeError:
            return ordinary(*args, **kwargs)  # DeepSpeed's own error
        result = handler(arguments)
        return ordinary(*args, **kwargs) if result is None else result

    return call


def is_shell(model: nn.Module) -> bool:
    """Return whether a partial engine gives `model` to DeepSpeed, which then must make an ordinary engine."""
    return FULL_MODEL in vars(model)


@contextlib.contextmanager
def consolidates_to(engine: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the engine gives `state` instead of gathering its weights, whatever its ds_config says."""
    # Source: accelerate 1.15 Accelerator.get_state_dict.
    setattr(engine, _STATE, lambda *_, **__: state)
    setattr(engine, _MAY_GATHER, lambda: True)
    try:
        yield
    finally:
        delattr(engine, _STATE)
        delattr(engine, _MAY_GATHER)


def partitions_all(engine: Any) -> bool:
    """Return whether an engine is about to partition all parameters of its model, none in a group of its own."""
    experts = any(not getattr(parameter, "allreduce", True) for parameter in engine.module.parameters())
    return bool(engine.zero_optimization_partition_weights()) and not experts
