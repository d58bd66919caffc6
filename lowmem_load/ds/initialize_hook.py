"""A look at every call of `deepspeed.initialize`, whoever makes it, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import deepspeed

Handler: TypeAlias = "Callable[[dict[str, Any]], tuple[Any, ...] | None]"
"""Gets the arguments by name, as far as they were given; returns what the call is to return, None to let it go on."""


@contextlib.contextmanager
def hooked(handler: Handler) -> Iterator[None]:
    """Inside, every call of `deepspeed.initialize` goes to `handler` first; of several, to the innermost first.

    Blocks may end in any order. Afterwards `deepspeed.initialize` is what it was before, unless somebody else has
    replaced it meanwhile: that is left in place. What somebody kept from inside passes calls on from then on.
    """
    hook = _Hook(handler, deepspeed.initialize)
    deepspeed.initialize = hook
    try:
        yield
    finally:
        hook.remove()


_SIGNATURE = inspect.signature(deepspeed.initialize)
"""Of DeepSpeed's own: somebody's wrapper, later, may take *args and **kwargs."""


class _Hook:
    """Stands for `deepspeed.initialize`. `__wrapped__` is what it stands for: another hook, or DeepSpeed's own."""

    __wrapped__: Callable[..., Any]

    def __init__(self, handler: Handler, ordinary: Callable[..., Any]) -> None:
        functools.update_wrapper(self, ordinary)
        self._handler: Handler | None = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._handler is not None:
            try:
                given = _SIGNATURE.bind_partial(*args, **kwargs).arguments
            except TypeError:
                return self.__wrapped__(*args, **kwargs)  # which says what is wrong with them
            made = self._handler(given)
            if made is not None:
                return made
        return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        """Take this hook out of the chain that starts at `deepspeed.initialize`, as far as that consists of hooks."""
        self._handler = None
        if deepspeed.initialize is self:
            deepspeed.initialize = self.__wrapped__
            return
        outer = deepspeed.initialize
        while isinstance(outer, _Hook):
            if outer.__wrapped__ is self:
                outer.__wrapped__ = self.__wrapped__
                return
            outer = outer.__wrapped__
