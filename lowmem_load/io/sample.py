"""Reads and digests a sample of files, so that ranks find out whether they read the same bytes.

[Note: the sample] Every rank reads files by itself, so ranks on different nodes may hold different checkpoints of one
architecture, with equal headers. Each file is cut into strata of equal size, and one block at a random place of each is
compared. So files that differ everywhere, as those of two training runs do, differ in every block; a stretch that
differs is found for certain when it covers two strata, and else in proportion to its share of one. The places are
drawn from a seed that the ranks draw anew for each load.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lowmem_load.errors import CheckpointError
from lowmem_load.io.open_sources import OpenSources
from lowmem_load.io.source import read_bytes
from lowmem_load.planning.load_plan import PlannedFile

BLOCK_BYTES = 4096
"""Bytes of a block: a page, which is fetched in any case."""

MIN_BLOCKS, MAX_BLOCKS = 3, 64
"""Of a file."""

MAX_BLOCKS_IN_ALL = 2048
"""Blocks of a checkpoint, `MIN_BLOCKS` of each file apart: a few milliseconds of reading from a page cache."""


def sample_offsets(files: Sequence[PlannedFile], seed: int) -> list[tuple[PlannedFile, list[int]]]:
    """Return each file with the first bytes of its blocks, ascending; the last block may be shorter than a block.

    Args:
        files: in the order that all ranks have agreed on.
        seed: the same on all ranks.
    """
    draw = random.Random(seed)
    most = max(MIN_BLOCKS, min(MAX_BLOCKS, MAX_BLOCKS_IN_ALL // max(1, len(files))))
    found = []
    for file in files:
        num_blocks = max(1, min(most, file.nbytes // BLOCK_BYTES))
        stratum = file.nbytes / num_blocks
        offsets = []
        for number in range(num_blocks):
            first, last = int(number * stratum), max(int(number * stratum), int((number + 1) * stratum) - BLOCK_BYTES)
            offsets.append(draw.randint(first, last))
        found.append((file, offsets))
    return found


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
