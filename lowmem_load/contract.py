"""What a seam needs of another package beyond its public names, checked before any of it is used.

A release that lacks some of it is refused with the names of all that is missing, not with an AttributeError in the
middle of a load, or worse, with an attribute that is set and that nobody reads any more. One that is newer than those
that were tested is warned of, once, and used if it lacks nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from lowmem_load.errors import IncompatibleVersionError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases of a package that a seam was tested with.

    Attributes:
        package: as it is imported, and as pip knows it.
        oldest: what is older is refused.
        newest: what is newer is warned of.
    """

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"


DEEPSPEED = Releases("deepspeed", oldest="0.16.4", newest="0.19.8")
TRANSFORMERS = Releases("transformers", oldest="4.51.0", newest="5.23.0")
TORCH = Releases("torch", oldest="2.6.0", newest="2.15.0")
PEFT = Releases("peft", oldest="0.15.0", newest="0.21.2")
BITSANDBYTES = Releases("bitsandbytes", oldest="0.48.2", newest="0.50.2")


def require(
    supported: Releases,
    names: Mapping[str, Sequence[str]],
    *,
    arguments: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise unless the release is not too old and every name is there.

    Owners are spelled "package.module" or "package.module:Class"; the modules are imported.

    Names may be dotted; `arguments` has the parameters by name that each function must take.

    Raises:
        IncompatibleVersionError: names the package, its version, all that is missing, and the release to install.
    """
    _check_release(supported)
    missing: list[str] = []
    for lacking, wanted in ((_lacking_attributes, names), (_lacking_arguments, arguments)):
        for owner, each in wanted.items():
            try:
                missing += lacking(owner.replace(":", "."), _found(owner), each)
            except (ImportError, AttributeError) as error:
                missing.append(f"{owner.replace(':', '.')} ({error})")
    _refuse(supported, missing)


def require_attributes(supported: Releases, owner: object, names: Sequence[str]) -> None:
    """Raise unless `owner` has every attribute (one or more): for those that `__init__` sets, which no class shows.

    Raises:
        IncompatibleVersionError: as `require`.
    """
    if not _has(owner, *names):  # asked for every parameter: for all at once
        _refuse(supported, _lacking_attributes(type(owner).__qualname__, owner, names))


def _found(owner: str) -> Any:
    module, _, path = owner.partition(":")
    found = importlib.import_module(module)
    return operator.attrgetter(path)(found) if path else found


def _lacking_attributes(label: str, owner: object, names: Iterable[str]) -> list[str]:
    return [f"{label}.{name}" for name in names if not _has(owner, name)]


def _has(owner: object, *names: str) -> bool:
    try:
        operator.attrgetter(*names)(owner)
    except AttributeError:
        return False
    return True


def _lacking_arguments(label: str, function: Any, names: Iterable[str]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [f"{label}({name})" for name in names if name not in parameters]


@functools.cache
def _check_release(supported: Releases) -> None:
    """Raise IncompatibleVersionError if the installed release is too old; warn if it is newer than what was tested."""
    found = _installed(supported)
    if Version(found).release < Version(supported.oldest).release:
        raise IncompatibleVersionError(
            f"{supported.package} {found} is too old: lowmem_load works with {supported}; "
            f"install {supported.package}=={supported.oldest} or newer"
        )
    if Version(found).release > Version(supported.newest).release:
        logger.warning(
            "%s %s is newer than what lowmem_load was tested with (%s); it is used, since only what lowmem_load relies "
            "on is checked: compare the first losses with stock's",
            *(supported.package, found, supported),
        )


def _installed(supported: Releases) -> str:
    version: str = importlib.import_module(supported.package).__version__
    return version


def _refuse(supported: Releases, missing: Sequence[str]) -> None:
    if missing:
        raise IncompatibleVersionError(
            f"{supported.package} {_installed(supported)} lacks {', '.join(missing)}; lowmem_load works with "
            f"{supported}: install {supported.package}=={supported.newest}"
        )
