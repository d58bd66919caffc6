"""Decides which reads the ranks of a node share, and which rank reads which chunk of them. Pure: data in, data out.

[Note: shared reads] A conversion that transposes interleaves the partitions of neighbouring ranks in the file. A rank
that reads alone then reads bytes of its neighbours, too, or makes many small reads. So the ranks of a node read the
union of their byte ranges once. The union is cut into chunks of some MiB. In each round every rank reads one chunk into
memory that all of them share; after a barrier each rank takes its own elements from all chunks of the round. This is
two-phase collective I/O (ROMIO), with shared memory in place of messages. Every rank knows the byte ranges of all the
others, and computes the same schedule from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.nest import Nest, extent
from lowmem_load.planning.reads import Read, ReadCost

ShareReads = Literal["auto", "job", "node", "off"]
"""Which ranks share reads: see `load_model`."""

CHUNK_BYTES = 2 << 20
"""Largest chunk. Each rank holds two: one is filled while the ranks take their elements from the other."""

STORE_CHUNK_BYTES = 32 << 20
"""Largest chunk from a remote store: a chunk is some requests in flight."""

SEGMENTS_PER_CHUNK = 4
"""A chunk is read in at least so many pieces, so that several threads can read it. Blocks are not cut for that."""

MIN_SAVED_S = 0.05
"""A rank that would save less does not share: setting up the shared memory costs some milliseconds."""

MIN_ADVANTAGE = 1.5
"""A read is shared if it takes so many times as long alone: shared reading makes ranks wait for each other."""

MEMORY_BYTES_PER_S = ReadCost().bytes_per_s
"""Bytes per second through shared memory, whatever storage they come from."""

PAGE_BYTES = 1 << 12
"""Smallest amount that a local file system reads."""

_ALIGNMENT = 64
"""Bytes. Segments start at multiples of it in a chunk, so that their memory can be viewed as any dtype."""


class ByteRange(NamedTuple):
    """Bytes `[start, end)` of the file at `path`, inside a tensor that starts at byte `tensor_start` of it."""

    path: str
    tensor_start: int
    itemsize: int
    start: int
    end: int


class Segment(NamedTuple):
    """A piece of a chunk: the bytes `part` of a file are read to byte `place` of the chunk's memory."""

    part: ByteRange
    place: int


Chunk = tuple[Segment, ...]
"""What one rank reads in one round."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the ranks of a node read together; equal on all of them."""

    num_ranks: int
    chunks: tuple[Chunk, ...]  # in round `b // num_ranks`, the rank at place `b % num_ranks` reads chunk `b`
    wanted_bytes: int  # that these ranks would read if each read alone, added up

    @property
    def num_rounds(self) -> int:
        """Rounds until everything is read."""
        return -(-len(self.chunks) // self.num_ranks)

    @property
    def read_bytes(self) -> int:
        """Bytes of all chunks."""
        return nbytes_of(segment.part for chunk in self.chunks for segment in chunk)

    def touched_bytes(self, block_bytes: int) -> int:
        """Return the bytes of all file blocks that the chunks touch, counted for each chunk by itself."""
        return sum(touched_bytes((segment.part for segment in chunk), block_bytes) for chunk in self.chunks)

    def request_sizes(self, cost: ReadCost) -> list[int]:
        """Return the bytes of each read that fetches from a remote store."""
        pieces = (piece for chunk in self.chunks for piece in runs(chunk, segment_bytes(cost)))
        return [piece[-1].part.end - piece[0].part.start for piece in pieces]

    def chunk(self, round_number: int, place: int) -> Chunk:
        """Return what the rank at `place` reads in a round; nothing once the chunks are used up."""
        number = round_number * self.num_ranks + place
        return self.chunks[number] if number < len(self.chunks) else ()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the ranks read together: bytes that each would have read alone, bytes read instead, and by this rank."""

    num_ranks: int
    wanted_bytes: int
    node_bytes: int
    read_bytes: int


def shared_reads(plan: LoadPlan, reads_once: Callable[[Sequence[int]], bool] | None = None) -> tuple[Read, ...]:
    """Return the reads that this rank would rather do with its node; none if that saves less than `MIN_SAVED_S`.

    `reads_once` says of ranks that hold the same whether they share in another way: see `replicas.py`.
    """
    if plan.world_size == 1:
        return ()
    reads, saved_s = [], 0.0
    for destination in (destination for target in plan.targets for destination in target.destinations):
        if destination.fill is None or (reads_once is not None and reads_once(destination.holders)):
            continue
        for step in (step for step in destination.fill.steps if isinstance(step, Read)):
            alone_s, together_s = read_seconds(step, plan.read_cost)
            if alone_s > MIN_ADVANTAGE * together_s:
                reads.append(step)
                saved_s += alone_s - together_s
    return tuple(reads) if saved_s >= MIN_SAVED_S else ()


def read_seconds(read: Read, cost: ReadCost) -> tuple[float, float]:
    """Return about how many seconds a read takes alone (in whole blocks), and together (each needed byte once)."""
    alone_s = read.num_reads * cost.call_s + _block_bytes(read, cost.block_bytes) / cost.bytes_per_s
    needed = read.needed_bytes_each * read.num_reads
    num_calls = needed / segment_bytes(cost) if cost.request_bytes else math.ceil(needed / CHUNK_BYTES)
    read_s = num_calls * cost.call_s + needed / cost.bytes_per_s
    return alone_s, read_s + needed / MEMORY_BYTES_PER_S


def chunk_bytes_of(cost: ReadCost) -> int:
    """Return the bytes of a chunk of files of this cost."""
    return STORE_CHUNK_BYTES if cost.request_bytes else CHUNK_BYTES


def segment_bytes(cost: ReadCost) -> int:
    """Return the most bytes that are read at once into a chunk."""
    return chunk_bytes_of(cost) // SEGMENTS_PER_CHUNK


def _block_bytes(read: Read, block_bytes: int) -> int:
    # The blocks of the first read, for each read; but no block twice where the reads lie close together.
    if block_bytes == 1:
        return read.read_bytes
    itemsize = read.tensor.dtype.itemsize
    start, nbytes = read.tensor.start + read.first * itemsize, read.numel * itemsize
    reach = nbytes + (extent(read.outer, "source") - 1) * itemsize
    return min(read.num_reads * _blocks(start, start + nbytes, block_bytes), _blocks(start, start + reach, block_bytes))


def _blocks(start: int, end: int, block_bytes: int) -> int:
    return ((end - 1) // block_bytes + 1 - start // block_bytes) * block_bytes


def byte_ranges(reads: Iterable[Read]) -> list[ByteRange]:
    """Return what some reads fetch, with the gaps that they read along, merged and in order."""
    ranges = []
    for read in reads:
        tensor_start, itemsize = read.tensor.start, read.tensor.dtype.itemsize
        for first, _ in read.iterations():
            start = tensor_start + first * itemsize
            ranges.append(ByteRange(read.tensor.path, tensor_start, itemsize, start, start + read.numel * itemsize))
    return union(ranges)


def union(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Return ranges in order; those of one tensor that touch or overlap become one."""
    merged: list[ByteRange] = []
    for byte_range in sorted(ranges):
        if merged and merged[-1][:3] == byte_range[:3] and byte_range.start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, byte_range.end))
        else:
            merged.append(byte_range)
    return merged


