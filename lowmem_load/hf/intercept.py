"""Hands the `from_pretrained` and `from_config` of transformers models to a handler while a block lasts.

Streamed loads of several threads wait for each other, since all ranks take part in one at a time. Ordinary loads wait
for nobody.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lowmem_load.errors import ConfigError
from lowmem_load.hf.loader import Call, constructors
from lowmem_load.replaced import holding, replaced

Handler = Callable[[Call], tuple[nn.Module, dict[str, Any]]]

PATIENCE_S = 30.0
"""Seconds that a thread waits for another one to build a model. The largest models take a second."""

_LOCK = threading.RLock()

_IS_LOADING: ContextVar[bool] = ContextVar("lowmem_load_is_loading", default=False)
"""Whether a handler runs. Calls that the model's own code makes are part of its load."""


@contextlib.contextmanager
def load_lock() -> Iterator[None]:
    """Have one thread load or save at a time. That thread may take the lock again.

    Raises ConfigError if the other thread stays in one constructor, which may wait for this thread.
    """
    before: list[object] = []
    while not _LOCK.acquire(timeout=PATIENCE_S):
        now = constructors[:1]
        if now and now == before:
            raise ConfigError(
                "another thread of this process is loading, and has been in the constructor of its model for more than "
                f"{PATIENCE_S:.0f} s; if that constructor waits for this thread, let it load without a thread"
            )
        before = now
    try:
        yield
    finally:
        _LOCK.release()


def outermost() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is no part of the load in progress: it is handed to a handler like any other."""
    return holding(_IS_LOADING, False)


def handled(handler: Handler, call: Call) -> tuple[Any, dict[str, Any]]:
    """Have a handler do a load in this thread. Loads that the model's own code makes are part of it."""
    with load_lock(), holding(_IS_LOADING, True):
        return handler(call)


@contextlib.contextmanager
def intercepted(
    handler: Handler, wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True, *, everywhere: bool = False
) -> Iterator[None]:
    """Inside, `handler` gets each outermost `from_pretrained`, and each `from_config` as one from no files.

    `wanted` is asked with the keywords of the call. `everywhere` means all threads. The innermost block counts.
    """

    def from_pretrained(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if _IS_LOADING.get() or not wanted(kwargs):
            return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = handled(handler, Call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    def from_config(ordinary: Callable[..., Any], cls: Any, /, config: Any, **kwargs: Any) -> Any:
        as_load = {"config": config, "state_dict": {}, **kwargs}
        if _IS_LOADING.get() or not wanted(as_load):
            return ordinary(cls, config, **kwargs)
        from_config = functools.partial(ordinary, cls, config, **kwargs)
        model, _ = handled(handler, Call(PreTrainedModel.from_pretrained.__func__, cls, (None,), as_load, from_config))
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    with replaced(
        (PreTrainedModel, "from_pretrained", from_pretrained),
        (PreTrainedModel, "_from_config", from_config),
        everywhere=everywhere,
    ):
        yield
