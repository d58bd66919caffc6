"""Checks between planning and reading: whether all that the ranks need fits, and whether they have the same files.

[Note: the sample] Ranks on different nodes may read different copies of a checkpoint, with equal headers. So each file
is cut into strata of equal size, and one block at a random place of each stratum is compared. Files that differ
everywhere, such as those of two training runs, differ in every block. A stretch that differs is found for certain if it
covers two strata; a shorter one, in proportion to its share of a stratum.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from lowmem_load.distributed.nodes import free_heap_bytes, machine, rooms
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, ConfigError, LowMemLoadError, MemoryShortageError
from lowmem_load.files.executor import MIN_DEVICE_THREADS
from lowmem_load.files.source import OpenSources, read_bytes
from lowmem_load.files.stand_ins import is_stand_in, origin
from lowmem_load.files.uploads import Uploads
from lowmem_load.load.describe import Described
from lowmem_load.phases import Progress, no_callback
from lowmem_load.planning.load_plan import LoadPlan, PlannedFile, in_common_order
from lowmem_load.text import fingerprint, size, spell_ranks

BLOCK_BYTES = 4096
"""Bytes of a block: a page, which the system reads in full anyway."""

MIN_BLOCKS, MAX_BLOCKS = 3, 64
"""Fewest and most blocks of a file."""

MAX_BLOCKS_IN_ALL = 2048
"""Most blocks of a checkpoint, unless `MIN_BLOCKS` of each file are more: a few milliseconds from the page cache."""


SAMPLE_THREADS = 16
"""Blocks read at a time. 1956 blocks of a FUSE folder that answers after 10 ms took 2.1 s, and 5.8 s with 4 threads."""


class Use(NamedTuple):
    """What one rank needs of a disk or of memory, and what is free there, bytes. Uses of equal `pool` add up."""

    place: str  # for messages
    pool: str
    needed_bytes: int
    free_bytes: int


def disk_uses(needed: Mapping[str, int]) -> list[Use]:
    """Return what this rank will write, given in bytes by folder, with what is free there to users other than root.

    A network file system counts once per machine, because nothing shows for sure that two machines share it.
    """
    return [
        Use(folder, f"{machine()} {os.stat(folder).st_dev}", nbytes, shutil.disk_usage(folder).free)
        for folder, nbytes in needed.items()
    ]


def memory_uses(rank: int, plan: LoadPlan, described: Described, num_threads: int, message_bytes: int) -> list[Use]:
    """Return the host memory that a load will need on this rank at least, with what is free of all that bounds it.

    `message_bytes` are those of messages to other ranks.
    """
    target = described.target
    need = target.host_bytes(plan.targets)
    new_bytes = need.new + plan.costs.largest_temporary_bytes + plan.companion_bytes + message_bytes
    if target.device.type == "cpu":
        buffers = [buffer for buffer in plan.buffers if buffer.fill is not None]  # others are in memory already
        new_bytes += sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)
        new_bytes += plan.costs.staging_bytes
    elif described.settings.offload_device == "none":
        new_bytes += Uploads.missing_bytes(max(MIN_DEVICE_THREADS, num_threads))

    def needed(*, is_mapped: bool) -> int:
        return max(0, new_bytes + (0 if is_mapped else need.untouched) - free_heap_bytes(is_mapped=is_mapped))

    return [Use(room.place, room.pool, needed(is_mapped=room.is_mapped), room.free_bytes) for room in rooms(rank)]


_TEXTS: Mapping[type[LowMemLoadError], tuple[str, str]] = {
    ConfigError: (
        "offload_param.nvme_path: its file system is too full",
        "Free space, or name another folder; nothing has been read yet",
    ),
    MemoryShortageError: (
        "does not fit into host memory",
        "Use more nodes or fewer ranks on each, offload_param to nvme (there already: a smaller buffer_size), end "
        "other processes, or raise the limit; nothing has been allocated or read yet",
    ),
}
"""What is too small, and what to do, by the error for it."""


def check_room(name: str, uses: Sequence[Sequence[Sequence[Any]]], error: type[LowMemLoadError]) -> None:
    """Raise an error that names all that is too small, unless what the ranks need together is free everywhere.

    `uses` has those of each rank. The error is a ConfigError for disks, and a MemoryShortageError for memory.
    """
    problems = []
    for needed, free, shared in _pools(uses):
        if needed > free:
            ranks = spell_ranks(sorted({rank for rank, _ in shared}))
            problems.append(f"rank(s) {ranks} need {size(needed)}, and {size(free)} are free ({shared[0][1].place})")
    if problems:
        what, advice = _TEXTS[error]
        raise error(f"{name}: {what}: {'; '.join(problems)}. {advice}")


def has_room_for_cache(uses: Sequence[Sequence[Sequence[Any]]], read_bytes: int, file_bytes: int) -> bool:
    """Return whether there is room for the page cache, too, if each rank reads so many bytes of files of this size."""
    return all(needed + min(file_bytes, len(shared) * read_bytes) <= free for needed, free, shared in _pools(uses))


def _pools(uses: Sequence[Sequence[Sequence[Any]]]) -> Iterator[tuple[int, int, list[tuple[int, Use]]]]:
    """Yield for each pool what is needed and what is free, bytes, and its uses with their ranks."""
    pools: dict[str, list[tuple[int, Use]]] = {}
    for rank, of_rank in enumerate(uses):
        for use in (Use(*values) for values in of_rank):  # one that came from another rank is a list
            pools.setdefault(use.pool, []).append((rank, use))
    for shared in pools.values():
        yield sum(use.needed_bytes for _, use in shared), min(use.free_bytes for _, use in shared), shared


# -- the same files: see [Note: the sample] ----------------------------------------------------------------------------


def identify_files(files: Sequence[PlannedFile]) -> str:
    """Return a digest of files that this rank has planned against. Ranks share it if they opened the very same ones."""
    ordered = in_common_order(files)
    # The version of a file in a remote store says which bytes it has, on any machine.
    place = [] if ordered and all(is_stand_in(file.path) for file in ordered) else [machine()]
    return fingerprint([*place, *(f"{origin(file.path)} {file.version}" for file in ordered)])


def agree_on_bytes(
    ranks: RankGroup, name: str, files: Sequence[PlannedFile], sources: OpenSources, ids: Sequence[str]
) -> None:
    """Raise CheckpointError on all ranks if a sample of their files differs; see [Note: the sample].

    The ranks have agreed on names, sizes and headers. `ids` has what `identify_files` returned on each rank, and one
    rank for each id reads the sample. Collective: one step; none where all opened the very same files.
    """
    first: dict[str, int] = {}
    readers = [first.setdefault(digest, rank) for rank, digest in enumerate(ids)]  # for each rank
    if len(first) == 1:
        return
    ordered, num_sampled = in_common_order(files), 0

    def on_block() -> None:
        nonlocal num_sampled
        num_sampled += 1
        ranks.check()

    def progress() -> Progress:
        return Progress(num_sampled, f"{num_sampled} blocks compared")

    with ranks.step("comparing the files of the ranks", name=name, progress=progress) as step:
        if readers[ranks.rank] == ranks.rank:
            digests = sample_digests(ordered, ids[0], sources, on_block)
            step.payload = [(file.path, digest) for file, digest in zip(ordered, digests, strict=True)]
    check_same([step.payloads[reader] for reader in readers])


def check_same(samples: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise CheckpointError, which names the first file that differs and the ranks, unless all samples are equal.

    That of each rank has path and digest of each file, in one order for all ranks.
    """
    for of_file in zip(*samples, strict=True):
        versions: dict[str, list[int]] = {}
        for rank, (_, digest) in enumerate(of_file):
            versions.setdefault(digest, []).append(rank)
        if len(versions) > 1:
            found = "; ".join(f"rank(s) {spell_ranks(alike)}: {of_file[alike[0]][0]}" for alike in versions.values())
            raise CheckpointError(
                f"{of_file[0][0].rpartition('/')[2]}: the ranks have {len(versions)} different files of this name, so "
                f"the model would be a mixture: {found}. Give all ranks the same checkpoint and revision"
            )


