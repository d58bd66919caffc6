"""Which reads the ranks of a node do together, and who reads what of them. Pure: plain data in, plain data out.

[Note: cooperative reading] Where a conversion transposes, the partitions of neighbouring ranks are interleaved in the
file: each rank alone reads along, or leaves out, what the others need. So they read the union of it once, in rounds. In
a round each rank reads one band, some MiB that lie together, into memory that all of them share; then each takes what
it needs from all bands. This is two-phase collective I/O as ROMIO does it, with shared memory in place of messages.
Every rank makes the same schedule from what all of them want.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lowmem_load.planning.load_plan import HeldValue, LoadPlan, Value
from lowmem_load.planning.nest import Nest, extent
from lowmem_load.planning.reads import Apply, Move, Piece, Read, ReadCost, Step

WINDOW_BYTES = 4 << 20
"""Of the memory that a rank shares: two bands, of which one is filled while the other is taken from."""

BAND_BYTES = WINDOW_BYTES // 2

MAX_OPEN_BYTES = 16 << 20
"""Of the inputs and results of elementwise operations that wait for the rest of their inputs."""

MIN_SPARED_S = 0.05
"""Below this, setting up the shared memory (two small exchanges) would take much of what is spared."""

MIN_ADVANTAGE = 1.5
"""A read is shared if it costs so many times as much alone: ranks wait for each other in every round."""

MEMORY_BYTES_PER_S = ReadCost().bytes_per_s
"""At which bytes are moved through shared memory, whatever storage they come from."""

PAGE_BYTES = 1 << 12
"""What a local file system reads at least."""

_PLACE_ALIGNMENT = 64
"""Bytes: what elements of any dtype may start at."""


class Wanted(NamedTuple):
    """Bytes `[start, end)` of a file, of a tensor that starts at byte `origin` and has items of `itemsize` bytes."""

    path: str
    origin: int
    itemsize: int
    start: int
    end: int


class Segment(NamedTuple):
    """A part of a band: `wanted` is read to byte `place` of the band's memory."""

    wanted: Wanted
    place: int


Band = tuple[Segment, ...]
"""What one rank reads in one round."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the ranks of a node read together; equal on all of them.

    Attributes:
        num_ranks: of the node, of those that take part.
        bands: band `b` is read in round `b // num_ranks` by the rank of place `b % num_ranks`.
        wanted_bytes: that the ranks would read without each other.
    """

    num_ranks: int
    bands: tuple[Band, ...]
    wanted_bytes: int

    @property
    def num_rounds(self) -> int:
        """Rounds until all is read."""
        return -(-len(self.bands) // self.num_ranks)

    @property
    def read_bytes(self) -> int:
        """Bytes of all bands."""
        return nbytes_of(segment.wanted for band in self.bands for segment in band)

    def touched_bytes(self, block_bytes: int) -> int:
        """Return the bytes of the blocks that bands touch, of each band by itself."""
        return sum(touched_bytes((segment.wanted for segment in band), block_bytes) for band in self.bands)

    def band(self, round_number: int, place: int) -> Band:
        """Return what the rank of a place reads in a round; nothing at the end of the last."""
        number = round_number * self.num_ranks + place
        return self.bands[number] if number < len(self.bands) else ()


@dataclass(frozen=True, slots=True)
class Shared:
    """What came of reading together.

    Attributes:
        num_ranks: that read together, this one included.
        wanted_bytes: that all of them would have read alone, of what was shared.
        node_bytes: that they have read of it instead.
        read_bytes: of these, by this rank.
    """

    num_ranks: int
    wanted_bytes: int
    node_bytes: int
    read_bytes: int


def shared_steps(plan: LoadPlan) -> tuple[Step, ...]:
    """Return the steps of a plan whose reads are to be done together with other ranks of the node.

    None where that spares this rank less than `MIN_SPARED_S`.
    """
    if plan.world_size == 1:
        return ()
    found = [
        step
        for target in plan.targets
        for destination in target.destinations
        if destination.fill is not None
        for step in destination.fill.steps
        if _can_be_shared(step, plan.values)
    ]
    costs = [_seconds(reads_of(step), plan.read_cost) for step in found]
    chosen = [step for step, (alone_s, shared_s) in zip(found, costs, strict=True) if _pays(alone_s, shared_s)]
    if sum(alone_s - shared_s for alone_s, shared_s in costs if _pays(alone_s, shared_s)) < MIN_SPARED_S:
        return ()
    return tuple(_that_fit(chosen))


def reads_of(step: Step) -> list[Read]:
    """Return the reads of a step, those of the inputs of its pieces included."""
    if isinstance(step, Read):
        return [step]
    if isinstance(step, Apply):
        return [read for piece in step.pieces for fill in piece.inputs for read in fill.steps if isinstance(read, Read)]
    return []


def wanted(reads: Iterable[Read]) -> list[Wanted]:
    """Return the byte ranges that some reads fetch, gaps that they read along included, merged and in order."""
    found = []
    for read in reads:
        origin, itemsize = read.tensor.start, read.tensor.dtype.itemsize
        for first, _ in read.each():
            start = origin + first * itemsize
            found.append(Wanted(read.tensor.path, origin, itemsize, start, start + read.numel * itemsize))
    return merged(found)


def merged(ranges: Iterable[Wanted]) -> list[Wanted]:
    """Return ranges in order, those of one tensor that touch or overlap as one."""
    found: list[Wanted] = []
    for each in sorted(ranges):
        if found and found[-1][:3] == each[:3] and each.start <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, each.end))
        else:
            found.append(each)
    return found


