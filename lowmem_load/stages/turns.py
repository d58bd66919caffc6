"""A limit on how many ranks read at a time: they take turns.

[Note: turns] The exchange that ends reading is done once for each turn, by all ranks: those whose turn it is come to it
when they have read, the others at once. So one that waits is waited for like any that has done its step, and a rank
that fails or ends in its turn ends the load of all there, also of those whose turn has not come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowmem_load.ranks.group import RankGroup
from lowmem_load.report import LoadReport

READING = "reading"
"""The step that fills the memory; the ranks agree on it once for each turn."""


def turn_of(rank: int, world_size: int, readers: int) -> tuple[int, int]:
    """Return the turn of a rank, from 0 on, and how many there are; neighbours, and so ranks of a node, get others.

    Args:
        rank: in the group that loads.
        world_size: of it.
        readers: ranks that read at a time, at most; 0 for all.
    """
    num_turns = -(-world_size // readers) if readers else 1
    return rank % num_turns, num_turns


@contextlib.contextmanager
def turn(ranks: RankGroup, report: LoadReport) -> Iterator[None]:
    """Enter the block, which agrees on `READING` once, when it is this rank's turn; leave when all have had theirs.

    Collective: one exchange for each turn but the rank's own, which is that of the block; none without a limit.

    Args:
        ranks: that load together.
        report: says how many read at a time; takes the seconds of waiting, as phase "turn".

    Raises:
        RankError: a rank has failed in its turn, or is lost.
    """
    mine, num_turns = turn_of(ranks.rank, ranks.world_size, report.readers)
    if num_turns > 1:
        with report.phase("turn"):
            for _ in range(mine):
                ranks.agree(READING, None, name=report.name)
    yield
    for _ in range(mine + 1, num_turns):
        ranks.agree(READING, None, name=report.name)
