"""Finds, between planning and reading, nodes that have different copies of a checkpoint.

[Note: the sample] Ranks on different nodes may read different copies of a checkpoint, with equal headers. So each file
is cut into strata of equal size, and one block at a random place of each stratum is compared. Files that differ
everywhere, such as those of two training runs, differ in every block. A stretch that differs is found for certain if it
covers two strata; a shorter one, in proportion to its share of a stratum. The ranks draw a new seed for each load.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lowmem_load.distributed.nodes import machine
from lowmem_load.distributed.peers import Progress
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError
from lowmem_load.files.source import OpenSources, read_bytes
from lowmem_load.files.stand_ins import is_stand_in, origin
from lowmem_load.phases import no_callback
from lowmem_load.planning.load_plan import PlannedFile, in_common_order
from lowmem_load.text import fingerprint, spell_ranks

BLOCK_BYTES = 4096
"""Bytes of a block: a page, which the system reads as a whole anyway."""

MIN_BLOCKS, MAX_BLOCKS = 3, 64
"""Fewest and most blocks of a file."""

MAX_BLOCKS_IN_ALL = 2048
"""Most blocks of a checkpoint, unless `MIN_BLOCKS` of each file are more: a few milliseconds from the page cache."""


class View(NamedTuple):
    """The digests of the samples that ranks which opened the very same files took, in one order for all views."""

    ranks: Sequence[int]
    digests: Sequence[str]
    paths: Sequence[str]


FilesId = tuple[str, int]
"""A digest that ranks with the very same files share; and a random number, of which rank 0's counts."""


def identify_files(files: Sequence[PlannedFile]) -> FilesId:
    """Return what other ranks must know of the files that this one has planned against."""
    ordered = in_common_order(files)
    # The version of a file in a remote store says which bytes it has, on any machine.
    place = [] if ordered and all(is_stand_in(file.path) for file in ordered) else [machine()]
    return fingerprint([*place, *(f"{origin(file.path)} {file.version}" for file in ordered)]), secrets.randbits(64)


def agree_on_bytes(
    ranks: RankGroup,
    name: str,
    files: Sequence[PlannedFile],
    *,
    sources: OpenSources,
    ids: Sequence[FilesId],
    num_threads: int,
) -> None:
    """Raise on all ranks if a sample of their files differs; see [Note: the sample].

    The ranks have agreed on names, sizes and headers. `ids` has what `identify_files` returned on each rank.
    Collective: one step; none where all opened the very same files.
    """
    id_by_rank = [digest for digest, _ in ids]
    first_rank = {digest: id_by_rank.index(digest) for digest in dict.fromkeys(id_by_rank)}
    if len(first_rank) == 1:
        return
    ordered, sampled_blocks = in_common_order(files), [0]

    def on_block() -> None:
        sampled_blocks[0] += 1
        ranks.check()

    def progress() -> Progress:
        return Progress(sampled_blocks[0], f"{sampled_blocks[0]} blocks compared")

    with ranks.step("comparing the files of the ranks", name=name, progress=progress) as step:
        if first_rank[id_by_rank[ranks.rank]] == ranks.rank:
            digests = sample_digests(ordered, ids[0][1], sources, on_block, num_threads=num_threads)
            step.payload = digests, [file.path for file in ordered]
    check_same(
        [
            View([rank for rank, other in enumerate(id_by_rank) if other == digest], *step.payloads[first])
            for digest, first in first_rank.items()
        ]
    )


def check_same(views: Sequence[View]) -> None:
    """Raise CheckpointError, which names the first file that differs and the ranks, unless all hold the same."""
    for number, path in enumerate(views[0].paths):
        versions: dict[str, list[View]] = {}
        for view in views:
            versions.setdefault(view.digests[number], []).append(view)
        if len(versions) > 1:
            groups = [
                f"rank(s) {spell_ranks(sorted(rank for view in alike for rank in view.ranks))}: "
                f"{alike[0].paths[number]}"
                for alike in versions.values()
            ]
            raise CheckpointError(
                f"{path.rpartition('/')[2]}: the ranks hold {len(versions)} different files of this name, so the "
                f"model would be a mixture: {'; '.join(groups)}. Give all ranks the same checkpoint and revision"
            )


def sample_offsets(files: Sequence[PlannedFile], seed: int) -> list[list[int]]:
    """Return the ascending offsets of the blocks of each file. `files` and `seed` are the same on all ranks."""
    draw = random.Random(seed)
    most = max(MIN_BLOCKS, min(MAX_BLOCKS, MAX_BLOCKS_IN_ALL // max(1, len(files))))
    offsets_by_file = []
    for file in files:
        num_blocks = max(1, min(most, file.nbytes // BLOCK_BYTES))
        stratum = file.nbytes / num_blocks
        offsets = []
        for number in range(num_blocks):
            first, last = int(number * stratum), max(int(number * stratum), int((number + 1) * stratum) - BLOCK_BYTES)
            offsets.append(draw.randint(first, last))
        offsets_by_file.append(offsets)
    return offsets_by_file


def sample_digests(
    files: Sequence[PlannedFile],
    seed: int,
    sources: OpenSources,
    on_block: Callable[[], object] = no_callback,
    *,
    num_threads: int,
) -> list[str]:
    """Return a digest of the sampled blocks of each file.

    Raises CheckpointError if a file cannot be read, or has changed since its header was read.
    """

    def digest(file: PlannedFile, offsets: Sequence[int]) -> str:
        with sources.reading(file.path) as source:
            hasher = hashlib.blake2b(digest_size=16)
            for offset in offsets:
                hasher.update(read_bytes(source, offset, BLOCK_BYTES))
                on_block()
            return hasher.hexdigest()

    sources.expect(files)
    with ThreadPoolExecutor(num_threads, "lowmem_load-sample") as pool:
        return list(pool.map(digest, files, sample_offsets(files, seed)))
