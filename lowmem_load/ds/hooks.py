"""Calls of DeepSpeed, whoever makes them, that are handed to us first for as long as a block lasts.

Written for deepspeed 0.16.4 to 0.19.8: `deepspeed.initialize`; `load_checkpoint` and `save_16bit_model` of engines.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import deepspeed

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

Handler: TypeAlias = "Callable[[dict[str, Any]], tuple[Any, ...] | None]"
"""Gets the arguments by name, as far as they were given; returns what the call is to return, None to let it go on."""

OfEngine: TypeAlias = "Callable[[Any, dict[str, Any]], Any]"
"""Gets an engine and the arguments of its method, by name; returns what the call is to return, None to let it go on."""


@contextlib.contextmanager
def hooked(handler: Handler) -> Iterator[None]:
    """Inside, every call of `deepspeed.initialize` goes to `handler` first; of several, to the innermost first.

    Blocks may end in any order. Afterwards `deepspeed.initialize` is what it was before, unless somebody else has
    replaced it meanwhile: that is left in place. What somebody kept from inside passes calls on from then on.
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


_SIGNATURE = inspect.signature(deepspeed.initialize)
"""Of DeepSpeed's own: somebody's wrapper, later, may take *args and **kwargs."""


class _Dispatcher:
    """Stands for `deepspeed.initialize`: asks the handlers of all open blocks, then calls what it stands for."""

    __wrapped__: Callable[..., Any]

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        functools.update_wrapper(self, ordinary)
        self.handlers: list[Handler] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            given = _SIGNATURE.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return self.__wrapped__(*args, **kwargs)  # which says what is wrong with them
        for handler in reversed(self.handlers):
            made = handler(given)
            if made is not None:
                return made
        return self.__wrapped__(*args, **kwargs)


# -- methods of engines ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_hooked(name: str, handler: OfEngine) -> Iterator[None]:
    """Inside, the method of this name of every engine is handed to `handler` first."""
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
