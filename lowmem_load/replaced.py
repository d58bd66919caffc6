"""Handlers that are called in place of functions of other packages while a block lasts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch.compiler import is_compiling

T = TypeVar("T")

Handler: TypeAlias = Callable[..., Any]
"""Called with the function that it replaces, followed by the arguments of the call."""

Replacement: TypeAlias = tuple[Any, str, Handler]
"""A module or class, the name of a function in it, and the handler that is called in its place."""

_Block: TypeAlias = dict[Callable[..., Any], Handler]
"""The handlers of a block, by dispatcher; empty when the block is over."""

_BLOCKS: ContextVar[tuple[_Block, ...]] = ContextVar("lowmem_load_blocks", default=())
_EVERYWHERE: list[_Block] = []


@dataclass(slots=True)
class _Place:
    """Where a dispatcher stands for a function while blocks replace it."""

    owner: Any
    name: str
    former: Any  # what was there before the first of the blocks, such as a classmethod
    dispatch: Any
    num_blocks: int = 0


_PLACES: dict[tuple[int, str], _Place] = {}
"""The latest place by the `id` of its owner, and the name. Kept: others may have kept the dispatcher, too."""

_PLACING = threading.RLock()  # a finalizer may leave a block at any moment


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
    block: _Block = {}
    places: list[_Place] = []
    try:
        for owner, name, handler in replacements:
            places.append(_enter(owner, name))
            block[places[-1].dispatch] = handler
        if everywhere:
            _EVERYWHERE.append(block)
        else:
            _BLOCKS.set((*_BLOCKS.get(), block))
        yield
    finally:
        block.clear()  # a task that started inside has a copy of the context
        _BLOCKS.set(tuple(filter(None, _BLOCKS.get())))
        if everywhere and block in _EVERYWHERE:
            _EVERYWHERE.remove(block)
        for place in places:
            _leave(place)


def _enter(owner: Any, name: str) -> _Place:
    """Put a dispatcher in the place of a function, unless one is there."""
    if isinstance(owner, type):
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    with _PLACING:
        former = vars(owner)[name]
        kind = type(former) if isinstance(former, classmethod | staticmethod) else None
        ordinary: Any = former if kind is None else former.__func__
        place = _PLACES.get((id(owner), name))
        if place is None or (ordinary is not place.dispatch and ordinary is not place.dispatch.__wrapped__):
            place = _PLACES[id(owner), name] = _Place(owner, name, former, _dispatcher(ordinary))
        if place.num_blocks == 0:
            place.former = former
        place.num_blocks += 1
        if ordinary is not place.dispatch:
            setattr(owner, name, place.dispatch if kind is None else kind(place.dispatch))
        return place


def _leave(place: _Place) -> None:
    """Put the function back if this was the last block, and nobody has put something else there."""
    with _PLACING:
        place.num_blocks -= 1
        there = vars(place.owner).get(place.name)
        if place.num_blocks == 0 and getattr(there, "__func__", there) is place.dispatch:
            setattr(place.owner, place.name, place.former)


def _dispatcher(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls the handlers of its caller's blocks, or else the function."""

    @functools.wraps(ordinary)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        function = ordinary
        if not is_compiling():  # Dynamo cannot trace a ContextVar
            for block in (*_EVERYWHERE, *_BLOCKS.get()):
                if (handler := block.get(dispatch)) is not None:
                    function = functools.partial(handler, function)
        return function(*args, **kwargs)

    return dispatch
