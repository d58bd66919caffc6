"""Buckets: which tensors are put together from the ranks' elements at a time, and which rank sends what. Pure, no I/O.

[Note: messages] For each bucket, each rank sends one message. It holds the rank's elements of the bucket's tensors,
cast and in the order of the parts. Every rank knows the regions of all ranks, and so computes the parts of all of them:
the sender to fill its message, the receivers to put the elements in their places. Tensors with wide elements come first
in a bucket, so all parts are aligned.

[Note: few collectives] A bucket ends with the tensor that fills it. So all but the last one are full, and there are at
most `total bytes / bucket_bytes + 1`. Tensors that fill a bucket by themselves come first: else the last small bucket
before them might be nearly empty, or would grow by all of theirs. What rank 0 holds in full has buckets of its own,
which it sends to all: as messages of equal length they would take memory for as many messages as there are ranks. For
the same reason replicas, which hold equal elements of a parameter, send a share each.

[Note: even messages] Units of which all ranks send about the same come in the model's order, as engines load layer by
layer. Experts of a stacked parameter lie on few ranks each, so in this order buckets would have few senders. Their
buckets begin with a unit with the longest message; next is the one that leaves the least of equal messages unused; of
several one of the rank that has most left to send, so that the last buckets are even, too. Units on one rank that are
too large even then, as messages of all ranks would fill more than two buckets, have buckets of their own, at most one
more for each such rank. In a bucket with one sender, or whose equal messages would take more than twice its bytes, each
rank sends a message of its own length.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.copies import Copy
from lowmem_load.planning.expression import Shape, Source
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.ranges import FlatRange, Grid, Region, flat_ranges

ALIGNMENT = 16
"""Bytes; a multiple of the itemsize of each dtype."""

EVEN_SHARE, SMALL_SHARE = 1 / 4, 1 / 4096
"""A unit is even if equal messages leave at most this share of it, or of a bucket, unused."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor, and the copies that fill it. Those from a `Source` are of the parameter or buffer of its name."""

    name: str
    shape: Shape
    dtype: torch.dtype
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sources(self) -> list[Source]:
        """The parameters and buffers that it is made of."""
        return list(dict.fromkeys(copy.leaf for copy in self.copies if isinstance(copy.leaf, Source)))


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are put together in one bucket.

    Attributes:
        sent: what the ranks send.
        made: what is made of these parameters once adapters are merged into them, by merge `merge`. Without a merge,
            what is sent is what is wanted.
    """

    sent: tuple[Wanted, ...]
    made: tuple[Wanted, ...] = ()
    merge: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(one.nbytes for one in self.sent)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Units whose elements are exchanged at a time."""

    units: tuple[Unit, ...]

    @property
    def sent(self) -> list[Wanted]:
        """What is sent, in the order of the messages."""
        return sorted((one for unit in self.units for one in unit.sent), key=lambda one: -one.dtype.itemsize)


class Part(NamedTuple):
    """Elements of a message: number of their tensor in `Bucket.sent`, name of their parameter, first byte.

    `nest` is from the sender's memory of the parameter to the tensor, both flat.
    """

    number: int
    parameter: str
    start: int
    nest: Nest


class Message(NamedTuple):
    """What one rank sends for a bucket."""

    parts: tuple[Part, ...]
    nbytes: int


Regions = Mapping[str, Region]
"""The elements of each parameter and buffer, by name, that one rank can send: those that begin its memory, in order."""


