"""Proves, between planning and reading, that all ranks read the same bytes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.distributed.nodes import machine
from lowmem_load.distributed.verdict import spell_ranks
from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.formats.format import CheckpointFile
from lowmem_load.io.open_sources import OpenSources
from lowmem_load.planning.expression import Source, numel
from lowmem_load.planning.load_plan import PlannedFile, in_common_order

if TYPE_CHECKING:
    from lowmem_load.io.sample import Span


class View(NamedTuple):
    """What ranks that opened the very same files found, by file, in one order for all views.

    Attributes:
        digests: of the sample of each file.
        blobs: names of the files in the Hub's cache, which are digests of all their bytes; None elsewhere.
    """

    ranks: Sequence[int]
    digests: Sequence[str]
    blobs: Sequence[str | None]
    paths: Sequence[str]


Opened = tuple[str, int]
"""A digest that ranks with the very same files share; and a random number, of which rank 0's counts."""


def opened(files: Sequence[PlannedFile]) -> Opened:
    """Return what other ranks must know of the files that this one has planned against."""
    ordered = in_common_order(files)
    return fingerprint([machine(), *(f"{file.path} {file.version}" for file in ordered)]), secrets.randbits(64)


def agree_on_bytes(
    ranks: RankGroup,
    name: str,
    files: Sequence[PlannedFile],
    small_of: Callable[[PlannedFile], Sequence[Span]],
    sources: OpenSources,
    seen: Sequence[Opened],
    *,
    num_threads: int,
) -> list[str]:
    """Raise on all ranks unless their files hold the same bytes; see [Note: the sample] in `io/sample.py`.

    The ranks have agreed on names, sizes and headers of the files. `seen` has `opened(files)` of each rank, `small_of`
    returns the small tensors of a file. Collective: one step, none where all have opened the very same files.

    Returns:
        By rank, a digest that those with the very same files share.
    """
    seen_by = [theirs for theirs, _ in seen]
    first_of = {theirs: seen_by.index(theirs) for theirs in dict.fromkeys(seen_by)}
    if len(first_of) == 1:
        return seen_by
    from lowmem_load.io.checksums import name_of_blob
    from lowmem_load.io.sample import sample_digests

    ordered, sampled_blocks = in_common_order(files), [0]

    def on_block() -> None:
        sampled_blocks[0] += 1
        ranks.check()

    def progress() -> Progress:
        return Progress(sampled_blocks[0], f"{sampled_blocks[0]} blocks compared")

    blobs, paths = [name_of_blob(file.path) for file in ordered], [file.path for file in ordered]
    with ranks.step("comparing the files of the ranks", name=name, progress=progress) as step:
        if first_of[seen_by[ranks.rank]] == ranks.rank:
            small = list(map(small_of, ordered))
            digests = sample_digests(ordered, small, seen[0][1], sources, on_block, num_threads=num_threads)
            step.payload = digests, blobs, paths
    compare(
        [
            View([rank for rank, other in enumerate(seen_by) if other == theirs], *step.payloads[first])
            for theirs, first in first_of.items()
        ]
    )
    return seen_by


def small_tensors(file: CheckpointFile) -> list[Span]:
    """Return where the tensors that are compared whole lie in a file, in its order."""
    from lowmem_load.io.sample import SMALL_BYTES

    found = []
    for name in file.names:
        with contextlib.suppress(UnsupportedError):  # torch has no dtype for it, so no model uses it
            tensor = file.expression(name)
            if isinstance(tensor, Source) and 0 < (nbytes := numel(tensor) * tensor.dtype.itemsize) <= SMALL_BYTES:
                found.append((tensor.start, nbytes))
    return found


def compare(views: Sequence[View]) -> None:
    """Raise CheckpointError, which names the first file that differs and the ranks, unless all hold the same."""
    for number, path in enumerate(views[0].paths):
        sampled: dict[str, list[View]] = {}
        named: dict[str, list[View]] = {}
        for view in views:
            sampled.setdefault(view.digests[number], []).append(view)
            blob = view.blobs[number]
            if blob is not None:
                named.setdefault(blob, []).append(view)
        held = max(sampled, named, key=len)
        if len(held) > 1:
            groups = [
                f"rank(s) {spell_ranks(sorted(rank for view in alike for rank in view.ranks))}: "
                f"{alike[0].paths[number]}"
                for alike in held.values()
            ]
            raise CheckpointError(
                f"{path.rpartition('/')[2]}: the ranks hold {len(held)} different files of this name, so the "
                f"model would be a mixture: {'; '.join(groups)}. Give all ranks the same checkpoint and revision"
            )