def nbytes_of(ranges: Iterable[ByteRange]) -> int:
    """Return the bytes of ranges, added up."""
    return sum(byte_range.end - byte_range.start for byte_range in ranges)


def touched_bytes(ranges: Iterable[ByteRange], block_bytes: int) -> int:
    """Return the bytes of the file blocks that ranges in ascending order touch, each block once."""
    total, path, end = 0, "", 0
    for byte_range in ranges:
        start = max(byte_range.start // block_bytes * block_bytes, end) if byte_range.path == path else byte_range.start
        if byte_range.end > start:
            total += _blocks(start, byte_range.end, block_bytes)
            end = -(-byte_range.end // block_bytes) * block_bytes
        path = byte_range.path
    return total


def plan_schedule(
    ranges_by_rank: Sequence[Sequence[ByteRange]], block_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> Schedule:
    """Return which rank reads which chunk, so that each byte of the union is read once.

    Chunks end at blocks, which storage reads as a whole, so that no two ranks read the same block.
    """
    ranges = union(byte_range for of_rank in ranges_by_rank for byte_range in of_rank)
    num_ranks, wanted_bytes = len(ranges_by_rank), sum(map(nbytes_of, ranges_by_rank))
    # With little to read, each rank reads an equal share, instead of one rank all of it.
    chunk_bytes = min(chunk_bytes, -(-nbytes_of(ranges) // num_ranks) + block_bytes + _ALIGNMENT)
    segment_bytes = min(chunk_bytes, max(chunk_bytes // SEGMENTS_PER_CHUNK, block_bytes))
    parts = (part for byte_range in ranges for part in _cut(byte_range, segment_bytes, block_bytes))
    return Schedule(num_ranks, tuple(_packed(parts, chunk_bytes)), wanted_bytes)


def node_schedule(ranges_by_rank: Sequence[Sequence[ByteRange]], cost: ReadCost, chunk_bytes: int) -> Schedule | None:
    """Return the schedule of a node; None where its ranks would read little less together than alone."""
    block_bytes = cost.block_bytes
    if cost.request_bytes:  # of a store: seconds count, since a request costs as much as a MB
        schedule = plan_schedule(ranges_by_rank, 1, chunk_bytes)
        alone_s = sum(
            request_seconds((byte_range.end - byte_range.start for byte_range in ranges), cost)
            for ranges in ranges_by_rank
        )
        return schedule if alone_s > MIN_ADVANTAGE * request_seconds(schedule.request_sizes(cost), cost) else None
    schedule = plan_schedule(ranges_by_rank, max(block_bytes, PAGE_BYTES), chunk_bytes)
    alone = sum(touched_bytes(ranges, block_bytes) for ranges in ranges_by_rank)
    return schedule if alone > MIN_ADVANTAGE * schedule.touched_bytes(block_bytes) else None


def _cut(byte_range: ByteRange, max_bytes: int, block_bytes: int) -> Iterator[ByteRange]:
    # Parts end between two elements, and near the end of a block if they can.
    start = byte_range.start
    while start < byte_range.end:
        end, limit = byte_range.end, start + max_bytes
        if end > limit:
            end = _element_border(byte_range, limit // block_bytes * block_bytes)
            if end <= start:  # the block is larger than the part
                end = _element_border(byte_range, limit)
        yield byte_range._replace(start=start, end=end)
        start = end


def _element_border(byte_range: ByteRange, at: int) -> int:
    return at - (at - byte_range.tensor_start) % byte_range.itemsize


def _packed(parts: Iterable[ByteRange], chunk_bytes: int) -> Iterator[Chunk]:
    segments: list[Segment] = []
    place = 0
    for part in parts:
        nbytes = part.end - part.start
        if not (segments and _continues(segments[-1], part) and place % part.itemsize == 0):
            place = -(-place // _ALIGNMENT) * _ALIGNMENT
        if place + nbytes > chunk_bytes and segments:
            yield tuple(segments)
            segments, place = [], 0
        segments.append(Segment(part, place))
        place += nbytes
    if segments:
        yield tuple(segments)


def _continues(segment: Segment, part: ByteRange) -> bool:
    return (segment.part.path, segment.part.end) == (part.path, part.start)


def runs(chunk: Chunk, max_bytes: int) -> list[Chunk]:
    """Return a chunk in pieces that lie side by side in the file and in memory, so that one read fetches each."""
    pieces: list[list[Segment]] = []
    for segment in chunk:
        part = segment.part
        if pieces and _continues(pieces[-1][-1], part) and part.end - pieces[-1][0].part.start <= max_bytes:
            first = pieces[-1][0]
            if segment.place - first.place == part.start - first.part.start:
                pieces[-1].append(segment)
                continue
        pieces.append([segment])
    return list(map(tuple, pieces))


def node_requests(plans: Sequence[LoadPlan]) -> int:
    """Return how many requests to a remote store the ranks of a node make for their weights."""
    chosen = [shared_reads(plan) for plan in plans]
    ranges = [byte_ranges(reads) for reads in chosen if reads]
    cost, num_requests = plans[0].read_cost, sum(plan.costs.num_reads for plan in plans)
    schedule = node_schedule(ranges, cost, chunk_bytes_of(cost)) if len(ranges) > 1 else None
    if schedule is None:
        return num_requests
    num_shared = sum(read.num_reads for reads in chosen for read in reads)
    return num_requests - num_shared + len(schedule.request_sizes(cost))


def read_together(plans: Sequence[LoadPlan]) -> tuple[int, int, int, int] | None:
    """Return what the ranks of a node read together, given their plans; None if each reads alone.

    Number of ranks; bytes that they want; bytes of the blocks that they would read alone, and that they read instead.
    """
    ranges = [byte_ranges(reads) for reads in map(shared_reads, plans) if reads]
    cost = max((plan.read_cost for plan in plans), key=lambda cost: cost.block_bytes)
    schedule = node_schedule(ranges, cost, chunk_bytes_of(cost)) if len(ranges) > 1 else None
    if schedule is None:
        return None
    alone_bytes = sum(touched_bytes(of_rank, cost.block_bytes) for of_rank in ranges)
    return schedule.num_ranks, schedule.wanted_bytes, alone_bytes, schedule.touched_bytes(cost.block_bytes)


def request_seconds(sizes: Iterable[int], cost: ReadCost) -> float:
    """Return the seconds that requests of these bytes take, one after the other."""
    return sum(math.ceil(nbytes / cost.request_bytes) * cost.call_s + nbytes / cost.bytes_per_s for nbytes in sizes)


def nests_within(read: Read, segment: Segment) -> Iterator[Nest]:
    """Yield how the elements of a read that lie in a segment go from the segment to the destination of the read."""
    tensor, part = read.tensor, segment.part
    if (tensor.path, tensor.start, tensor.dtype.itemsize) != part[:3]:
        return
    start, end = (part.start - part.tensor_start) // part.itemsize, (part.end - part.tensor_start) // part.itemsize
    whole = replace(read.nest, source=read.first + read.nest.source, axes=(*read.outer, *read.nest.axes))
    for nest in whole.clipped(start, end, "source"):
        yield nest.shifted(source=-start)
