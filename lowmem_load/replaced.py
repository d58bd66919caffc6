"""Handlers that are called in place of functions of other packages while a block lasts.

A block checks the names, of the table in `foreign_names.py`, before it replaces any. When the last block that uses a
name ends, the function itself is back in its place, unless somebody has put something else there since.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch.compiler import is_compiling

from lowmem_load.errors import FallbackWarning, outside_level
from lowmem_load.foreign_names import (
    ForeignName,
    Releases,
    check_release,
    installed_release,
    is_release_between,
    refuse,
    warn_of_newer,
)
from lowmem_load.locks import ForkedLock
from lowmem_load.phases import no_callback

T = TypeVar("T")

Handler: TypeAlias = Callable[..., Any]  # called with the function that it replaces, then the arguments of the call
Handlers: TypeAlias = Mapping[ForeignName, Handler]
_Block: TypeAlias = dict[Callable[..., Any], Handler]  # the handlers by dispatcher; empty when the block is over

_BLOCKS: ContextVar[tuple[_Block, ...]] = ContextVar("lowmem_load_blocks", default=())
_EVERYWHERE: list[_Block] = []


@dataclass(slots=True)
class _Place:
    """Where a dispatcher stands for a function while blocks replace it."""

    owner: Any
    attribute: str
    former: Any  # what was there before the first of the blocks, such as a classmethod
    dispatch: Any
    num_blocks: int = 0


# The latest place by the `id` of its owner, and the attribute. They stay: others may have kept the dispatcher, too.
_PLACES: dict[tuple[int, str], _Place] = {}
_PLACING = ForkedLock()  # a finalizer may leave a block at any moment


@contextlib.contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, a variable has a value in this thread or task."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def replaced(handlers: Handlers, *, everywhere: bool = False) -> Iterator[None]:
    """Inside, the handlers are called in place of the functions: in this thread or task, or in all.

    An inner handler is called with the outer one. Blocks may end in any order. Optional names that are missing are left
    out, with a warning.

    Raises:
        IncompatibleVersionError: a release lacks a name that is not optional.
    """
    block: _Block = {}
    places: list[_Place] = []
    try:
        for name in usable_names(handlers):
            places.append(_enter(*_location(name)))
            block[places[-1].dispatch] = _tolerant(name, handlers[name]) if name.loss else handlers[name]
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


def _tolerant(name: ForeignName, handler: Handler) -> Handler:
    """Return a handler of an optional name that leaves calls to the function itself which have arguments it lacks."""
    signature = inspect.signature(handler)
    fitting: set[tuple[object, ...]] = set()  # forms of calls: `bind` takes longer than most handlers do

    def handle(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        form = len(args), *kwargs
        if form not in fitting:
            try:
                signature.bind(ordinary, *args, **kwargs)
            except TypeError as error:
                package, _, newest = name.releases
                warn_of_loss(
                    f"{name} of {package} {installed_release(package)} is called with other arguments than in "
                    f"{newest} ({error}), so {name.loss}"
                )
                return ordinary(*args, **kwargs)
            fitting.add(form)
        return handler(ordinary, *args, **kwargs)

    return handle


# -- the check ---------------------------------------------------------------------------------------------------------


def usable_names(names: Iterable[ForeignName]) -> list[ForeignName]:
    """Return the names that can be replaced. Warn of optional ones that are missing; raise if others are."""
    names = [name for name in names if not name.until or _is_expected(name)]
    for releases, is_optional in {(name.releases, bool(name.loss)) for name in names}:
        if is_optional:
            warn_of_newer(releases)
        else:
            check_release(releases)
    missing = [name for name in names if not is_there(name)]
    for releases in {name.releases for name in missing}:
        required = [name for name in missing if not name.loss and _is_expected(name)]
        refuse(releases, [str(name) for name in required if name.releases == releases])
    warn_of_missing(missing)
    lost = {name.loss for name in missing if name.loss}
    return [name for name in names if name not in missing and name.loss not in lost]


def warn_of_missing(names: Iterable[ForeignName]) -> None:
    """Warn of what a user loses without names, if their releases should have them: one warning for each loss."""
    missing: dict[tuple[str, Releases], list[str]] = {}
    for name in names:
        if name.loss and _is_expected(name):
            missing.setdefault((name.loss, name.releases), []).append(str(name))
    for (loss, releases), texts in missing.items():
        package, _, newest = releases
        warn_of_loss(
            f"{package} {installed_release(package) or '(of no known release)'} lacks {', '.join(texts)}, so {loss}. "
            f"lowmem_load was tested with {releases}: install {package}=={newest}, or a newer lowmem_load"
        )


def warn_of_loss(text: str) -> None:
    """Warn the caller of this package that something stays as it is without it."""
    warnings.warn(text, FallbackWarning, stacklevel=outside_level())


def is_there(name: ForeignName) -> bool:
    """Return whether a module or class has the function, which no `__getattr__` makes up. Imports the module."""
    try:
        owner, attribute = _location(name)
    except ImportError:
        return False
    if not isinstance(owner, type):
        values = getattr(owner, "__dict__", {})
        return attribute in values and (values[attribute] is None or callable(values[attribute]))
    holder = next((cls for cls in owner.__mro__ if attribute in vars(cls)), None)
    return holder is not None and callable(getattr(holder, attribute))


def _location(name: ForeignName) -> tuple[Any, str]:
    """Return the module or class that has a function, and its attribute."""
    cls, _, attribute = name.name.rpartition(".")
    owner = name.owner or importlib.import_module(name.module)
    return (getattr(owner, cls, None) if cls and name.owner is None else owner), attribute


def _is_expected(name: ForeignName) -> bool:
    return is_release_between(name.releases.package, name.since or name.releases.oldest, name.until)


# -- dispatchers -------------------------------------------------------------------------------------------------------


def _enter(owner: Any, attribute: str) -> _Place:
    """Put a dispatcher in the place of a function, unless one is there."""
    if isinstance(owner, type):
        owner = next(cls for cls in owner.__mro__ if attribute in vars(cls))
    with _PLACING:
        former = vars(owner)[attribute]
        kind = type(former) if isinstance(former, classmethod | staticmethod) else None
        ordinary: Any = former if kind is None else former.__func__
        if former is None:
            ordinary = no_callback  # such as a reference that is not set
        place = _PLACES.get((id(owner), attribute))
        if place is None or (ordinary is not place.dispatch and ordinary is not place.dispatch.__wrapped__):
            place = _PLACES[id(owner), attribute] = _Place(owner, attribute, former, _dispatcher(ordinary))
        if place.num_blocks == 0:
            place.former = former
        place.num_blocks += 1
        if ordinary is not place.dispatch:
            setattr(owner, attribute, place.dispatch if kind is None else kind(place.dispatch))
        return place


def _leave(place: _Place) -> None:
    """Put the function back if this was the last block, and nobody has put something else there."""
    with _PLACING:
        place.num_blocks -= 1
        there = vars(place.owner).get(place.attribute)
        if place.num_blocks == 0 and getattr(there, "__func__", there) is place.dispatch:
            setattr(place.owner, place.attribute, place.former)


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
