"""Before reading: finds the ranks of the node that share reads, and opens the memory that they share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lowmem_load.distributed.nodes import Nodes, make_memory, memory_of, new_name
from lowmem_load.errors import ConfigError
from lowmem_load.pipeline.make_plan import Planned

if TYPE_CHECKING:  # most loads share no reads
    from lowmem_load.io.shared_reads import SharedReads

SHARE_READS = "LOWMEM_LOAD_SHARE_READS"
"""Environment variable. "off": each rank reads alone. "auto": the ranks of a node read together."""

ALONE = "no other rank of this node has reads to share"

Place = tuple[int, int, str]
"""Where other processes find shared memory: process, its descriptor, name."""


def shares_reads() -> bool:
    """Return whether the ranks of a node may read together."""
    text = os.environ.get(SHARE_READS) or "auto"
    if text not in ("auto", "off"):
        raise ConfigError(f"{SHARE_READS}: the environment has {text!r}, expected auto or off")
    return text == "auto"


class ReadSharing:
    """This rank's part of the shared memory of its node, if it has reads to share. Close it after the load."""

    def __init__(self) -> None:
        self.offer: Place | None = None  # where other ranks find that part; None if this rank shares no reads
        self.why_alone = ""  # why this rank reads alone although it has reads to share; "" if it does not

    def make(self) -> None:
        """Make the part, before the ranks exchange their offers."""
        from lowmem_load.io.shared_reads import SharedBuffer

        name = new_name()
        try:
            self.offer = os.getpid(), make_memory(name, SharedBuffer.NBYTES), name
        except OSError as error:
            self.why_alone = f"{SharedBuffer.NBYTES} bytes of shared memory cannot be made: {error.strerror}"

    def close(self) -> None:
        """Close the part. Ranks that have opened it keep it."""
        if self.offer is not None:
            os.close(self.offer[1])
            self.offer = None

    def meet(
        self, nodes: Nodes, offers: Sequence[Place | None], planned: Planned, check: Callable[[], None]
    ) -> SharedReads | None:
        """Return what carries out the shared steps of a plan; None if this rank reads alone.

        `offers` has that of each rank. `check` raises if another rank has failed.
        """
        if self.offer is None:
            return None
        from lowmem_load.io.shared_reads import SharedBuffer, SharedReads, decline

        places = {rank: place for rank in nodes.neighbours if (place := offers[rank]) is not None}
        if len(places) == 1:
            self.why_alone = ALONE
            return None
        position = list(places).index(nodes.rank)
        memories: list[mmap.mmap] = []
        for rank, place in places.items():
            try:
                memories.append(memory_of(*place, SharedBuffer.NBYTES))
            except (OSError, ValueError) as error:
                self.why_alone = (
                    f"rank {nodes.rank} cannot open the shared memory of rank {rank}, process {place[0]}: {error}"
                )
                decline(SharedBuffer([memory_of(*self.offer, SharedBuffer.NBYTES)], 0), self.why_alone)
                return None
        buffer = SharedBuffer(memories, position)
        return SharedReads(planned.shared, buffer, planned.plan.read_cost.block_bytes, check=check)
