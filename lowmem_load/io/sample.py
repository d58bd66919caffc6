"""Digests a sample of each file, so that nodes find out whether they read the same bytes.

[Note: the sample] Ranks on different nodes may read different copies of a checkpoint, with equal headers. So each file
is cut into strata of equal size, and one block at a random place of each stratum is compared. Files that differ
everywhere, such as those of two training runs, differ in every block. A stretch that differs is found for certain if it
covers two strata; a shorter one, in proportion to its share of a stratum. The ranks draw a new seed for each load.

A norm that differs is shorter than that: 2 KiB of a shard file of 5 GB would be missed nearly always. So tensors of up
to `SMALL_BYTES` are compared whole: 161 with 2.6 MB of a 70 B Llama, and 46,000 with 168 MB of DeepSeek-V3's 688 GB,
mostly scales. safetensors sorts tensors by dtype, so scales lie side by side, and one read fetches many.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

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

GAP_BYTES = 64 << 10
"""Largest gap between small tensors that is read along: on network storage another read takes longer."""

MAX_READ_BYTES = 4 << 20
"""Most bytes of small tensors that one read fetches into memory."""

Span = tuple[int, int]
"""First byte in a file, and the number of bytes."""


def joined(tensors: Sequence[Span]) -> list[Span]:
    """Return the reads that fetch the small tensors of a file, ascending. Small gaps between tensors are read along."""
    found: list[Span] = []
    for first, nbytes in sorted(tensors):
        start, length = found[-1] if found else (first, 0)
        end = max(start + length, first + nbytes)
        if found and first - (start + length) <= GAP_BYTES and end - start <= MAX_READ_BYTES:
            found[-1] = start, end - start
        else:
            found.append((first, nbytes))
    return found


def sample_offsets(files: Sequence[PlannedFile], seed: int) -> list[list[int]]:
    """Return the ascending offsets of the blocks of each file. `files` and `seed` are the same on all ranks."""
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
        found.append(offsets)
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
    """Return a digest of the sampled blocks and the `small` tensors of each file.

    Raises CheckpointError if a file cannot be read, or has changed since its header was read.
    """

    def digest(file: PlannedFile, offsets: Sequence[int], tensors: Sequence[Span]) -> str:
        spans = [*((offset, BLOCK_BYTES) for offset in offsets), *joined(tensors)]
        with sources.reading(file.path) as source:
            found = hashlib.blake2b(digest_size=16)
            for offset, nbytes in spans:
                found.update(read_bytes(source, offset, nbytes))
                on_block()
            return found.hexdigest()

    sources.expect(files)
    with ThreadPoolExecutor(num_threads, "lowmem_load-sample") as pool:
        return list(pool.map(digest, files, sample_offsets(files, seed), small))
