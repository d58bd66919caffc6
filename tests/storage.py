"""Storage that is not there: file systems that hold what tests have written, as far as lowmem_load can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

BLOCK_BYTES, BYTES_PER_S = 16 << 10, 2e6
"""So slow that the ranks of a node read slices of a few KiB together, in bands of which each rank has some."""


@contextlib.contextmanager
def on_network() -> Iterator[None]:
    """Inside, all files lie on a slow NFS."""
    from lowmem_load.io import mounts

    with (
        mock.patch.object(mounts, "mount_of", return_value=mounts.Mount("nfs4", BLOCK_BYTES)),
        mock.patch.object(mounts, "NETWORK_BYTES_PER_S", BYTES_PER_S),
    ):
        yield
