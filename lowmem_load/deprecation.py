"""Keywords that public functions do not have any more. For one release they are accepted, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lowmem_load.errors import outside_level

P = ParamSpec("P")
R = TypeVar("R")


def without_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Accept `progress=` in calls of a function, which LOWMEM_LOAD_PROGRESS has replaced, and ignore it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "progress" in kwargs:
            del kwargs["progress"]
            text = f"{function.__name__}: progress= is ignored. Set LOWMEM_LOAD_PROGRESS to 1 or 0 in the environment."
            warnings.warn(text, FutureWarning, stacklevel=outside_level())
        return function(*args, **kwargs)

    return call
