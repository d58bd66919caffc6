"""What ranks that read together over a network ask of each other, and what goes into which message. Pure.

[Note: exchanged reading] This is two-phase collective I/O as ROMIO does it between nodes. The ranks of a group,
neighbours in the job, tell each other the byte ranges that they want. So each makes the same schedule of bands (see
[Note: cooperative reading] in `cooperative.py`), and knows who reads the bands that hold what it needs. It tells each
of these its reads there, without their destinations. Then everyone reads its bands, one after the other, and sends each
rank the elements that it has asked for, without what lies between them. Sender and receiver go through the same reads
in the same order, so messages hold elements and nothing else, and both know how many.

[Note: the order of messages] Those of a band come before those of the next band, and of one band they go to one rank
after the other. Everyone sends its own in this order, and takes those for it in this order. So of all messages that are
not done yet, the first can always be sent and taken: nobody waits in a circle, however little a connection holds.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.cooperative import (
    BAND_BYTES,
    Band,
    Schedule,
    Segment,
    Wanted,
    merged,
    nbytes_of,
    schedule_of,
    within,
)
from lowmem_load.planning.expression import Source
from lowmem_load.planning.reads import Loop, Read, Scatter

MAX_RANKS = 64
"""Of a group: each has a connection to each other one, and hears what each wants. Groups read blocks twice only at the
ends of what they need of each tensor: of 64 neighbours that is long."""

NUM_BANDS = 4
"""Bands in memory at a time: one is sent while the next ones are read."""

MESSAGE_BYTES = BAND_BYTES
"""Of the largest message, and of the memory for one on its way out, and for one on its way in."""

EXCHANGE_BYTES = NUM_BANDS * BAND_BYTES + 2 * MESSAGE_BYTES
"""Memory of a rank for bands and messages."""

MAX_RANGES = 1 << 16
"""That the ranks of a group want, all of them together: some 16 MiB on each rank."""

MAX_ASKED = 1 << 17
"""Reads that are asked of one rank: some 50 MiB. Where there are more, the group does not read together."""

_PLACE_ALIGNMENT = 16
"""Bytes: what elements of any dtype may start at."""

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""One for each size of an element: what is in between is moved as it is."""


class Part(NamedTuple):
    """Elements of one read in a message.

    Attributes:
        number: of the read, among those that were given to `messages`.
        segment: of the band that they are in.
        scatter: from the segment to the destination of the read.
        place: byte of the message at which they start.
    """

    number: int
    segment: Segment
    scatter: Scatter
    place: int

    @property
    def nbytes(self) -> int:
        """Bytes that they take: an element that goes to several places is sent once."""
        return math.prod(loop.size for loop in self.scatter.loops if loop.source) * self.segment.wanted.itemsize