def plan_buckets(units: Sequence[Unit], regions: Sequence[Regions], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets, given the regions of each rank. See [Note: few collectives]."""
    names = {source.name for unit in units for one in unit.sent for source in one.sources}
    elsewhere = {name for name in names if any(region[name].numel for region in regions[1:])}
    mine: list[Unit] = []  # of rank 0
    even: list[Unit] = []
    uneven: dict[tuple[int, ...], list[Unit]] = {}  # by bytes of each rank
    sent = _SentBytes(regions)
    for unit in units:
        if elsewhere.isdisjoint(_names(unit)):
            mine.append(unit)
            continue
        nbytes = sent.of(unit)
        unused = len(regions) * max(nbytes) - sum(nbytes)
        is_even = unused <= max(sum(nbytes) * EVEN_SHARE, bucket_bytes * SMALL_SHARE)
        (even if is_even else uneven.setdefault(nbytes, [])).append(unit)
    of_one: dict[int, list[Unit]] = {}
    for nbytes in list(uneven):
        if max(nbytes) == sum(nbytes) and len(regions) * max(nbytes) > 2 * bucket_bytes:
            of_one.setdefault(nbytes.index(max(nbytes)), []).extend(uneven.pop(nbytes))
    buckets: list[tuple[Unit, ...]] = []
    for those in (mine, *of_one.values()):
        full, rest = _in_order(those, bucket_bytes)
        buckets += [*full, rest]
    full, rest = _in_order(even, bucket_bytes)
    buckets += [
        *full,
        *_dealt(uneven, rest, [sum(each) for each in zip(*map(sent.of, rest), strict=True)], bucket_bytes),
    ]
    return [Bucket(each) for each in buckets if each]


def _in_order(units: Sequence[Unit], bucket_bytes: int) -> tuple[list[tuple[Unit, ...]], tuple[Unit, ...]]:
    """Return the units of full buckets, in order, and the rest, which fill none. Large units come first."""
    buckets: list[tuple[Unit, ...]] = [(unit,) for unit in units if unit.nbytes >= bucket_bytes]
    held: list[Unit] = []
    num_held = 0
    for unit in units:
        if unit.nbytes < bucket_bytes:
            held.append(unit)
            num_held += unit.nbytes
            if num_held >= bucket_bytes:
                buckets.append(tuple(held))
                held, num_held = [], 0
    return buckets, tuple(held)


def _dealt(
    units: Mapping[tuple[int, ...], Sequence[Unit]], first: Sequence[Unit], sent: Sequence[int], bucket_bytes: int
) -> Iterator[tuple[Unit, ...]]:
    """Yield the units of each bucket, given units by the bytes that each rank sends. See [Note: even messages].

    The first bucket begins with the units of `first`, of which each rank sends `sent` bytes.
    """
    queues: dict[tuple[int, ...], deque[Unit]] = {}
    for nbytes, those in units.items():
        yield from ((unit,) for unit in those if unit.nbytes >= bucket_bytes)
        if small := deque(unit for unit in those if unit.nbytes < bucket_bytes):
            queues[nbytes] = small
    held = list(first)
    left = [
        sum(n * len(queue) for n, queue in zip(each, queues.values(), strict=True))
        for each in zip(*queues, strict=True)
    ]
    while queues:
        num_held = sum(unit.nbytes for unit in held)
        ranked = list(queues)
        main = [each.index(max(each)) for each in ranked]
        rows = torch.tensor(ranked, dtype=torch.int64, device="cpu")
        total = torch.tensor(sent if held else [0] * len(ranked[0]), dtype=torch.int64, device="cpu")
        while queues and num_held < bucket_bytes:
            unused = [-max(nbytes) for nbytes in ranked]
            if held:
                after = rows + total
                unused = (after.amax(1) * len(total) - after.sum(1)).tolist()
            places = (place for place, nbytes in enumerate(ranked) if nbytes in queues)
            place = min(places, key=lambda place: (unused[place], -left[main[place]]))
            left = [a - b for a, b in zip(left, ranked[place], strict=True)]
            held.append(queues[ranked[place]].popleft())
            num_held, total = num_held + held[-1].nbytes, total + rows[place]
            if not queues[ranked[place]]:
                del queues[ranked[place]]
        yield tuple(held)
        held = []
    yield tuple(held)  # the first ones, if there are no others


class _SentBytes:
    """The bytes that each rank sends of a unit. Layers are alike, so most are known from an earlier one."""

    def __init__(self, regions: Sequence[Regions]) -> None:
        self._regions = regions
        self._known: dict[Any, list[int]] = {}

    def of(self, unit: Unit) -> tuple[int, ...]:
        """Return them by rank."""
        total = [0] * len(self._regions)
        for one in unit.sent:
            held = tuple(tuple(region[each.name] for region in self._regions) for each in one.sources)
            leaves = [one.sources.index(c.leaf) if isinstance(c.leaf, Source) else None for c in one.copies]
            nests, shapes = tuple(copy.nest for copy in one.copies), tuple(each.shape for each in one.sources)
            key = (one.dtype, tuple(leaves), nests, shapes, held)
            if key not in self._known:
                self._known[key] = [each.nbytes for each in _messages(Bucket((Unit((one,)),)), self._regions)]
            total = [a + b for a, b in zip(total, self._known[key], strict=True)]
        return tuple(total)


def _names(unit: Unit) -> set[str]:
    return {source.name for one in unit.sent for source in one.sources}


def plan_messages(bucket: Bucket, regions: Sequence[Regions]) -> list[Message]:
    """Return what each rank sends for a bucket. Raises PlanError unless together they send each element once."""
    messages = _messages(bucket, regions)
    found = [0] * len(bucket.sent)
    for part in itertools.chain.from_iterable(message.parts for message in messages):
        found[part.number] += part.nest.numel
    for one, numel in zip(bucket.sent, found, strict=True):
        wanted = sum(copy.nest.numel for copy in one.copies if isinstance(copy.leaf, Source))
        if numel != wanted:
            raise PlanError(
                f"{one.name}: the ranks hold {numel} elements of {wanted}; were all ranks of the model called?"
            )
    return messages


def lengths(messages: Sequence[Message], bucket_bytes: int, *, are_equal: bool) -> list[int]:
    """Return the bytes that each rank sends: equal ones if asked for and possible. See [Note: even messages]."""
    own = [message.nbytes + -message.nbytes % ALIGNMENT for message in messages]
    equal = [max(own)] * len(own)
    num_senders = sum(map(bool, own))
    return equal if are_equal and num_senders > 1 and sum(equal) <= 2 * max(sum(own), bucket_bytes) else own


def _messages(bucket: Bucket, regions: Sequence[Regions]) -> list[Message]:
    holders: dict[tuple[str, Region], list[int]] = {}
    for rank, mine in enumerate(regions):
        for name in {source.name for one in bucket.sent for source in one.sources}:
            holders.setdefault((name, mine[name]), []).append(rank)
    return [_message(bucket.sent, mine, rank, holders) for rank, mine in enumerate(regions)]


def _message(
    wanted: Iterable[Wanted], regions: Regions, rank: int, holders: Mapping[tuple[str, Region], Sequence[int]]
) -> Message:
    parts: list[Part] = []
    end = 0
    for number, one in enumerate(wanted):
        for copy in one.copies:
            if isinstance(copy.leaf, Source):
                name, region = copy.leaf.name, regions[copy.leaf.name]
                for nest in nests_within(copy.nest, region, copy.leaf.shape):
                    for share in _share(nest, rank, holders[name, region]):
                        parts.append(Part(number, name, end, share))
                        end += share.numel * one.dtype.itemsize
    return Message(tuple(parts), end)


def _share(nest: Nest, rank: int, holders: Sequence[int]) -> Iterator[Nest]:
    """Yield what a rank sends of a nest that several could send, if anything."""
    if len(holders) == 1:
        yield nest
        return
    (size, source, destination), place = nest.axes[0], holders.index(rank)
    first, last = (size * number // len(holders) for number in (place, place + 1))
    if first < last:
        moved = nest.shifted(source=first * source, destination=first * destination)
        yield replace(moved, axes=(Axis(last - first, source, destination), *nest.axes[1:]))


def nests_within(nest: Nest, region: Region, shape: Shape) -> Iterator[Nest]:
    """Yield the parts of a nest whose source elements lie in a region of a tensor of `shape`.

    Their source counts in the memory of the region.
    """
    if not region.numel:
        return
    is_run = len(nest.axes) == 1 and nest.axes[0][1:] == (1, 1)
    if isinstance(region, Grid) and is_run and nest.numel == math.prod(shape):
        yield from _boxes(nest, region, shape)
        return
    first = 0  # of the range, in the memory of the region
    for span in (region,) if isinstance(region, FlatRange) else flat_ranges(region, shape):
        if is_run:  # of most tensors
            start, end = max(span.start, nest.source), min(span.end, nest.source + nest.numel)
            if start < end:
                there = nest.destination + start - nest.source
                yield Nest(first + start - span.start, there, (Axis(end - start, 1, 1),), nest.casts)
        else:
            for part in nest.clipped(span.start, span.end, "source"):
                yield part.shifted(source=first - span.start)
        first += span.numel


def _boxes(nest: Nest, grid: Grid, shape: Shape) -> Iterator[Nest]:
    """Yield the parts of a nest that copies a whole tensor in order: one for each box of a grid, not for each row."""
    local, whole = _strides(grid.sizes), _strides(shape)
    dims: list[list[tuple[int, int, int]]] = []  # of each run of each dim: first index here, there, and length
    for runs in grid.runs:
        starts = itertools.accumulate((end - start for start, end in runs), initial=0)
        dims.append([(here, start, end - start) for here, (start, end) in zip(starts, runs, strict=False)])
    for box in itertools.product(*dims):
        axes = tuple(Axis(size, here, there) for (_, _, size), here, there in zip(box, local, whole, strict=True))
        source = sum(first * stride for (first, _, _), stride in zip(box, local, strict=True))
        destination = sum(first * stride for (_, first, _), stride in zip(box, whole, strict=True))
        yield Nest(source, nest.destination + destination, axes, nest.casts).merged()


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
