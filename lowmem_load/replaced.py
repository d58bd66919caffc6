"""Handlers that are called in place of functions of other packages while a block lasts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from torch.compiler import is_compiling

T = TypeVar("T")

Handler: TypeAlias = Callable[..., Any]
"""Called with the function that it replaces, followed by the arguments of the call."""

Replacement: TypeAlias = tuple[Any, str, Handler]
"""A module or class, the name of a function in it, and the handler that is called in its place."""

_Block: TypeAlias = dict[Callable[..., Any], Handler]
"""The handlers of a block, by dispatcher; empty when the block is over."""

_MARK = "lowmem_load_dispatcher"
"""Attribute of a dispatcher that refers to itself. functools.wraps copies it to a wrapper, where it does not."""

_BLOCKS: ContextVar[tuple[_Block, ...]] = ContextVar("lowmem_load_blocks", default=())
_EVERYWHERE: list[_Block] = []
_PLACING = threading.Lock()


@contextlib.contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, a variable has a value in this thread or task."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def is_replaceable(owner: Any, name: str) -> bool:
    """Return whether a module or class has a function of this name, which no `__getattr__` makes up."""
    if not isinstance(owner, type):
        return callable(getattr(owner, "__dict__", {}).get(name))
    holder = next((cls for cls in owner.__mro__ if name in vars(cls)), None)
    return holder is not None and callable(getattr(holder, name))


@contextlib.contextmanager
def replaced(*replacements: Replacement, everywhere: bool = False) -> Iterator[None]:
    """Inside, the handlers are called in place of the functions: in this thread or task, or in all.

    An inner handler is called with the outer one. Blocks may end in any order.
    """
    block = {_dispatcher(owner, name): handler for owner, name, handler in replacements}
    if everywhere:
        _EVERYWHERE.append(block)
    else:
        _BLOCKS.set((*_BLOCKS.get(), block))
    try:
        yield
    finally:
        block.clear()  # a task that started inside has a copy of the context
        _BLOCKS.set(tuple(filter(None, _BLOCKS.get())))
        if everywhere:
            _EVERYWHERE.remove(block)


def _dispatcher(owner: Any, name: str) -> Callable[..., Any]:
    """Return what asks for the blocks of its caller. It stays in the place of the function, so nobody restores it."""
    if isinstance(owner, type):
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    with _PLACING:
        held = vars(owner)[name]
        kind = type(held) if isinstance(held, classmethod | staticmethod) else None
        ordinary: Callable[..., Any] = held if kind is None else held.__func__
        is_dispatcher = getattr(ordinary, _MARK, None) is ordinary
        if is_dispatcher:
            return ordinary

        @functools.wraps(ordinary)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            function = ordinary
            if not is_compiling():  # Dynamo cannot trace a ContextVar
                for block in (*_EVERYWHERE, *_BLOCKS.get()):
                    if (handler := block.get(dispatch)) is not None:
                        function = functools.partial(handler, function)
            return function(*args, **kwargs)

        setattr(dispatch, _MARK, dispatch)
        setattr(owner, name, dispatch if kind is None else kind(dispatch))
    return dispatch
