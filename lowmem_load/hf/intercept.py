"""Hands the `from_pretrained` of transformers models to a handler while a block lasts.

Part of the transformers seam, see `hf/loader.py`. Loads of ours take turns, since ranks take part in one at a time.
transformers' own are not held up: its loader replaces names of its own for the whole process while it runs
(`PreTrainedModel.tie_weights`, the default dtype), so it is for its users to run it in one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.loader import Call
from lowmem_load.hf.replaced import replaced

Handler = Callable[[Call], tuple[nn.Module, dict[str, Any]]]

_IS_LOADING: ContextVar[bool] = ContextVar("lowmem_load_is_loading", default=False)
"""Whether a handler runs. Calls that the model's own code makes are part of its load."""


def _always(_: Mapping[str, Any]) -> bool:
    return True


@contextlib.contextmanager
def outermost() -> Iterator[None]:
    """Inside, a `from_pretrained` is no part of the load in progress: it is handed to a handler like any other."""
    token = _IS_LOADING.set(False)
    try:
        yield
    finally:
        _IS_LOADING.reset(token)


@contextlib.contextmanager
def intercepted(
    handler: Handler, wanted: Callable[[Mapping[str, Any]], bool] = _always, *, everywhere: bool = False
) -> Iterator[None]:
    """Inside, every outermost `from_pretrained` of a transformers model is handed to `handler` as a `Call`.

    So is `from_config`, as a `from_pretrained` from no file at all: then every parameter is a missing one. Of several
    blocks the innermost counts.

    Args:
        handler: runs the call.
        wanted: asked at each call, with its keywords; where it is false the call runs as if this block were not there.
        everywhere: whether for all threads, or only for the thread or the task of the block.
    """

    def handled(call: Call) -> tuple[Any, dict[str, Any]]:
        with load_lock():
            token = _IS_LOADING.set(True)
            try:
                return handler(call)
            finally:
                _IS_LOADING.reset(token)

    def from_pretrained(ordinary: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if _IS_LOADING.get() or not wanted(kwargs):
            return ordinary(cls, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = handled(Call(ordinary, cls, args, kwargs))
        return (model, info) if wants_info else model

    def from_config(ordinary: Callable[..., Any], cls: Any, /, config: Any, **kwargs: Any) -> Any:
        if _IS_LOADING.get() or not wanted(kwargs):
            return ordinary(cls, config, **kwargs)
        from_config = functools.partial(ordinary, cls, config, **kwargs)
        as_load = {"config": config, "state_dict": {}, **kwargs}
        model, _ = handled(Call(PreTrainedModel.from_pretrained.__func__, cls, (None,), as_load, from_config))
        model.config.name_or_path = getattr(config, "name_or_path", "")
        return model.train()

    with replaced(
        (PreTrainedModel, "from_pretrained", from_pretrained),
        (PreTrainedModel, "_from_config", from_config),
        everywhere=everywhere,
    ):
        yield
