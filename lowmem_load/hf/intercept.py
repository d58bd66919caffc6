"""Hands the `from_pretrained` and `from_config` of transformers models to a handler while a block lasts.

Part of the transformers seam, see `hf/loader.py`. Streamed loads of several threads wait for each other, since all
ranks take part in one at a time. Ordinary loads wait for nobody. transformers' loader replaces names of its own for the
whole process while it runs (`PreTrainedModel.tie_weights`, the default dtype): its users run it in one thread.
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
def _loading(is_loading: bool) -> Iterator[None]:
    token = _IS_LOADING.set(is_loading)
    try:
        yield
    finally:
        _IS_LOADING.reset(token)


def outermost() -> contextlib.AbstractContextManager[None]:
    """Inside, a `from_pretrained` is no part of the load in progress: it is handed to a handler like any other."""
    return _loading(False)


@contextlib.contextmanager
def intercepted(
    handler: Handler, wanted: Callable[[Mapping[str, Any]], bool] = _always, *, everywhere: bool = False
) -> Iterator[None]:
    """Inside, `handler` gets each outermost `from_pretrained` of a transformers model as a `Call`.

    It gets a `from_config` as a `from_pretrained` from no files, where every parameter is missing. Of several blocks
    the innermost counts.

    Args:
        handler: runs the call.
        wanted: asked at each call, with its keywords. If it returns False the call runs as without this block.
        everywhere: for all threads, not only for the thread or task of the block.
    """

    def handled(call: Call) -> tuple[Any, dict[str, Any]]:
        with load_lock(), _loading(True):
            return handler(call)

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
