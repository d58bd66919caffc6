"""Before reading: whether the ranks of a node read together, and the shared memory for it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.nodes import Nodes
from lowmem_load.distributed.shared_memory import make_memory, memory_of, new_name
from lowmem_load.errors import ConfigError
from lowmem_load.io.shared_reads import SharedReads
from lowmem_load.io.windows import Windows
from lowmem_load.pipeline.make_plan import Planned
from lowmem_load.planning.cooperative import WINDOW_BYTES

SHARE_READS = "LOWMEM_LOAD_SHARE_READS"
"""Variable of the environment: "off" has each rank read alone, "auto" has ranks of a node read together."""

ALONE = "no other rank of this node has reads to share"
LITTLE_SPARED = "the ranks of this node would read little less together"


def shares_reads() -> bool:
    """Return whether the ranks of a node may read together.

    Raises:
        ConfigError: the variable of the environment holds something else than auto or off.
    """
    text = os.environ.get(SHARE_READS) or "auto"
    if text not in ("auto", "off"):
        raise ConfigError(f"{SHARE_READS}: the environment has {text!r}, expected auto or off")
    return text == "auto"


def sharing_ranks(nodes: Nodes, offers: Sequence[bool]) -> dict[str, list[int]]:
    """Return the ranks that read together by node: those with reads to share, where there are at least two.

    Args:
        nodes: that the ranks run on.
        offers: by rank, whether it has reads to share.
    """
    found: dict[str, list[int]] = {}
    for rank, has_reads in enumerate(offers):
        if has_reads:
            found.setdefault(nodes.names[rank], []).append(rank)
    return {node: members for node, members in found.items() if len(members) > 1}


def shared_reads(
    ranks: RankGroup, nodes: Nodes, offers: Sequence[bool], planned: Planned
) -> tuple[SharedReads | None, str]:
    """Return what carries out shared steps, and else why there is nothing: "" where this rank has no such steps.

    Collective: see `shared_windows`.

    Args:
        ranks: that load together.
        nodes: that they run on.
        offers: by rank, whether it has steps to share.
        planned: has this rank's steps.
    """
    windows, why = shared_windows(ranks, nodes, offers)
    if windows is None:
        return None, why
    return SharedReads(planned.shared, windows, planned.plan.read_cost.block_bytes, check=ranks.check), ""


def shared_windows(ranks: RankGroup, nodes: Nodes, offers: Sequence[bool]) -> tuple[Windows | None, str]:
    """Return the windows of this rank's node, and else why there are none; "" where this rank has nothing to share.

    Collective: two steps, for the memory of the first rank of each node and for whether it could be opened; none where
    no node has two ranks with reads to share.
    """
    together = sharing_ranks(nodes, offers)
    alone = ALONE if offers[ranks.rank] else ""
    if not together:
        return None, alone
    mine = together.get(nodes.names[ranks.rank], [])
    if ranks.rank not in mine:
        mine = []
    made, memory, trouble, name = -1, None, "", new_name()
    nbytes = Windows.nbytes_of(len(mine), WINDOW_BYTES)
    try:
        with ranks.step("sharing memory") as making:
            if mine and mine[0] == ranks.rank:
                made, trouble = _made(name, nbytes)
                making.payload = None if made < 0 else (os.getpid(), made, name)
        with ranks.step("opening the shared memory") as opening:
            if mine and (place := making.payloads[mine[0]]) is not None:
                pid, descriptor, name = place
                memory, trouble = _opened(pid, descriptor, name, nbytes)
            opening.payload = trouble
    finally:
        if made >= 0:
            os.close(made)  # whoever has opened it keeps it
    troubles = opening.payloads
    found = next((f"rank {rank}: {troubles[rank]}" for rank in mine if troubles[rank]), "")
    if memory is None or found:
        return None, found or alone
    return Windows(memory, mine.index(ranks.rank), len(mine), WINDOW_BYTES), ""


def _made(name: str, nbytes: int) -> tuple[int, str]:
    try:
        return make_memory(name, nbytes), ""
    except OSError as error:
        return -1, f"no shared memory of {nbytes} bytes can be made: {error.strerror}"


def _opened(pid: int, descriptor: int, name: str, nbytes: int) -> tuple[mmap.mmap | None, str]:
    try:
        return memory_of(pid, descriptor, name, nbytes), ""
    except (OSError, ValueError) as error:
        return None, f"the shared memory of process {pid} cannot be opened: {error}"
