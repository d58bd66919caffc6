"""Files in the page cache before a measurement, or out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable

CHUNK_BYTES = 8 << 20
"""Large enough that files are read at the speed of the page cache or the disk."""


def warm(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read every file once, so that whatever is measured finds it in the page cache."""
    memory = bytearray(CHUNK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the kernel to drop the cached pages of every file (a hint, which needs no privileges)."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