def group_of(rank: int, world_size: int) -> range:
    """Return the ranks that read together with one: neighbours, at most `MAX_RANKS`, groups of equal size or nearly."""
    num_groups = -(-world_size // MAX_RANKS)
    number = rank * num_groups // world_size
    return range(-(-number * world_size // num_groups), -(-(number + 1) * world_size // num_groups))


def encoded_ranges(ranges: Sequence[Wanted], block_bytes: int) -> bytes:
    """Return what a rank tells the others of its group: what it wants, or that this is too much, and the block size."""
    paths = sorted({each.path for each in ranges})
    numbers = {path: number for number, path in enumerate(paths)}
    rows = [[numbers[each.path], *each[1:]] for each in ranges] if len(ranges) <= MAX_RANGES else None
    return json.dumps([block_bytes, paths, rows]).encode()


def decoded_ranges(content: bytes) -> tuple[int, list[Wanted] | None]:
    """Return what `encoded_ranges` was given: bytes of a block, and ranges; None for too many."""
    block_bytes, paths, rows = json.loads(content)
    return block_bytes, None if rows is None else [Wanted(paths[number], *row) for number, *row in rows]


def encoded_reads(reads: Sequence[Read]) -> bytes:
    """Return what a rank asks of another: reads, without destinations."""
    paths = sorted({read.tensor.path for read in reads})
    numbers = {path: number for number, path in enumerate(paths)}
    return json.dumps(
        [
            paths,
            [
                [
                    *(numbers[read.tensor.path], read.tensor.start, read.tensor.dtype.itemsize),
                    read.first + read.scatter.source_start,
                    [loop[:2] for loop in (*read.outer, *read.scatter.loops) if loop.source],
                ]
                for read in reads
            ],
        ]
    ).encode()


def decoded_reads(content: bytes) -> list[Read]:
    """Return the reads that `encoded_reads` was given: the same elements in the same order; destinations are 0."""
    paths, rows = json.loads(content)
    found = []
    for number, start, itemsize, first, loops in rows:
        scatter = Scatter(0, 0, tuple(Loop(size, source, 0) for size, source in loops), ())
        found.append(
            Read(Source(paths[number], "", start, (), _DTYPES[itemsize]), first, 0, (), scatter, is_direct=False)
        )
    return found


def agreed_schedule(letters: Iterable[bytes], num_ranks: int) -> Schedule | None:
    """Return who reads what, as all ranks find it from what each has told; None where it is too much to keep.

    Args:
        letters: of `encoded_ranges`, by rank; one is held at a time.
        num_ranks: of them.
    """
    union: list[Wanted] | None = []
    wanted_bytes, block_bytes = 0, 1
    for letter in letters:  # all of them, for they come from ranks that are to be heard
        stated, ranges = decoded_ranges(letter)
        block_bytes = max(block_bytes, stated)
        union = None if union is None or ranges is None else merged([*union, *ranges])
        if union is not None and len(union) > MAX_RANGES:
            union = None
        wanted_bytes += nbytes_of(ranges or ())
    return None if union is None else schedule_of(union, num_ranks, wanted_bytes, block_bytes)


class BandIndex:
    """Where bands lie in their files."""

    def __init__(self, schedule: Schedule) -> None:
        # In the order of the bands, and so of the files, as `schedule` makes them.
        segments = [(part.wanted, number) for number, band in enumerate(schedule.bands) for part in band]
        self._starts = [wanted[:4] for wanted, _ in segments]
        self._numbers = [number for _, number in segments]

    def bands_of(self, read: Read) -> Sequence[int]:
        """Return the numbers of the bands that may hold elements of a read, ascending."""
        tensor, itemsize = read.tensor, read.tensor.dtype.itemsize
        first = read.first + read.scatter.source_start
        loops = (*read.outer, *read.scatter.loops)
        last = first + sum((loop.size - 1) * loop.source for loop in loops)
        key = (tensor.path, tensor.start, itemsize)
        begin = bisect.bisect_right(self._starts, (*key, tensor.start + first * itemsize)) - 1
        end = bisect.bisect_right(self._starts, (*key, tensor.start + last * itemsize))
        return sorted(set(self._numbers[max(0, begin) : end]))


def messages(reads: Sequence[Read], numbers: Sequence[int], band: Band) -> Iterator[list[Part]]:
    """Yield the messages that bring what some reads need of a band, each at most `MESSAGE_BYTES`.

    Args:
        reads: of one rank.
        numbers: of those that may need something of it.
        band: that is sent.
    """
    parts: list[Part] = []
    place = 0
    for number in numbers:
        for segment in band:
            for scatter in within(reads[number], segment):
                part = Part(number, segment, scatter, place)
                if part.nbytes > MESSAGE_BYTES:
                    raise PlanError(f"{reads[number].tensor.path}: an element of a band is sent twice")
                if place + part.nbytes > MESSAGE_BYTES:
                    yield parts
                    parts, place = [], 0
                    part = part._replace(place=0)
                parts.append(part)
                place += -(-part.nbytes // _PLACE_ALIGNMENT) * _PLACE_ALIGNMENT
    if parts:
        yield parts


def sent(scatter: Scatter) -> Scatter:
    """Return how the elements of a part go from their segment to the message: each once, one behind the other."""
    loops = _distinct(scatter)
    return Scatter(scatter.source_start, 0, _row_major(loops, of_destination=True), ())


def received(scatter: Scatter) -> Scatter:
    """Return how the elements of a part go from the message to the destination of its read."""
    loops = _row_major(_distinct(scatter), of_destination=False)
    repeats = [loop for loop in scatter.loops if not loop.source]
    return Scatter(0, scatter.destination_start, (*loops, *repeats), scatter.casts)


def _distinct(scatter: Scatter) -> list[Loop]:
    return [loop for loop in scatter.loops if loop.source] or [Loop(1, 1, 1)]


def _row_major(loops: Sequence[Loop], *, of_destination: bool) -> tuple[Loop, ...]:
    """Return loops whose destinations, or sources, lie one behind the other."""
    found, stride = [], math.prod(loop.size for loop in loops)
    for loop in loops:
        stride //= loop.size
        found.append(loop._replace(destination=stride) if of_destination else loop._replace(source=stride))
    return tuple(found)