def touched_bytes(ranges: Iterable[Wanted], block_bytes: int) -> int:
    """Return the bytes of the blocks that ranges touch, which are in order; each block once."""
    total, before, end = 0, "", 0
    for each in ranges:
        start = max(each.start // block_bytes * block_bytes, end) if each.path == before else each.start
        if each.end > start:
            total += _blocks(start, each.end, block_bytes)
            end = -(-each.end // block_bytes) * block_bytes
        before = each.path
    return total


def schedule(wanted_by_rank: Sequence[Sequence[Wanted]], block_bytes: int, band_bytes: int = BAND_BYTES) -> Schedule:
    """Return who reads what, so that each wanted byte is read once.

    Bands end where blocks of the file system do, so that no two ranks read one; none is larger than `band_bytes`.
    """
    union = merged(each for ranges in wanted_by_rank for each in ranges)
    num_ranks, wanted_bytes = len(wanted_by_rank), sum(map(nbytes_of, wanted_by_rank))
    share = -(-nbytes_of(union) // num_ranks) + block_bytes + _PLACE_ALIGNMENT
    return Schedule(num_ranks, tuple(_bands(union, min(band_bytes, share), block_bytes)), wanted_bytes)


def node_schedule(
    wanted_by_rank: Sequence[Sequence[Wanted]], block_bytes: int, band_bytes: int = BAND_BYTES
) -> Schedule | None:
    """Return who reads what on a node; None where the ranks would read little less together.

    `block_bytes`: of a block that costs as a whole, see `ReadCost.block_bytes`; the rest as for `schedule`.
    """
    found = schedule(wanted_by_rank, max(block_bytes, PAGE_BYTES), band_bytes)
    alone = sum(touched_bytes(ranges, block_bytes) for ranges in wanted_by_rank)
    return found if alone > MIN_ADVANTAGE * found.touched_bytes(block_bytes) else None


def pieces_of(band: Band, num_threads: int, block_bytes: int) -> Iterator[Segment]:
    """Yield the segments of a band, cut at the ends of blocks so that as many threads have about equal shares."""
    share = max(-(-nbytes_of(segment.wanted for segment in band) // num_threads), block_bytes, _PLACE_ALIGNMENT)
    for part, place in band:
        start = part.start
        while start < part.end:
            end = _cut(part, start, share, block_bytes, must_cut=True)
            yield Segment(part._replace(start=start, end=end), place + start - part.start)
            start = end


def nbytes_of(ranges: Iterable[Wanted]) -> int:
    """Return the bytes of ranges."""
    return sum(each.end - each.start for each in ranges)


def within(read: Read, segment: Segment) -> Iterator[Nest]:
    """Yield how those elements of a read that lie in a segment go from the segment to the destination of the read."""
    tensor, part = read.tensor, segment.wanted
    if (tensor.path, tensor.start, tensor.dtype.itemsize) != part[:3]:
        return
    start, end = (part.start - part.origin) // part.itemsize, (part.end - part.origin) // part.itemsize
    whole = replace(read.nest, source=read.first + read.nest.source, axes=(*read.outer, *read.nest.axes))
    for nest in whole.clipped(start, end, "source"):
        yield nest.shifted(source=-start)


def _bands(ranges: Iterable[Wanted], band_bytes: int, block_bytes: int) -> Iterator[Band]:
    segments: list[Segment] = []
    place = 0
    for each in ranges:
        start = each.start
        while start < each.end:
            stop = _cut(each, start, band_bytes - place, block_bytes, must_cut=not segments)
            if stop > start:
                segments.append(Segment(each._replace(start=start, end=stop), place))
                place += -(-(stop - start) // _PLACE_ALIGNMENT) * _PLACE_ALIGNMENT
                start = stop
            if start < each.end:
                yield tuple(segments)
                segments, place = [], 0
    if segments:
        yield tuple(segments)


def _cut(each: Wanted, start: int, room: int, block_bytes: int, *, must_cut: bool) -> int:
    """Return where a segment that starts at `start` ends: between two items, and at the end of a block if it can."""
    limit = start + room
    if each.end <= limit:
        return each.end
    for at in (limit // block_bytes * block_bytes, limit):
        end = at - (at - each.origin) % each.itemsize
        if end > start:
            return end
        if not must_cut:
            break
    return start


def _can_be_shared(step: Step, values: Sequence[Value]) -> bool:
    """Return whether a step is a read, or an operation on pieces of which each is made of reads and held values."""
    if not isinstance(step, Apply):
        return isinstance(step, Read)
    pieces = [[part for fill in piece.inputs for part in fill.steps] for piece in step.pieces]
    return all(
        any(isinstance(part, Read) for part in parts)
        and all(
            isinstance(part, Read) or (isinstance(part, Move) and isinstance(values[part.value], HeldValue))
            for part in parts
        )
        for parts in pieces
    )


def _seconds(reads: Sequence[Read], cost: ReadCost) -> tuple[float, float]:
    """Return what reads cost this rank alone, and about what they cost if every needed byte is read once in bands.

    Alone it reads whole blocks. Together each needed byte is read by one rank and moved once through shared memory.
    """
    nbytes = sum(_block_bytes(read, cost.block_bytes) for read in reads)
    alone_s = sum(read.num_reads for read in reads) * cost.call_s + nbytes / cost.bytes_per_s
    needed = sum(read.needed_bytes_each * read.num_reads for read in reads)
    read_s = math.ceil(needed / BAND_BYTES) * cost.call_s + needed / cost.bytes_per_s
    return alone_s, read_s + needed / MEMORY_BYTES_PER_S


def _block_bytes(read: Read, block_bytes: int) -> int:
    """Return the bytes of the blocks that a read touches: as many as its first for each, at most all up to its last."""
    if block_bytes == 1:
        return read.read_bytes
    itemsize = read.tensor.dtype.itemsize
    start, nbytes = read.tensor.start + read.first * itemsize, read.numel * itemsize
    reach = nbytes + (extent(read.outer, "source") - 1) * itemsize
    return min(read.num_reads * _blocks(start, start + nbytes, block_bytes), _blocks(start, start + reach, block_bytes))


def _blocks(start: int, end: int, block_bytes: int) -> int:
    """Return the bytes of the blocks that `[start, end)` touches."""
    return ((end - 1) // block_bytes + 1 - start // block_bytes) * block_bytes


def _pays(alone_s: float, shared_s: float) -> bool:
    return alone_s > MIN_ADVANTAGE * shared_s


def _open_bytes(step: Apply, piece: Piece) -> int:
    """Return the bytes of the inputs and of the result of a piece."""
    return piece.numel * (step.dtype.itemsize + sum(fill.dtype.itemsize for fill in piece.inputs))


def _that_fit(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps, without operations whose pieces wait for their inputs while too many others do."""
    edges: list[tuple[tuple[str, int], int, int]] = []
    for number, step in enumerate(steps):
        if not isinstance(step, Apply):
            continue
        for piece in step.pieces:
            ranges = wanted(read for fill in piece.inputs for read in fill.steps if isinstance(read, Read))
            if ranges:
                size = _open_bytes(step, piece)
                edges += [
                    ((ranges[0].path, ranges[0].start), size, number),
                    ((ranges[-1].path, ranges[-1].end), -size, number),
                ]
    held, refused = 0, set()
    for _, size, number in sorted(edges):
        if size > 0 and held + size > MAX_OPEN_BYTES:
            refused.add(number)
        held += size
    yield from (step for number, step in enumerate(steps) if number not in refused)
