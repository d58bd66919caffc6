"""Buckets: which tensors are put together from the ranks' elements at a time, and which rank sends what. Pure, no I/O.

[Note: buckets] Tensors come in the model's order, as engines load layer by layer. A bucket ends with the tensor that
fills it, and a tensor that fills one by itself has one of its own, so there are at most `total bytes / bucket_bytes +
1`.

[Note: messages] For each bucket, each rank sends one message: its elements of the bucket's tensors, cast and in the
order of the parts. Every rank knows the regions of all ranks, and so computes the parts of all of them: the sender to
fill its message, the receivers to put the elements in their places. Replicas, which hold equal elements, send a share
each.

[Note: lengths] One collective takes messages of equal length, those of all ranks padded to the longest. Partitions give
nearly equal ones. Stacked experts lie on few ranks each: of their buckets, padded messages take up to twice the bytes.
Where they would take more, each rank sends a message of its own length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.copies import Copy
from lowmem_load.planning.expression import Shape, Source
from lowmem_load.planning.nest import Axis, Nest, nests_within
from lowmem_load.planning.ranges import Region

ALIGNMENT = 16
"""Bytes; a multiple of the itemsize of each dtype."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
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

    sent: tuple[PlannedTensor, ...]
    made: tuple[PlannedTensor, ...] = ()
    merge: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(tensor.nbytes for tensor in self.sent)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Units whose elements are exchanged at a time."""

    units: tuple[Unit, ...]

    @property
    def sent(self) -> list[PlannedTensor]:
        """What is sent, in the order of the messages: wide elements first, so that all parts are aligned."""
        tensors = (tensor for unit in self.units for tensor in unit.sent)
        return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


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


def plan_buckets(units: Sequence[Unit], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets. See [Note: buckets]."""
    buckets: list[Bucket] = []
    pending: list[Unit] = []
    pending_bytes = 0
    for unit in units:
        if unit.nbytes >= bucket_bytes:
            buckets.append(Bucket((unit,)))  # before what is pending, which is not full yet
            continue
        pending.append(unit)
        pending_bytes += unit.nbytes
        if pending_bytes >= bucket_bytes:
            buckets.append(Bucket(tuple(pending)))
            pending, pending_bytes = [], 0
    return [*buckets, Bucket(tuple(pending))] if pending else buckets


def plan_messages(bucket: Bucket, regions: Sequence[Regions]) -> list[Message]:
    """Return what each rank sends for a bucket. Raises PlanError unless together they send each element once."""
    names = {source.name for tensor in bucket.sent for source in tensor.sources}
    replicas: dict[tuple[str, Region], list[int]] = {}
    for rank, mine in enumerate(regions):
        for name in names:
            replicas.setdefault((name, mine[name]), []).append(rank)
    messages, sent_numels = [], [0] * len(bucket.sent)
    for rank, mine in enumerate(regions):
        parts: list[Part] = []
        end = 0
        for number, tensor in enumerate(bucket.sent):
            for copy in tensor.copies:
                if not isinstance(copy.leaf, Source):
                    continue
                name = copy.leaf.name
                for nest in _shares(copy, mine[name], rank, replicas[name, mine[name]]):
                    parts.append(Part(number, name, end, nest))
                    end += nest.numel * tensor.dtype.itemsize
                    sent_numels[number] += nest.numel
        messages.append(Message(tuple(parts), end))
    for tensor, numel in zip(bucket.sent, sent_numels, strict=True):
        expected = sum(copy.nest.numel for copy in tensor.copies if isinstance(copy.leaf, Source))
        if numel != expected:
            raise PlanError(
                f"{tensor.name}: the ranks hold {numel} elements of {expected}; were all ranks of the model called?"
            )
    return messages


def message_lengths(messages: Sequence[Message], bucket_bytes: int, *, are_equal: bool) -> list[int]:
    """Return the bytes that each rank sends: equal ones if asked for and possible. See [Note: lengths]."""
    own = [message.nbytes + -message.nbytes % ALIGNMENT for message in messages]
    equal = [max(own)] * len(own)
    num_senders = sum(map(bool, own))
    return equal if are_equal and num_senders > 1 and sum(equal) <= 2 * max(sum(own), bucket_bytes) else own


def _shares(copy: Copy, region: Region, rank: int, replicas: Sequence[int]) -> Iterator[Nest]:
    """Yield what a rank sends of a copy from a parameter: of what `replicas` hold alike, its share."""
    assert isinstance(copy.leaf, Source)
    place = replicas.index(rank)
    for nest in nests_within(copy.nest, region, copy.leaf.shape):
        size, source, destination = nest.axes[0]
        first, last = (size * number // len(replicas) for number in (place, place + 1))
        if first < last:
            moved = nest.shifted(source=first * source, destination=first * destination)
            yield replace(moved, axes=(Axis(last - first, source, destination), *nest.axes[1:]))
