"""Checks the private names of another package before a seam uses them.

A release that lacks some is refused with the names of all that is missing. A release newer than the tested ones is used
if it lacks nothing, with one warning.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from packaging.version import Version

from lowmem_load.errors import IncompatibleVersionError

logger = logging.getLogger(__name__)


class Releases(NamedTuple):
    """The releases of a package, named as pip and `import` do, that a seam was tested with."""

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"


DEEPSPEED = Releases("deepspeed", oldest="0.16.4", newest="0.19.8")
TRANSFORMERS = Releases("transformers", oldest="4.51.0", newest="5.24.0")
TORCH = Releases("torch", oldest="2.6.0", newest="2.15.0")
PEFT = Releases("peft", oldest="0.15.0", newest="0.21.2")
BITSANDBYTES = Releases("bitsandbytes", oldest="0.48.2", newest="0.50.2")


def require(
    supported: Releases,
    names: Mapping[str, Sequence[str]],
    *,
    arguments: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise IncompatibleVersionError, which names all that is missing, unless a release can be used.

    An owner of `names` is "package.module" or "package.module:Class"; names may be dotted. `arguments` are those that
    each function must take by name.
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
    """Raise IncompatibleVersionError unless an object has all attributes: those that `__init__` sets, say."""
    if not _has(owner, *names):  # in one call, because every parameter is checked
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
    found = _installed(supported)
    if Version(found).release < Version(supported.oldest).release:
        raise IncompatibleVersionError(
            f"{supported.package} {found} is too old: lowmem_load works with {supported}; "
            f"install {supported.package}=={supported.oldest} or newer"
        )
    if Version(found).release > Version(supported.newest).release:
        logger.warning(
            "%s %s is newer than what lowmem_load was tested with (%s). The names that lowmem_load uses are checked, "
            "not what they mean: compare the first losses with stock's",
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
