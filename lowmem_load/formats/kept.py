"""A file of a cache: what was found out once, under a digest of all that it depends on. Untrusted input.

    bytes   what
    16      MAGIC
    32      SHA-256 of all that follows
    32      the key
    rest    the content

The digest finds accidents, and is no proof against somebody who writes such a file on purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from lowmem_load.errors import CheckpointError

MAGIC = b"lowmem_load 001\n"
DIGEST_NBYTES = hashlib.sha256().digest_size
MAX_NBYTES = 256 << 20
"""Of a file: a hundred times what the largest published models take."""


def read_kept(path: str, key: bytes) -> bytes | None:
    """Return the content of a file; None if there is no file.

    Raises:
        CheckpointError: it cannot be read, is broken, or was kept for another key.
    """
    try:
        content = _read_bounded(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    start = len(MAGIC) + DIGEST_NBYTES
    if not content.startswith(MAGIC):
        raise CheckpointError(f"{path}: is no file of this cache, or one of another version of lowmem_load")
    if hashlib.sha256(memoryview(content)[start:]).digest() != content[len(MAGIC) : start]:
        raise CheckpointError(f"{path}: is damaged")
    if content[start : start + DIGEST_NBYTES] != key:
        raise CheckpointError(f"{path}: was kept for something else")
    return content[start + DIGEST_NBYTES :]


def write_kept(path: str, key: bytes, content: bytes) -> None:
    """Write a file at once, so that nobody sees half of it; its folder is made. One that is there is replaced.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    kept = key + content
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + hashlib.sha256(kept).digest() + kept)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def digest_of_file(path: str) -> str:
    """Return the SHA-256 of a file of source code."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _read_bounded(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for somebody to write
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is no file")
        if status.st_size > MAX_NBYTES:
            raise CheckpointError(f"{path}: has {status.st_size} bytes, more than {MAX_NBYTES}")
        return file.read(MAX_NBYTES + 1)
