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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch.compiler import is_compiling

from lowmem_load.errors import FallbackWarning, IncompatibleVersionError, outside_level
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

Handler: TypeAlias = Callable[..., Any]
"""Is called with the function that it replaces, then the arguments of the call.

It calls those that it uses as the function and the table do, and passes on all others, because later releases add some.
"""
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
            block[places[-1].dispatch] = _tolerant(name, handlers[name])
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
    """Return a handler that leaves calls which do not fit it to the function itself, and says so if that takes them."""

    def handle(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return handler(ordinary, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # the handler has begun
                raise
            misfit = str(error)
        if _is_wrong(ordinary, args, kwargs):
            return ordinary(*args, **kwargs)  # which raises its own error
        package, _, newest = name.releases
        text = f"{name} of {package} {installed_release(package)} is called with other arguments than in {newest}"
        if not name.loss:
            raise IncompatibleVersionError(f"{text} ({misfit}); install {package}=={newest}, or a newer lowmem_load")
        result = ordinary(*args, **kwargs)
        warn_of_loss(f"{text} ({misfit}), so {name.loss}")
        return result

    return handle


def _is_wrong(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function does not take a call, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return True
    except ValueError:  # compiled functions may have no signature
        return False
    return False


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
    """Return whether a module or class has the function, with the parameters that are used. Imports the module.

    What a `__getattr__` makes up does not count.
    """
    try:
        owner, attribute = _location(name)
    except ImportError:
        return False
    if not isinstance(owner, type):
        values = getattr(owner, "__dict__", {})
        return attribute in values and (values[attribute] is None or _fits(values[attribute], name))
    holder = next((cls for cls in owner.__mro__ if attribute in vars(cls)), None)
    return holder is not None and _fits(getattr(holder, attribute), name)


def _fits(function: Any, name: ForeignName) -> bool:
    """Return whether this is a function, with the parameters that are used if it is the package's own."""
    if not callable(function):
        return False
    function = inspect.unwrap(function)
    # What others define, or have put there, may take its arguments in any form, such as *args.
    if not name.takes or str(function.__module__).partition(".")[0] != name.module.partition(".")[0]:
        return True
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    first, _, others = name.takes.partition("*")
    positional = [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return positional[: len(first.split())] == first.split() and by_name >= set(others.split())


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
