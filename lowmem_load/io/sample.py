"""Digests a sample of each file, so that nodes find out whether they read the same bytes.

[Note: the sample] Ranks on different nodes may read different copies of a checkpoint, with equal headers. So each file
is cut into strata of equal size, and one block at a random place of each stratum is compared. Files that differ
everywhere, such as those of two training runs, differ in every block. A stretch that differs is found for certain if it
covers two strata; a shorter one, in proportion to its share of a stratum. The ranks draw a new seed for each load.

A norm that differs is shorter than that: 2 KiB of a shard file of 5 GB would be missed nearly always. So tensors of up
to `SMALL_BYTES` are compared whole, if there are at most `MAX_SMALL_TENSORS`; of more, as many are drawn. A 70 B Llama
has 161 of them with 2.6 MB.
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
"""Bytes of a block: a page, which the system reads as a whole anyway."""

MIN_BLOCKS, MAX_BLOCKS = 3, 64
"""Fewest and most blocks of a file."""

MAX_BLOCKS_IN_ALL = 2048
"""Most blocks of a checkpoint, unless `MIN_BLOCKS` of each file are more: a few milliseconds from the page cache."""


SMALL_BYTES = 64 << 10
"""Largest tensor that is compared whole."""

MAX_SMALL_TENSORS = 2048
"""Most of them in a checkpoint that are compared: each may be a read of some milliseconds."""

Span = tuple[int, int]
"""First byte in a file, and the number of bytes."""


def drawn_tensors(small: Sequence[Sequence[Span]], seed: int) -> list[list[Span]]:
    """Return the small tensors of each file that are compared: all, or `MAX_SMALL_TENSORS` that the seed draws.

    Args:
        small: of each file, in the order that all ranks have agreed on.
        seed: the same on all ranks.
    """
    every = [(number, span) for number, spans in enumerate(small) for span in spans]
    if len(every) > MAX_SMALL_TENSORS:
        every = random.Random(seed).sample(every, MAX_SMALL_TENSORS)
    return [sorted(span for number, span in every if number == file) for file in range(len(small))]


def sample_offsets(files: Sequence[PlannedFile], seed: int) -> list[tuple[PlannedFile, list[int]]]:
    """Return each file with the offsets of its blocks, ascending. The file may end inside the last block.

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
    small: Sequence[Sequence[Span]],
    seed: int,
    sources: OpenSources,
    on_block: Callable[[], object] = int,
    *,
    num_threads: int,
) -> list[str]:
    """Return a digest of the sampled blocks and the small tensors of each file.

    Args:
        files: to sample.
        small: the small tensors of each file.
        seed: the same on all ranks.
        sources: of these files.
        on_block: called, from any thread, when a block was read.
        num_threads: files read at a time.

    Raises:
        CheckpointError: a file cannot be read, or has changed since its header was read.
    """

    def digest(sampled: tuple[PlannedFile, list[int]], tensors: Sequence[Span]) -> str:
        file, offsets = sampled
        spans = [*((offset, BLOCK_BYTES) for offset in offsets), *tensors]
        with sources.reading(file.path) as source:
            if source.version != file.version:
                raise CheckpointError(f"{file.path}: was replaced or written to after its header was read; load again")
            found = hashlib.blake2b(digest_size=16)
            for offset, nbytes in spans:
                found.update(read_bytes(source, offset, nbytes))
                on_block()
            return found.hexdigest()

    with ThreadPoolExecutor(num_threads, "lowmem_load-sample") as pool:
        return list(pool.map(digest, sample_offsets(files, seed), drawn_tensors(small, seed)))
