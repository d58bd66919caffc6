"""What the ranks of a node will read together, read off their plans. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_load.planning.cooperative import node_schedule, reads_of, shared_steps, touched_bytes, wanted
from lowmem_load.planning.load_plan import LoadPlan


@dataclass(frozen=True, slots=True)
class NodeReads:
    """What the ranks of one node read together. Bytes.

    Attributes:
        num_ranks: of the node, that take part.
        alone_bytes: that they would read of it if each read alone.
        shared_bytes: that they read of it instead.
        alone_block_bytes, shared_block_bytes: of the blocks that these touch, where the file system reads blocks whole,
            each counted as often as it is read; else the same.
    """

    num_ranks: int
    alone_bytes: int
    shared_bytes: int
    alone_block_bytes: int
    shared_block_bytes: int


def node_reads(plans: Sequence[LoadPlan]) -> NodeReads | None:
    """Return what ranks will read together; None where each reads alone.

    Args:
        plans: of the ranks of one node.
    """
    chosen = [shared_steps(plan) for plan in plans]
    ranges = [wanted(read for step in steps for read in reads_of(step)) for steps in chosen if steps]
    if len(ranges) < 2:
        return None
    block_bytes = max(plan.read_cost.block_bytes for plan in plans)
    found = node_schedule(ranges, block_bytes)
    if found is None:
        return None
    alone_block_bytes = sum(touched_bytes(each, block_bytes) for each in ranges)
    return NodeReads(
        *(found.num_ranks, found.wanted_bytes, found.read_bytes),
        *(alone_block_bytes, found.touched_bytes(block_bytes)),
    )
