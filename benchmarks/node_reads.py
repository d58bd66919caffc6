"""What the ranks of a node read, each alone and together: simulated from their plans, in one process."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowmem_load.planning.cooperative import Sharing, Wanted, merged, reads_of, schedule, shared_steps, wanted
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.reads import Step

PAGE_BYTES = 1 << 12
BLOCK_BYTES = 1 << 20

NODE_COLUMNS = (
    "model", "ranks/world", "how", "reads", "median", "read/needed", "pages", "blocks of ranks", "blocks of node",
    "exchanged", "rounds",
)  # fmt: skip

NODE_DEFINITIONS = """\
Simulated: the plans of neighbouring ranks of one world, taken for those of one node, from sparse checkpoints.
how        alone: each rank as its plan says; together: what `planning/cooperative.py` chooses is read in bands.
reads      of the rank with the most of them; median: bytes of a read, of all ranks. read/needed: of all ranks.
pages      of 4 KiB that each rank touches, over the needed bytes of all ranks; blocks of ranks: the same of 1 MiB, as
           a file system sees them that keeps nothing between ranks; blocks of node: each counted once.
exchanged  MiB that ranks take from others, all of them; rounds: in which they wait for each other."""


class Span(NamedTuple):
    """Bytes of a file that one read fetches."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class NodeReads:
    """What the ranks of a node read; bytes.

    Attributes:
        how: "alone" or "together".
        needed_bytes: of all ranks; their partitions do not overlap.
        reads: sizes of the reads of each rank.
        pages, blocks: touched by each rank, all of them together.
        node_blocks: touched by any rank.
        exchanged_bytes: taken from windows of others, if each holds an equal share of what a rank needs.
        num_rounds: of reading together.
    """

    how: str
    needed_bytes: int
    reads: Sequence[Sequence[int]]
    pages: int
    blocks: int
    node_blocks: int
    exchanged_bytes: int = 0
    num_rounds: int = 0

    def cells(self) -> list[str]:
        """Return a row of the table, without the model and its ranks."""
        sizes = [size for of_rank in self.reads for size in of_rank]
        return [
            self.how,
            f"{max(map(len, self.reads)):,}",
            f"{statistics.median(sizes):,.0f}",
            f"{sum(sizes) / self.needed_bytes:.4f}",
            f"{self.pages * PAGE_BYTES / self.needed_bytes:.3f}",
            f"{self.blocks * BLOCK_BYTES / self.needed_bytes:.2f}",
            f"{self.node_blocks * BLOCK_BYTES / self.needed_bytes:.2f}",
            f"{self.exchanged_bytes / 2**20:.0f}",
            f"{self.num_rounds}",
        ]


@dataclass(frozen=True, slots=True)
class RankReads:
    """What is kept of a plan: spans that its rank reads alone, those it does not share, and what it wants of others."""

    needed_bytes: int
    alone: list[Span]
    unshared: list[Span]
    wanted: list[Wanted]
    shared_needed_bytes: int


def rank_reads(plan: LoadPlan, sharing: Sharing) -> RankReads:
    """Return what a rank reads."""
    steps = [step for target in plan.targets for fill in target.fills for step in fill.steps]
    steps += [step for buffer in plan.buffers if buffer.fill is not None for step in buffer.fill.steps]
    chosen = shared_steps(plan, sharing)
    shared = {id(step) for step in chosen}
    reads = [read for step in chosen for read in reads_of(step)]
    return RankReads(
        plan.needed_bytes,
        _spans(steps),
        _spans(step for step in steps if id(step) not in shared),
        wanted(reads),
        sum(read.needed_bytes_each * read.num_reads for read in reads),
    )


def node_reads(ranks: Sequence[RankReads], block_bytes: int = PAGE_BYTES) -> list[NodeReads]:
    """Return what the ranks of a node read alone, and together."""
    needed = sum(rank.needed_bytes for rank in ranks)
    found = [_counted("alone", needed, [rank.alone for rank in ranks])]
    if any(rank.wanted for rank in ranks):
        plan = schedule([rank.wanted for rank in ranks], block_bytes)
        spans = [list(rank.unshared) for rank in ranks]
        for number, band in enumerate(plan.bands):
            spans[number % len(ranks)] += [Span(part.path, part.start, part.end) for part, _ in band]
        shared = sum(rank.shared_needed_bytes for rank in ranks)
        exchanged = shared * (len(ranks) - 1) // len(ranks)
        found.append(_counted("together", needed, spans, exchanged, plan.num_rounds))
    return found


def _spans(steps: Iterable[Step]) -> list[Span]:
    found = []
    for read in (read for step in steps for read in reads_of(step)):
        size = read.tensor.dtype.itemsize
        for first, _ in read.each():
            start = read.tensor.start + first * size
            found.append(Span(read.tensor.path, start, start + read.numel * size))
    return found


def _counted(
    how: str, needed: int, spans: Sequence[Sequence[Span]], exchanged_bytes: int = 0, num_rounds: int = 0
) -> NodeReads:
    return NodeReads(
        how,
        needed,
        [[span.end - span.start for span in of_rank] for of_rank in spans],
        sum(_touched(of_rank, PAGE_BYTES) for of_rank in spans),
        sum(_touched(of_rank, BLOCK_BYTES) for of_rank in spans),
        _touched(itertools.chain.from_iterable(spans), BLOCK_BYTES),
        exchanged_bytes,
        num_rounds,
    )


def _touched(spans: Iterable[Span], block_bytes: int) -> int:
    """Return how many blocks of files some spans touch, each once."""
    blocks = (Wanted(span.path, 0, 1, span.start // block_bytes, (span.end - 1) // block_bytes + 1) for span in spans)
    return sum(each.end - each.start for each in merged(blocks))
