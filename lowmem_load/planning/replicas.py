"""Decides which rank reads what of the memory that several ranks fill alike, for all of them. Pure: data in, data out.

[Note: read once] Ranks that own the same elements of a parameter are its replicas: under HSDP, under ZeRO stages 0 to
2, and where a module is not partitioned. Each of them knows all of them by rule, and plans the same fill. The fill is
cut into pieces of contiguous memory. Each replica reads near-equal bytes of all that it shares with the same ranks,
complete pieces in the order of the files, and sends them. They are read and sent in batches, straight from and into the
memory where they stay. So the ranks must agree on pieces and batches, which their digests tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.nest import Axis, Nest, extent
from lowmem_load.planning.reads import Apply, Fill, Read, ReadCost, Step
from lowmem_load.text import fingerprint

ShareReads = Literal["auto", "job", "off"]
"""Which ranks share reads: see `load_model`."""

PIECE_BYTES = 16 << 20
"""Bytes up to which pieces are joined, and to which larger runs are cut: as requests to a store."""

BATCH_BYTES, MAX_BATCHES = 32 << 20, 64
"""Bytes after which a batch of a rank ends, unless there would be more batches: all ranks agree after each."""

MAX_READERS = 64
"""Ranks that read once for each other. More replicas form several such sets: each rank connects to all of its set."""

LEAST_BYTES = 64 << 20
"""Bytes that ranks read once by "auto". For fewer (norms) a group and its connections cost more than they save."""


class Piece(NamedTuple):
    """Contiguous memory of a destination of a plan, by their numbers, and the steps that fill it."""

    target: int
    destination: int
    first: int  # element
    numel: int
    nbytes: int
    read_bytes: int
    fill: Fill  # of the full destination, with these steps only


@dataclass(frozen=True, slots=True)
class Replicas:
    """What some ranks read once for all of them. Equal on all of them.

    Attributes:
        ranks: that own all of it.
        batches: of each rank, by its place among `ranks`.
        digest: of who reads and sends what, and when.
    """

    ranks: Sequence[int]
    batches: tuple[tuple[tuple[Piece, ...], ...], ...]
    digest: str

    @property
    def num_batches(self) -> int:
        """The most that one of the ranks reads."""
        return max(map(len, self.batches))

    @property
    def places(self) -> range:
        """The places of the ranks."""
        return range(len(self.ranks))

    @property
    def pieces(self) -> Iterator[Piece]:
        """All pieces, of each rank those that it reads."""
        return (piece for of_rank in self.batches for batch in of_rank for piece in batch)

    def batch(self, number: int, place: int) -> tuple[Piece, ...]:
        """Return what the rank at `place` reads and sends in a batch; nothing once it has no more."""
        return self.batches[place][number] if number < len(self.batches[place]) else ()


def chooser(
    share: ShareReads, cost: ReadCost, nodes: Sequence[str], *, on_host: bool
) -> Callable[[Sequence[int]], bool]:
    """Return what says of ranks that own the same whether one reads it for all; `nodes` has the node of each rank.

    By "auto", they do if the files are in a store, or on a network file system of which several nodes would read them:
    the ranks of one node find in its page cache what one of them has read. What goes to a device is sent through the
    host, which was never measured, so each rank reads it alone.
    """

    def reads_once(ranks: Sequence[int]) -> bool:
        if len(ranks) < 2 or share == "off":
            return False
        is_apart = cost.block_bytes > 1 and len({nodes[rank] for rank in ranks}) > 1
        return share == "job" or (on_host and (cost.request_bytes > 0 or is_apart))

    return reads_once


def once_bytes(plan: LoadPlan) -> int:
    """Return what a rank reads if all ranks that own the same read it once."""
    shared = [
        (sum(map(_read_bytes, destination.fill.steps)), len(_readers(plan.rank, destination.holders)))
        for target in plan.targets
        for destination in target.destinations
        if destination.fill is not None and destination.holders and not destination.fill.needs
    ]
    return plan.costs.read_bytes - sum(nbytes - nbytes // num_ranks for nbytes, num_ranks in shared)


def plan_replicas(plan: LoadPlan, reads_once: Callable[[Sequence[int]], bool], least_bytes: int = 0) -> list[Replicas]:
    """Return what this rank reads once with others, in an order that is the same on all ranks.

    `least_bytes`: that ranks must have in common, of memory.
    """
    pieces: dict[tuple[int, ...], list[Piece]] = {}
    for number, target in enumerate(plan.targets):
        for place, destination in enumerate(target.destinations):
            fill, ranks = destination.fill, _readers(plan.rank, destination.holders)
            if fill is not None and fill.numel and not fill.needs and reads_once(ranks):
                pieces.setdefault(tuple(ranks), []).extend(_pieces(number, place, fill))
    enough = [ranks for ranks, shared in pieces.items() if sum(piece.nbytes for piece in shared) >= least_bytes]
    return [_shared_out(plan, ranks, pieces[ranks]) for ranks in sorted(enough)]


def _readers(rank: int, holders: Sequence[int]) -> Sequence[int]:
    """Return the ranks that read once with this one, of all that own the same: near-equal sets of neighbors."""
    num_sets = max(1, -(-len(holders) // MAX_READERS))
    ends = [len(holders) * number // num_sets for number in range(num_sets + 1)]
    sets = (holders[first:end] for first, end in itertools.pairwise(ends))
    return next((readers for readers in sets if rank in readers), ())


def _shared_out(plan: LoadPlan, ranks: Sequence[int], pieces: Sequence[Piece]) -> Replicas:
    total, done = max(1, sum(piece.read_bytes for piece in pieces)), 0
    batches: list[list[list[Piece]]] = [[] for _ in ranks]
    most = max(BATCH_BYTES, sum(piece.nbytes for piece in pieces) // (len(ranks) * MAX_BATCHES))
    nbytes, lines = [most] * len(ranks), [f"{tuple(ranks)}"]
    for piece in pieces:
        reader = min(len(ranks) - 1, (2 * done + piece.read_bytes) * len(ranks) // (2 * total))
        if nbytes[reader] >= most:
            batches[reader].append([])
            nbytes[reader] = 0
        batches[reader][-1].append(piece)
        nbytes[reader] += piece.nbytes
        done += piece.read_bytes
        target = plan.targets[piece.target]
        place = f"{target.name} {target.destinations[piece.destination].region} {piece.first} {piece.numel}"
        lines.append(f"{place} {target.dtype} {reader} {len(batches[reader])}")
    frozen = tuple(tuple(map(tuple, of_rank)) for of_rank in batches)
    return Replicas(ranks, frozen, fingerprint(lines))


def _pieces(target: int, destination: int, fill: Fill) -> Iterator[Piece]:
    """Yield a fill in pieces: steps that write between each other belong to one, and neighbors while they are small.

    Each element is written by one step, so pieces have no gaps between them.
    """
    itemsize, steps, start, end = fill.dtype.itemsize, list[Step](), 0, 0

    def piece() -> Piece:
        part = replace(fill, steps=tuple(steps))
        numel = end - start
        return Piece(target, destination, start, numel, numel * itemsize, sum(map(_read_bytes, steps)), part)

    parts = sorted((part for step in fill.steps for part in _parts(step, itemsize)), key=lambda part: part[:2])
    for first, last, step in parts:
        if first >= end and steps and (last - start) * itemsize > PIECE_BYTES:
            yield piece()
            steps, start = [], end
        steps.append(step)
        end = max(end, last)
    yield piece()


def _parts(step: Step, itemsize: int) -> Iterator[tuple[int, int, Step]]:
    """Yield a step in parts, with the first and the last element between which each writes."""
    if isinstance(step, Apply):
        for piece in step.pieces:
            first, part = piece.nest.destination, step._replace(pieces=(piece,))
            yield first, first + extent(piece.nest.axes, "destination"), part
    elif isinstance(step, Read):
        for read in _cut(step, itemsize):
            first = read.nest.destination
            yield first, first + extent((*read.outer, *read.nest.axes), "destination"), read


def _cut(read: Read, itemsize: int) -> Iterator[Read]:
    """Yield reads of at most `PIECE_BYTES` that are together one run, or the read itself where it is not one run."""
    if read.outer or not read.nest.is_run or read.numel != read.nest.numel:
        yield read
        return
    step = PIECE_BYTES // itemsize
    for first in range(0, read.numel, step):
        numel = min(step, read.numel - first)
        nest = Nest(0, read.nest.destination + first, (Axis(numel, 1, 1),), read.nest.casts)
        yield replace(read, first=read.first + first, numel=numel, nest=nest)


def _read_bytes(step: Step) -> int:
    if isinstance(step, Read):
        return step.read_bytes
    if isinstance(step, Apply):
        inputs = (fill for piece in step.pieces for fill in piece.inputs)
        return sum(_read_bytes(inner) for fill in inputs for inner in fill.steps)
    return 0
