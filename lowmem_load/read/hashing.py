"""Hashes sources whole: SHA-256, or SHA-1 of a git blob."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from lowmem_load.errors import CheckpointError
from lowmem_load.read.source import ByteSource

GIT, SHA256 = "git's sha1", "sha256"

CHUNK_BYTES = 1 << 20
"""Read at a time: is still in the cache of the core when it is hashed. hashlib lets other threads run meanwhile."""


def hash_source(source: ByteSource, algorithm: str, on_bytes: Callable[[int], object] = int) -> str:
    """Return the digest of all bytes of a source, hex.

    Memory: 1 MiB.

    Args:
        source: is read from its first byte to its last.
        algorithm: `SHA256`, or `GIT` for the name that git gives to a file of these bytes.
        on_bytes: called with the number of bytes that were hashed; by default a no-op.

    Raises:
        CheckpointError: it cannot be read, or changed meanwhile.
    """
    before = source.version
    found = (
        hashlib.sha256() if algorithm == SHA256 else hashlib.sha1(b"blob %d\0" % source.nbytes, usedforsecurity=False)
    )
    chunk = memoryview(bytearray(min(CHUNK_BYTES, source.nbytes)))
    for offset in range(0, source.nbytes, CHUNK_BYTES):
        part = chunk[: source.nbytes - offset]
        source.read_into(offset, [part])
        found.update(part)
        on_bytes(part.nbytes)
    if source.version != before:
        raise CheckpointError(f"{source.path}: was replaced or written to while it was hashed; try again")
    return found.hexdigest()
