"""What a seam needs of another package beyond its public names, checked before any of it is used.

A release that lacks some of it is refused with the names of all that is missing, not with an AttributeError in the
middle of a load, or worse, with an attribute that is set and that nobody reads any more.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lowmem_load.errors import IncompatibleVersionError


def require(
    supported: str,
    names: Mapping[str, Sequence[str]],
    *,
    arguments: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise unless every name is there.

    Owners are spelled "package.module" or "package.module:Class"; the modules are imported.

    Args:
        supported: the package and its releases that the caller was written for: "deepspeed >=0.19.8,<0.20".
        names: the attributes that each owner must have, dotted where they lie deeper.
        arguments: the parameters by name that each function must take.

    Raises:
        IncompatibleVersionError: names the package, its version and all that is missing.
    """
    missing: list[str] = []
    for lacking, wanted in ((_lacking_attributes, names), (_lacking_arguments, arguments)):
        for owner, each in wanted.items():
            try:
                missing += lacking(owner.replace(":", "."), _found(owner), each)
            except (ImportError, AttributeError) as error:
                missing.append(f"{owner.replace(':', '.')} ({error})")
    _refuse(supported, missing)


def require_attributes(supported: str, owner: object, names: Iterable[str]) -> None:
    """Raise unless `owner` has every attribute: for those that `__init__` sets, which the class does not show.

    Raises:
        IncompatibleVersionError: as `require`.
    """
    _refuse(supported, _lacking_attributes(type(owner).__qualname__, owner, names))


def _found(owner: str) -> Any:
    module, _, path = owner.partition(":")
    found = importlib.import_module(module)
    return operator.attrgetter(path)(found) if path else found


def _lacking_attributes(label: str, owner: object, names: Iterable[str]) -> list[str]:
    return [f"{label}.{name}" for name in names if not _has(owner, name)]


def _has(owner: object, name: str) -> bool:
    try:
        operator.attrgetter(name)(owner)
    except AttributeError:
        return False
    return True


def _lacking_arguments(label: str, function: Any, names: Iterable[str]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [f"{label}({name})" for name in names if name not in parameters]


def _refuse(supported: str, missing: Sequence[str]) -> None:
    if missing:
        package = supported.split(maxsplit=1)[0]
        version = importlib.import_module(package).__version__
        raise IncompatibleVersionError(
            f"{package} {version} lacks {', '.join(missing)}; lowmem_load was written for {supported}"
        )
