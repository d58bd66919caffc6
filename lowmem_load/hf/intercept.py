"""Which `from_pretrained` runs: transformers' own, or the handler of whoever asked for it; and in whose turn.

Part of the transformers seam, see `hf/loader.py`.

[Note: turns] A load replaces names of transformers, which are per process, and so do blocks that make a DeepSpeed
configuration visible. Two threads that did so at the same time would leave each other's replacements behind for good.
So loads take turns, and so do such blocks: `load_model` waits for its turn, and `streaming`, whose block may hold
anything, and whose end nobody can wait for, has to be alone.

transformers' own loads replace names as well, without turns: `PreTrainedModel.tie_weights` (5.23 `initialization.py`),
`torch.linspace`, the default dtype. Those that begin while calls are intercepted wait, for `_State.loading`; where the
function was looked up before, the making of the model does. Those that had begun before are waited for. Calls that they
make are part of them, and never wait for the turn, so that whoever has it may wait for them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from lowmem_load.errors import ConfigError
from lowmem_load.hf.loader import Call

Handler = Callable[[Call], tuple[nn.Module, dict[str, Any]]]

LOADS = ("from_pretrained", "_from_config")
"""Functions of `LOADERS` inside which names are replaced."""

LOADERS = ("transformers.modeling_utils", "transformers.modeling_layers")
"""Modules that define them; the second (5.23) for `MtpModel`."""

SAID_AFTER_S = 10.0
"""Seconds of waiting for a load that had begun before, after which that is said."""

logger = logging.getLogger(__name__)


def _always() -> bool:
    return True


@dataclass(frozen=True, eq=False)
class _Interception:
    """Somebody who asked for loads; `thread` is None where those of any thread are meant.

    `inside` is the thread that asked for them inside a load of transformers' own, as a model's code may, else None.
    """

    handler: Handler
    wanted: Callable[[], bool]
    thread: int | None
    inside: int | None


class _State:
    """The only mutable state of the module: it stands for names in transformers, which are per process too."""

    active: ClassVar[list[_Interception]] = []
    ordinary: ClassVar[dict[str, Any]] = {}  # what was replaced: class methods by name
    num_blocks: ClassVar[int] = 0  # that need it replaced
    counting: ClassVar[threading.Lock] = threading.Lock()
    inside: ClassVar[threading.local] = threading.local()  # whether this thread runs a handler, and is `alone`
    loading: ClassVar[threading.RLock] = threading.RLock()  # type: ignore[valid-type]  # a function before Python 3.13
    turn: ClassVar[threading.RLock] = threading.RLock()  # type: ignore[valid-type]
    num_open_ended: ClassVar[int] = 0  # blocks of whoever has the turn which may keep it for ever


@contextlib.contextmanager
def in_turn(*, open_ended: bool) -> Iterator[None]:
    """Hold the turn of this process; see [Note: turns]. Turns of one thread nest.

    Args:
        open_ended: whether the block runs code of the caller's.

    Raises:
        ConfigError: another thread has an open-ended turn, or this one would have to wait for its own; or another one
            has the turn and may wait for a load that this one is inside.
    """
    if not _State.turn.acquire(blocking=False):
        if open_ended or _State.num_open_ended or _loading_thread() is not None:
            raise ConfigError(
                "another thread of this process is loading, or is inside streaming() or deepspeed_visible(), and loads "
                "replace names of transformers that all threads share; load in one thread, or with load_model, which "
                "waits"
            )
        _State.turn.acquire()
    _State.num_open_ended += open_ended
    try:
        yield
    finally:
        _State.num_open_ended -= open_ended
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
    mine = _Interception(handler, wanted, None if any_thread else threading.get_ident(), _loading_thread())
    with _replaced():
        _State.active.append(mine)
        try:
            yield
        finally:
            _State.active.remove(mine)


def is_intercepted() -> bool:
    """Return whether this is inside an `intercepted`."""
    return bool(_State.active)


def innermost() -> object:
    """Return what stands for the innermost `intercepted`: another object for each; None outside of all."""
    return _State.active[-1] if _State.active else None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the turn while no load runs in another thread, neither ours nor transformers' own; see [Note: turns]."""
    if getattr(_State.inside, "alone", False):  # nobody else goes on, so there is nobody to wait for
        yield
        return
    with in_turn(open_ended=False), _replaced():
        began, is_said = time.monotonic(), False
        while True:
            with _State.loading:  # let go between two looks, since a load that began before may make others
                others = _begun_before()
                if not others:
                    _State.inside.alone = True
                    try:
                        yield
                    finally:
                        _State.inside.alone = False
                    return
            if not is_said and time.monotonic() - began > SAID_AFTER_S:
                names = ", ".join(sorted(each.name for each in threading.enumerate() if each.ident in others))
                logger.warning("waiting for from_pretrained in thread %s: it began before this load", names)
                is_said = True
            time.sleep(0.005)


