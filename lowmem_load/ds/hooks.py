"""Hands calls of DeepSpeed, whoever makes them, to a handler of ours first while a block lasts.

Written for deepspeed 0.16.4 to 0.19.8: `deepspeed.initialize`; `load_checkpoint` and `save_16bit_model` of engines.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import deepspeed
from torch import nn

from lowmem_load.contract import DEEPSPEED, require

_STATE, _MAY_GATHER = "_zero3_consolidated_16bit_state_dict", "zero_gather_16bit_weights_on_model_save"

require(
    DEEPSPEED,
    {"deepspeed:DeepSpeedEngine": (_STATE, _MAY_GATHER)},
    arguments={
        "deepspeed:DeepSpeedEngine.load_checkpoint": (
            *("load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states"),
            *("load_module_only", "custom_load_fn"),
        ),
        "deepspeed:DeepSpeedEngine.save_16bit_model": ("save_dir", "save_filename", "exclude_frozen_parameters"),
    },
)

from deepspeed import DeepSpeedEngine  # noqa: E402  the contract gives the better error

# -- deepspeed.initialize --------------------------------------------------------------------------------------------

Handler: TypeAlias = "Callable[[dict[str, Any]], tuple[Any, ...] | None]"
"""Gets the given arguments by name; returns the result of the call, or None to let the call go on."""

FULL_MODEL = "_full_model"
"""Attribute of the stand-in for a model that a partial engine gives to `deepspeed.initialize`: the full model."""

_SIGNATURE = inspect.signature(deepspeed.initialize)
"""DeepSpeed's own: a wrapper of somebody else, set later, may take *args and **kwargs."""


@contextlib.contextmanager
def hooked(handler: Handler) -> Iterator[None]:
    """Inside, every call of `deepspeed.initialize` goes to `handler` first; with several blocks, to the innermost.

    Blocks may end in any order. Afterwards `deepspeed.initialize` is what it was before, unless somebody else has
    replaced it meanwhile. A reference to it from inside the block passes calls on from then on.
    """
    found: Any = deepspeed.initialize
    dispatcher = found if isinstance(found, _Dispatcher) else _Dispatcher(found)
    deepspeed.initialize = dispatcher
    dispatcher.handlers.append(handler)
    try:
        yield
    finally:
        dispatcher.handlers.remove(handler)
        if not dispatcher.handlers and deepspeed.initialize is dispatcher:
            deepspeed.initialize = dispatcher.__wrapped__


class _Dispatcher:
    """Replaces `deepspeed.initialize`: asks the handlers of all open blocks, then calls the original."""

    __wrapped__: Callable[..., Any]

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        functools.update_wrapper(self, ordinary)
        self.handlers: list[Handler] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            given = _SIGNATURE.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return self.__wrapped__(*args, **kwargs)  # DeepSpeed's own error
        for handler in reversed(self.handlers):
            made = handler(given)
            if made is not None:
                return made
        return self.__wrapped__(*args, **kwargs)


def is_shell(model: nn.Module) -> bool:
    """Return whether a partial engine gives `model` to DeepSpeed, which then must make an ordinary engine."""
    return FULL_MODEL in vars(model)


# -- methods of engines ----------------------------------------------------------------------------------------------

OfEngine: TypeAlias = "Callable[[Any, dict[str, Any]], Any]"
"""Gets an engine and the arguments of its method by name; returns the result, or None to let the call go on."""


@contextlib.contextmanager
def engine_hooked(name: str, handler: OfEngine) -> Iterator[None]:
    """Inside, every call of this method of any engine goes to `handler` first."""
    ordinary = getattr(DeepSpeedEngine, name)
    signature = inspect.signature(ordinary)

    @functools.wraps(ordinary)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        found = handler(self, {key: value for key, value in bound.arguments.items() if key != "self"})
        return ordinary(self, *args, **kwargs) if found is None else found

    setattr(DeepSpeedEngine, name, method)
    try:
        yield
    finally:
        setattr(DeepSpeedEngine, name, ordinary)


@contextlib.contextmanager
def consolidates_to(engine: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the engine gives `state` instead of gathering its weights, whatever its ds_config says.

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
    """Return whether the engine gives all weights, by its ds_config or by `consolidates_to`."""
    return bool(getattr(engine, _MAY_GATHER)())
