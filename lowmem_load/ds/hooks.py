"""Hands calls of DeepSpeed, whoever makes them, to a handler of ours first while a block lasts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import deepspeed
from deepspeed import DeepSpeedEngine
from torch import nn

from lowmem_load.contract import DEEPSPEED, require
from lowmem_load.replaced import replaced

_STATE, _MAY_GATHER = "_zero3_consolidated_16bit_state_dict", "zero_gather_16bit_weights_on_model_save"

require(
    DEEPSPEED,
    {
        "deepspeed": ("initialize",),
        "deepspeed:DeepSpeedEngine": (_STATE, _MAY_GATHER, "load_checkpoint", "save_16bit_model"),
    },
)

Handler: TypeAlias = "Callable[[dict[str, Any]], Any]"
"""Gets the given arguments by name; returns the result of the call, or None to let the call go on."""

FULL_MODEL = "_full_model"
"""Attribute of the stand-in for a model that a partial engine gives to `deepspeed.initialize`: the full model."""

# DeepSpeed's own: a wrapper of somebody else, set later, may take *args and **kwargs.
_SIGNATURES = {
    "initialize": inspect.signature(deepspeed.initialize),
    "load_checkpoint": inspect.signature(DeepSpeedEngine.load_checkpoint),
    "save_16bit_model": inspect.signature(DeepSpeedEngine.save_16bit_model),
}


def hooked(handler: Handler, owner: Any = deepspeed, name: str = "initialize") -> AbstractContextManager[None]:
    """Inside, every call goes to `handler` first; of several blocks, to the innermost. They may end in any order."""

    def call(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            given = _SIGNATURES[name].bind(*args, **kwargs).arguments
        except TypeError:
            return ordinary(*args, **kwargs)  # DeepSpeed's own error
        made = handler(given)
        return ordinary(*args, **kwargs) if made is None else made

    return replaced((owner, name, call), everywhere=True)


def engine_hooked(name: str, handler: Callable[[Any, dict[str, Any]], Any]) -> AbstractContextManager[None]:
    """Inside, every call of this method of any engine goes to `handler` first, with all its arguments."""
    defaults = {each.name: each.default for each in _SIGNATURES[name].parameters.values()}

    def with_defaults(given: dict[str, Any]) -> Any:
        arguments = {**defaults, **given}
        return handler(arguments.pop("self"), arguments)

    return hooked(with_defaults, DeepSpeedEngine, name)


def is_shell(model: nn.Module) -> bool:
    """Return whether a partial engine gives `model` to DeepSpeed, which then must make an ordinary engine."""
    return FULL_MODEL in vars(model)


@contextlib.contextmanager
def consolidates_to(engine: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the engine gives `state` instead of gathering its weights, whatever its ds_config says."""
    # Source: deepspeed 0.19.8 engine.py, save_16bit_model; accelerate 1.15 Accelerator.get_state_dict.
    setattr(engine, _STATE, lambda *_, **__: state)
    setattr(engine, _MAY_GATHER, lambda: True)
    try:
        yield
    finally:
        delattr(engine, _STATE)
        delattr(engine, _MAY_GATHER)


def may_gather(engine: Any) -> bool:
    """Return whether the engine gives all weights, by its ds_config or by `consolidates_to`."""
    return bool(getattr(engine, _MAY_GATHER)())
