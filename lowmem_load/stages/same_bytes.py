"""Between planning and reading: all ranks prove that they read the same bytes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from lowmem_load.errors import CheckpointError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.integrity.checksums import name_of_blob
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.ranks.group import RankGroup, spell_ranks
from lowmem_load.ranks.life import Progress, machine
from lowmem_load.read.open_sources import OpenSources
from lowmem_load.read.sample import sample_digests


def agree_on_bytes(
    ranks: RankGroup, name: str, files: Sequence[PlannedFile], sources: OpenSources, *, num_threads: int
) -> list[str]:
    """Raise on all ranks unless their files hold the same bytes; see [Note: the sample] in `planning/sample.py`.

    Ranks of one machine that opened the very same files count as one, and one machine needs no sample.

    Collective: one small exchange, and where the files are not the very same two more.

    Args:
        ranks: that load together, and have agreed on names, sizes and headers of the files.
        name: what is loaded.
        files: that were planned against.
        sources: which their headers were read from.
        num_threads: files read at a time.

    Returns:
        By rank, what is equal for those that opened the very same files.

    Raises:
        CheckpointError: names the first file that differs, and which ranks hold which.
        RankError: a rank cannot read its files.
    """
    ordered = sorted(files, key=lambda file: (file.path.rpartition("/")[2], file.digest))
    seen = fingerprint([machine(), *(f"{file.path} {file.version}" for file in ordered)])
    gathered = ranks.all_gather_object((seen, secrets.randbits(64)))
    views = [view for view, _ in gathered]
    first_of = {view: views.index(view) for view in dict.fromkeys(views)}
    if len(first_of) == 1:
        return views
    sampled_blocks = [0]

    def on_block() -> None:
        sampled_blocks[0] += 1
        ranks.stop_if_troubled()

    def progress() -> Progress:
        return Progress(sampled_blocks[0], f"{sampled_blocks[0]} blocks compared")

    with ranks.agreed("comparing the files of the ranks", name=name, progress=progress):
        digests = None
        if first_of[seen] == ranks.rank:
            digests = sample_digests(ordered, gathered[0][1], sources, on_block, num_threads=num_threads)
    blobs = [name_of_blob(file.path) for file in ordered]
    gathered_files = ranks.all_gather_object((digests, blobs, [file.path for file in ordered]))
    for number, file in enumerate(ordered):
        sampled: dict[str, list[int]] = {}
        named: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            of_view, blobs, _ = gathered_files[first_of[view]]
            assert of_view is not None
            sampled.setdefault(of_view[number], []).append(rank)
            blob = blobs[number]
            if blob is not None:  # the digest of all its bytes, which the cache of the Hub has
                named.setdefault(blob, []).append(rank)
        holders = max(sampled, named, key=len)
        if len(holders) > 1:
            groups = [f"rank(s) {spell_ranks(held)}: {gathered_files[held[0]][2][number]}" for held in holders.values()]
            raise CheckpointError(
                f"{file.path.rpartition('/')[2]}: the ranks hold {len(holders)} different files of this name, so the "
                f"model would be a mixture: {'; '.join(groups)}. Give all ranks the same checkpoint and revision"
            )
    return views
