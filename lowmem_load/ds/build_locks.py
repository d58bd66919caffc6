"""Locks that torch keeps beside extensions while it compiles them. A build that is killed leaves its lock for ever."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import time
from importlib.metadata import version

from packaging.version import Version

OLD_S = 600.0
"""Seconds after which a lock is worth a word: builds take minutes on a busy machine, and other ranks wait for one."""


def lock_text(lock: str, age_s: float) -> str:
    """Return what a user should know of a lock."""
    return (
        f"{lock}: is {age_s / 60:.0f} minutes old. torch waits without a word for the build that made it, "
        "and a killed build leaves it"
    )


def locks(name: str = "*") -> dict[str, float]:
    """Return the path and age in seconds of each lock at which torch would wait, or of that of one extension.

    Source: torch 2.13 `utils/cpp_extension.py`, `_get_build_directory`. torch 2.15 has locks that end with a build.
    """
    if Version(version("torch")).release[:2] >= (2, 15):
        return {}
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    here = f"py{sys.version_info.major}{sys.version_info.minor}*"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions", here)
    ages: dict[str, float] = {}
    for lock in sorted(glob.glob(os.path.join(root, name, "lock"))):
        with contextlib.suppress(FileNotFoundError):  # that build has ended
            ages[lock] = time.time() - os.path.getmtime(lock)
    return ages


def old_locks() -> list[tuple[str, float]]:
    """Return the path and age in seconds of each old lock."""
    return [(lock, age_s) for lock, age_s in locks().items() if age_s > OLD_S]
