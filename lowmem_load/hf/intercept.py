"""Which `from_pretrained` runs: transformers' own, or the handler of whoever asked for it; and in whose turn.

Part of the transformers seam, see `hf/loader.py`.

[Note: turns] A load replaces names of transformers, which are per process, and so do blocks that make a DeepSpeed
configuration visible. Two threads that did so at the same time would leave each other's replacements behind for good.
So loads take turns, and so do such blocks: `load_model` waits for its turn, and `streaming`, whose block may hold
anything, and whose end nobody can wait for, has to be alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from lowmem_load.errors import ConfigError
from lowmem_load.hf.loader import Call

Handler = Callable[[Call], tuple[nn.Module, dict[str, Any]]]


def _always() -> bool:
    return True


@dataclass(frozen=True, eq=False)
class _Interception:
    """Somebody who asked for loads; `thread` is None where those of any thread are meant."""

    handler: Handler
    wanted: Callable[[], bool]
    thread: int | None


class _State:
    """The only mutable state of the module: it stands for names in transformers, which are per process too."""

    active: ClassVar[list[_Interception]] = []
    ordinary: ClassVar[dict[str, Any]] = {}  # what was replaced: class methods by name
    inside: ClassVar[threading.local] = threading.local()  # whether this thread runs a handler
    loading: ClassVar[threading.RLock] = threading.RLock()  # type: ignore[valid-type]  # a function before Python 3.13
    turn: ClassVar[threading.RLock] = threading.RLock()  # type: ignore[valid-type]
    is_open_ended: ClassVar[bool] = False  # whether whoever has the turn may keep it for ever


@contextlib.contextmanager
def in_turn(*, open_ended: bool) -> Iterator[None]:
    """Hold the turn of this process; see [Note: turns]. Turns of one thread nest.

    Args:
        open_ended: whether the block runs code of the caller's.

    Raises:
        ConfigError: another thread has an open-ended turn, or this one would have to wait for its own.
    """
    if not _State.turn.acquire(blocking=False):
        if open_ended or _State.is_open_ended:
            raise ConfigError(
                "another thread of this process is loading, or is inside streaming(), and loads replace names of "
                "transformers that all threads share; load in one thread, or with load_model, which waits"
            )
        _State.turn.acquire()
    before, _State.is_open_ended = _State.is_open_ended, _State.is_open_ended or open_ended
    try:
        yield
    finally:
        _State.is_open_ended = before
        _State.turn.release()


@contextlib.contextmanager
def intercepted(handler: Handler, wanted: Callable[[], bool] = _always, *, any_thread: bool = True) -> Iterator[None]:
    """Inside, every outermost `from_pretrained` of a transformers model is handed to `handler` as a `Call`.

    So is `from_config`, as a `from_pretrained` from no file at all: then every parameter is a missing one. Calls at
    which `wanted()` is false run as if nothing were intercepted. Of several blocks the innermost counts; they may end
    in any order.

    Args:
        handler: runs the call.
        wanted: asked at each call.
        any_thread: whether calls of all threads are meant, or only those of this one.
    """
    mine = _Interception(handler, wanted, None if any_thread else threading.get_ident())
    if not _State.active:
        _replace()
    _State.active.append(mine)
    try:
        yield
    finally:
        _State.active.remove(mine)
        if not _State.active:
            _restore()


def is_intercepted() -> bool:
    """Return whether this is inside an `intercepted`."""
    return bool(_State.active)


def innermost() -> object:
    """Return what stands for the innermost `intercepted`: another object for each; None outside of all."""
    return _State.active[-1] if _State.active else None


def _applying() -> _Interception | None:
    if getattr(_State.inside, "load", False):  # a call that the model's own code makes is part of its load
        return None
    thread = threading.get_ident()
    return next((one for one in reversed(_State.active) if one.thread in (None, thread)), None)


def _handled(one: _Interception, call: Call) -> tuple[Any, dict[str, Any]]:
    with in_turn(open_ended=False), _State.loading:
        _State.inside.load = True
        try:
            return one.handler(call)
        finally:
            _State.inside.load = False


def _replace() -> None:
    replaced = {name: PreTrainedModel.__dict__[name] for name in ("from_pretrained", "_from_config")}
    ordinary, ordinary_from_config = (method.__func__ for method in replaced.values())

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        one = _applying()
        with _State.loading:  # not while a load of another thread has replaced what this uses, or hides what it asks
            if one is None or not one.wanted():
                return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = _handled(one, Call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    def from_config(cls: type, /, config: Any, **kwargs: Any) -> Any:
        one = _applying()
        if one is None or not one.wanted():
            return ordinary_from_config(cls, config, **kwargs)
        itself = functools.partial(ordinary_from_config, cls, config, **kwargs)
        with _errors_only():  # that parameters are missing is no news here
            model, _ = _handled(
                one, Call(ordinary, cls, (None,), {"config": config, "state_dict": {}, **kwargs}, itself)
            )
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    _State.ordinary = replaced
    for name, function in (("from_pretrained", from_pretrained), ("_from_config", from_config)):
        functools.update_wrapper(function, replaced[name].__func__)
        setattr(PreTrainedModel, name, classmethod(function))  # type: ignore[arg-type]  # a function of two kinds
    _State.ordinary["ours"] = {name: PreTrainedModel.__dict__[name] for name in replaced}


def _restore() -> None:
    ours = _State.ordinary.pop("ours")
    for name, method in _State.ordinary.items():
        if PreTrainedModel.__dict__[name] is ours[name]:  # else somebody wrapped it since; what is left there is inert
            setattr(PreTrainedModel, name, method)
    _State.ordinary = {}


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
