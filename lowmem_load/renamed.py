"""Names of 0.3. They still work, with a DeprecationWarning that says the new name, and go in 0.5."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from lowmem_load.errors import outside_level

P = ParamSpec("P")
T = TypeVar("T")

# Public names of 0.3, and what they stand for now.
NAMES = {
    **{
        name: f"llamafactory.{name}" for name in ("DistConfig", "DistributedInterface", "ModelArguments", "ModelEngine")
    },
    "NotStreamedWarning": "FallbackWarning",
    "initialize": "initialize_partial",
    "load_report": "get_load_report",
    "streaming": "integrations.install.streaming",
}


def old_name(name: str) -> Any:
    """Return what a public name of 0.3 stands for, and warn. Raise AttributeError for any other name."""
    if name not in NAMES:
        raise AttributeError(f"module 'lowmem_load' has no attribute {name!r}")
    module, _, attribute = f"lowmem_load.{NAMES[name]}".rpartition(".")
    instead = "`with lowmem_load.install():`" if name == "streaming" else f"{module}.{attribute}"
    warn_of(f"lowmem_load.{name}", instead)
    return getattr(import_module(module), attribute)


def renamed_keywords(**new_names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function accept keywords of 0.3: `old="new"`, or `old="not new"` if the new one says the opposite."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in sorted(new_names.keys() & kwargs):
                value, is_opposite, new = kwargs.pop(old), "not " in new_names[old], new_names[old].split()[-1]
                warn_of(f"{function.__qualname__}({old}=...)", f"{new}=")
                if new in kwargs:
                    raise TypeError(f"{function.__qualname__}: {new}= and {old}=, its old name, are both given")
                kwargs[new] = not value if is_opposite else value
            return function(*args, **kwargs)

        return call

    return decorate


def warn_of(old: str, new: str) -> None:
    """Warn whoever calls lowmem_load that an old way goes."""
    text = f"{old} is deprecated, and goes in lowmem_load 0.5: use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=outside_level())
