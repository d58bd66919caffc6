"""The releases of other packages that this one supports, and the check of private names before they are used.

A release that lacks some is refused with the names of all that is missing. A release newer than the tested ones is used
if it lacks nothing, with one warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from lowmem_load.errors import IncompatibleVersionError

logger = logging.getLogger(__name__)


class Releases(NamedTuple):
    """The releases of a package, named as pip and `import` do, that this package was tested with."""

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"


DEEPSPEED = Releases("deepspeed", oldest="0.18.4", newest="0.19.8")
TRANSFORMERS = Releases("transformers", oldest="5.6.0", newest="5.24.0")
TORCH = Releases("torch", oldest="2.8.0", newest="2.15.0")
PEFT = Releases("peft", oldest="0.18.1", newest="0.21.2")
BITSANDBYTES = Releases("bitsandbytes", oldest="0.48.2", newest="0.50.2")
ACCELERATE = Releases("accelerate", oldest="1.11.0", newest="1.15.0")
TRL = Releases("trl", oldest="0.28.0", newest="1.16.0")
LLAMAFACTORY = Releases("llamafactory", oldest="0.9.5", newest="0.9.5")
DIFFUSERS = Releases("diffusers", oldest="0.42.0", newest="0.42.1")
AXOLOTL = Releases("axolotl", oldest="0.19.0", newest="0.19.0")


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
    check_release(supported)
    missing: list[str] = []
    for list_missing, wanted in ((_missing_attributes, names), (_missing_arguments, arguments)):
        for owner, wanted_names in wanted.items():
            label = owner.replace(":", ".")
            try:
                missing += list_missing(label, _import_owner(owner), wanted_names)
            except (ImportError, AttributeError) as error:
                missing.append(f"{label} ({error})")
    refuse(supported, missing)


def require_attributes(supported: Releases, owner: object, names: Sequence[str]) -> None:
    """Raise IncompatibleVersionError unless an object has all attributes: those that `__init__` sets, say."""
    if not _has(owner, *names):  # in one call, because every parameter is checked
        refuse(supported, _missing_attributes(type(owner).__qualname__, owner, names))


def _import_owner(owner: str) -> Any:
    module, _, path = owner.partition(":")
    imported = importlib.import_module(module)
    return operator.attrgetter(path)(imported) if path else imported


def _missing_attributes(label: str, owner: object, names: Iterable[str]) -> list[str]:
    return [f"{label}.{name}" for name in names if not _has(owner, name)]


def _has(owner: object, *names: str) -> bool:
    try:
        operator.attrgetter(*names)(owner)
    except AttributeError:
        return False
    return True


def _missing_arguments(label: str, function: Any, names: Iterable[str]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [f"{label}({name})" for name in names if name not in parameters]


def installed_release(package: str) -> str:
    """Return the release of a package that is imported or installed; "" if it does not say."""
    try:
        return str(getattr(sys.modules.get(package), "__version__", None) or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder of sources
        return ""


def is_release_between(package: str, oldest: str, newest: str = "") -> bool:
    """Return whether the installed release lies between two, ends included; also if it does not say."""
    try:
        release = Version(installed_release(package)).release
    except InvalidVersion:
        return True
    return Version(oldest).release <= release and (not newest or release <= Version(newest).release)


def check_release(supported: Releases) -> None:
    """Raise IncompatibleVersionError for a release that is too old; warn once of one that is newer than the tested."""
    package, oldest, _ = supported
    if not is_release_between(package, oldest):
        raise IncompatibleVersionError(
            f"{package} {installed_release(package)} is too old: lowmem_load works with {supported}; "
            f"install {package}=={oldest} or newer"
        )
    warn_of_newer(supported)


@functools.cache
def warn_of_newer(supported: Releases) -> None:
    """Warn once of a release that is newer than the tested ones."""
    package, _, newest = supported
    if not is_release_between(package, "0", newest):
        logger.warning(
            "%s %s is newer than what lowmem_load was tested with (%s). The names that lowmem_load uses are checked, "
            "not what they mean: compare the first losses with stock's",
            package,
            installed_release(package),
            supported,
        )


def refuse(supported: Releases, missing: Sequence[str]) -> None:
    """Raise IncompatibleVersionError if names are missing."""
    if missing:
        raise IncompatibleVersionError(
            f"{supported.package} {installed_release(supported.package)} lacks {', '.join(missing)}; lowmem_load works "
            f"with {supported}: install {supported.package}=={supported.newest}"
        )