def sample_offsets(files: Sequence[PlannedFile], seed: str) -> list[list[int]]:
    """Return the ascending offsets of the blocks of each file. `files` and `seed` are the same on all ranks."""
    draw = random.Random(seed)
    most = max(MIN_BLOCKS, min(MAX_BLOCKS, MAX_BLOCKS_IN_ALL // max(1, len(files))))
    offsets_by_file = []
    for file in files:
        num_blocks = max(1, min(most, file.nbytes // BLOCK_BYTES))
        stratum = file.nbytes / num_blocks
        longest_shift = max(0, int(stratum) - BLOCK_BYTES)
        offsets_by_file.append([int(n * stratum) + draw.randint(0, longest_shift) for n in range(num_blocks)])
    return offsets_by_file


def sample_digests(
    files: Sequence[PlannedFile], seed: str, sources: OpenSources, on_block: Callable[[], object] = no_callback
) -> list[str]:
    """Return a digest of the sampled blocks of each file.

    Raises CheckpointError if a file cannot be read, or has changed since its header was read.
    """

    def digest(file: PlannedFile, offsets: Sequence[int]) -> str:
        source, hasher = sources.opened(file.path), hashlib.blake2b(digest_size=16)
        for offset in offsets:
            hasher.update(read_bytes(source, offset, BLOCK_BYTES))
            on_block()
        return hasher.hexdigest()

    sources.expect(files)
    with ThreadPoolExecutor(SAMPLE_THREADS, "lowmem_load-sample") as pool:
        return list(pool.map(digest, files, sample_offsets(files, seed)))
