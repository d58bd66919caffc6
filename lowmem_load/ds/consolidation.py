"""How an engine is kept from gathering its weights when somebody asks it for all of them, or to save them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lowmem_load.contract import require
from lowmem_load.ds.releases import SUPPORTED

_SAVE = "save_16bit_model"
_STATE, _MAY_GATHER = "_zero3_consolidated_16bit_state_dict", "zero_gather_16bit_weights_on_model_save"


def _check_contract() -> None:
    """Raise IncompatibleVersionError unless DeepSpeed has what this module relies on."""
    require(
        SUPPORTED,
        {"deepspeed:DeepSpeedEngine": (_STATE, _MAY_GATHER)},
        arguments={f"deepspeed:DeepSpeedEngine.{_SAVE}": ("save_dir", "save_filename", "exclude_frozen_parameters")},
    )


_check_contract()

from deepspeed import DeepSpeedEngine  # noqa: E402  the contract gives the better error

EngineSaves = Callable[[Any, Mapping[str, Any]], bool]
"""Gets an engine and the arguments of `save_16bit_model`, by name; returns whether it has saved."""


@contextlib.contextmanager
def consolidates_to(engine: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the engine gives `state` where it is asked for all weights of ZeRO-3, whatever its ds_config says.

    Source: deepspeed 0.19.8 `runtime/engine.py`, `save_16bit_model`; accelerate 1.15 `Accelerator.get_state_dict`.
    """
    setattr(engine, _STATE, lambda *_, **__: state)
    setattr(engine, _MAY_GATHER, lambda: True)
    try:
        yield
    finally:
        delattr(engine, _STATE)
        delattr(engine, _MAY_GATHER)


def may_gather(engine: Any) -> bool:
    """Return whether the engine gives all weights where it is asked for them, by its ds_config or a block of ours."""
    return bool(getattr(engine, _MAY_GATHER)())


@contextlib.contextmanager
def engine_saves(handler: EngineSaves) -> Iterator[None]:
    """Inside, `save_16bit_model` of every engine is handed to `handler` first.

    Source: deepspeed 0.16.4 to 0.19.8 `runtime/engine.py`, `save_16bit_model`.
    """
    ordinary = getattr(DeepSpeedEngine, _SAVE)
    signature = inspect.signature(ordinary)

    @functools.wraps(ordinary)
    def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        return True if handler(self, given) else ordinary(self, *args, **kwargs)

    setattr(DeepSpeedEngine, _SAVE, save_16bit_model)
    try:
        yield
    finally:
        setattr(DeepSpeedEngine, _SAVE, ordinary)
