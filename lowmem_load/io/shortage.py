"""Errors of allocators, on the host and on devices: they say how much was missing, but not for what."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lowmem_load.errors import MemoryShortageError
from lowmem_load.text import size

_WORDS = ("can't allocate memory", "out of memory", "not enough memory")
"""Of torch's RuntimeErrors: `c10/core/impl/alloc_cpu.cpp` for the host, and those of the devices."""


@contextlib.contextmanager
def naming_shortage(what: str, nbytes: int) -> Iterator[None]:
    """Raise MemoryShortageError, which says what the memory is for, where an allocator fails within the block.

    Args:
        what: "parameter x".
        nbytes: that are needed for it.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, MemoryShortageError) or not _is_shortage(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MemoryShortageError(f"{what}: {size(nbytes)} of memory cannot be allocated: {reason}") from error


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in _WORDS)