def _applying() -> _Interception | None:
    if getattr(_State.inside, "load", False):  # a call that the model's own code makes is part of its load
        return None
    thread, inside = threading.get_ident(), _loading_thread()
    mine = (one for one in reversed(_State.active) if one.thread in (None, thread))
    return next((one for one in mine if inside in (None, one.inside)), None)


def _begun_before() -> set[int]:
    """Return the other threads that are inside a load of transformers' own; none if this one is, which would not end.

    While `_State.loading` is held and calls are intercepted, such a load began before.
    """
    looks = 2  # a generator that is left while its thread is looked at hides what called it
    inside = {each for _ in range(looks) for each, frame in sys._current_frames().items() if _is_inside_load(frame)}
    return set() if threading.get_ident() in inside else inside


def _loading_thread() -> int | None:
    """Return this thread if it is inside a load of transformers' own, else None."""
    return threading.get_ident() if _is_inside_load(sys._getframe()) else None


def _is_inside_load(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in LOADS and frame.f_globals.get("__name__") in LOADERS:
            return True
        frame = frame.f_back
    return False


def _handled(one: _Interception, call: Call) -> tuple[Any, dict[str, Any]]:
    _State.inside.load = True
    try:
        return one.handler(call)
    finally:
        _State.inside.load = False


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    """Inside, loads of all threads go through what `_replace` puts in place."""
    with _State.counting:
        if not _State.num_blocks:
            _replace()
        _State.num_blocks += 1
    try:
        yield
    finally:
        with _State.counting:
            _State.num_blocks -= 1
            if not _State.num_blocks:
                _restore()


def _replace() -> None:
    names = ("from_pretrained", "_from_config", "get_init_context")
    replaced = {name: PreTrainedModel.__dict__[name] for name in names}
    ordinary, ordinary_from_config, ordinary_contexts = (method.__func__ for method in replaced.values())

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        one = _applying()
        with _State.loading:  # not while a load of another thread has replaced what this uses, or hides what it asks
            if one is None or not one.wanted():
                return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        with alone():
            model, info = _handled(one, Call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    def from_config(cls: type, /, config: Any, **kwargs: Any) -> Any:
        one = _applying()
        with _State.loading:
            if one is None or not one.wanted():
                return ordinary_from_config(cls, config, **kwargs)
        itself = functools.partial(ordinary_from_config, cls, config, **kwargs)
        with alone(), _errors_only():  # that parameters are missing is no news here
            model, _ = _handled(
                one, Call(ordinary, cls, (None,), {"config": config, "state_dict": {}, **kwargs}, itself)
            )
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    def get_init_context(cls: type, *args: Any, **kwargs: Any) -> list[Any]:
        """Of a load whose function was looked up before it was replaced: that comes before its arguments are made."""
        with _State.loading:
            return [_State.loading, *ordinary_contexts(cls, *args, **kwargs)]

    _State.ordinary = replaced
    functions: tuple[Callable[..., Any], ...] = (from_pretrained, from_config, get_init_context)
    for name, function in zip(names, functions, strict=True):
        functools.update_wrapper(function, replaced[name].__func__)
        setattr(PreTrainedModel, name, classmethod(function))
    _State.ordinary["ours"] = {name: PreTrainedModel.__dict__[name] for name in replaced}


def _restore() -> None:
    ours = _State.ordinary.pop("ours")
    for name, method in _State.ordinary.items():
        # Else somebody wrapped it since; what is left there does no harm.
        if PreTrainedModel.__dict__[name] is ours[name]:
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
