"""Reads a sample of files and digests it; see [Note: the sample] in `planning/sample.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.sample import BLOCK_BYTES, sample_offsets
from lowmem_load.read.open_sources import OpenSources
from lowmem_load.read.source import read_bytes


def sample_digests(
    files: Sequence[PlannedFile],
    seed: int,
    sources: OpenSources,
    on_block: Callable[[], object] = int,
    *,
    num_threads: int,
) -> list[str]:
    """Return a digest of the sampled blocks of each file.

    Args:
        files: to be sampled.
        seed: decides which blocks; the same on all ranks.
        sources: which the headers were read from.
        on_block: called when a block was read, from any thread; by default a no-op.
        num_threads: files read at a time.

    Raises:
        CheckpointError: a file cannot be read, or is no longer what it was when its header was read.
    """

    def digest(sampled: tuple[PlannedFile, list[int]]) -> str:
        file, offsets = sampled
        with sources.reading(file.path) as source:
            if source.version != file.version:
                raise CheckpointError(f"{file.path}: was replaced or written to after its header was read; load again")
            found = hashlib.blake2b(digest_size=16)
            for offset in offsets:
                found.update(read_bytes(source, offset, BLOCK_BYTES))
                on_block()
            return found.hexdigest()

    with ThreadPoolExecutor(num_threads, "lowmem_load-sample") as pool:
        return list(pool.map(digest, sample_offsets(files, seed)))
