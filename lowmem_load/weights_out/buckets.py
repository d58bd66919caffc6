"""Buckets: which tensors are put together from the ranks' elements at a time, and which rank sends what. Pure, no I/O.

[Note: buckets] Tensors come in the model's order, as engines load layer by layer. A bucket ends before the tensor that
would exceed it, and a tensor that fills one by itself has one of its own. Two buckets in a row have more bytes than one
may have, so there are at most `2 * total bytes / bucket_bytes + 1`.

[Note: messages] For each bucket, each rank sends one message: its elements of the bucket's tensors, cast and in the
order of the parts. Every rank knows the layout of each parameter, and so computes the parts of all ranks: the sender to
fill its message, the receivers to put the elements in their places. Replicas, which own equal elements, send a share
each.

[Note: lengths] One collective takes messages of equal length, those of all ranks padded to the longest. Partitions give
nearly equal ones. Stacked experts lie on few ranks each, so padded messages of their buckets may take up to twice the
bytes. Where they would take more, each rank sends a message of its own length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from lowmem_load.errors import PlanError
from lowmem_load.models.peft import Merge
from lowmem_load.planning.expression import Shape, Source
from lowmem_load.planning.nest import Axis, Copy, Nest, extent, nests_within
from lowmem_load.planning.regions import Distribution

T = TypeVar("T")

ALIGNMENT = 16
"""Bytes; a multiple of the itemsize of each dtype."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor, and the copies that fill it. A `Source` stands for the parameter or buffer of its name."""

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
    """Tensors that are put together in one bucket: `sent`, or what is `made` of these by the merge of adapters."""

    sent: tuple[PlannedTensor, ...]
    made: tuple[PlannedTensor, ...] = ()
    merge: Merge | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(tensor.nbytes for tensor in self.sent)


def sent_in(bucket: Iterable[Unit]) -> list[PlannedTensor]:
    """Return what is sent, in the order of the messages: wide elements first, so that all parts are aligned."""
    tensors = (tensor for unit in bucket for tensor in unit.sent)
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


class MessagePart(NamedTuple):
    """Elements of a message: number of their tensor in what is `sent_in` a bucket, name of their parameter, first byte.

    `nest` is from the sender's memory of the parameter to the tensor, both flat.
    """

    number: int
    parameter: str
    start: int
    nest: Nest


Shares: TypeAlias = "Mapping[int, Sequence[Nest]]"
"""What each rank that owns some of a copy's elements sends of it."""


@dataclass(frozen=True, slots=True)
class Messages:
    """What the ranks send for a bucket."""

    copies: Sequence[tuple[int, str, int, Shares]]  # number of a tensor `sent_in` it, parameter, itemsize, shares
    nbytes: Sequence[int]  # of each rank's message

    def parts(self, rank: int) -> Iterator[MessagePart]:
        """Yield the parts of a rank's message. They are not kept: there are those of all tensors and ranks."""
        end = 0
        for number, name, itemsize, shares in self.copies:
            for nest in shares.get(rank, ()):
                yield MessagePart(number, name, end, nest)
                end += nest.numel * itemsize


def full_tensor(source: Source) -> PlannedTensor:
    """Return a parameter or buffer as it is."""
    copy = Copy(source, Nest(0, 0, (Axis(math.prod(source.shape), 1, 1),)))
    return PlannedTensor(source.name, source.shape, source.dtype, (copy,))


def merge_unit(merge: Merge, made: Sequence[PlannedTensor], sources: Mapping[int, Source]) -> Unit:
    """Return what has to be sent together to make tensors of merged parameters. `sources` has all, by `id`."""
    needed = {sources[id(parameter)]: None for parameter in (*merge.parameters, *merge.adapters())}
    needed |= {source: None for tensor in made for source in tensor.sources}
    return Unit(tuple(map(full_tensor, needed)), tuple(made), merge)


def in_batches(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield items in batches of at most so many bytes; a larger one by itself."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        if batch and batch_bytes + nbytes(item) > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += nbytes(item)
    if batch:
        yield batch


def plan_buckets(units: Sequence[Unit], bucket_bytes: int) -> list[list[Unit]]:
    """Return the units whose elements are exchanged at a time. See [Note: buckets]."""
    return list(in_batches(units, lambda unit: unit.nbytes, bucket_bytes))


def plan_messages(
    bucket: Iterable[Unit],
    layouts: Mapping[str, Distribution],
    world_size: int,
    known: dict[tuple[Distribution, Nest], Shares],
) -> Messages:
    """Return what each rank sends for a bucket. Raises PlanError unless together they send each element once.

    `known` keeps the shares of copies: many are alike, as layers have them.
    """
    copies: list[tuple[int, str, int, Shares]] = []
    nbytes = [0] * world_size
    for number, tensor in enumerate(sent_in(bucket)):
        itemsize, expected, numel = tensor.dtype.itemsize, 0, 0
        for copy in tensor.copies:
            if not isinstance(copy.leaf, Source):
                continue
            key = layouts[copy.leaf.name], copy.nest
            if key not in known:
                known[key] = _shares(copy.nest, key[0])
            shares = known[key]
            copies.append((number, copy.leaf.name, itemsize, shares))
            expected += copy.nest.numel
            for rank, nests in shares.items():
                share = sum(nest.numel for nest in nests)
                nbytes[rank] += share * itemsize
                numel += share
        if numel != expected:
            raise PlanError(
                f"{tensor.name}: the ranks own {numel} elements of {expected}; were all ranks of the model called?"
            )
    return Messages(copies, nbytes)


def message_lengths(nbytes: Sequence[int], bucket_bytes: int, *, are_equal: bool) -> list[int]:
    """Return the bytes that each rank sends: equal ones if asked for and possible. See [Note: lengths]."""
    own = [size + -size % ALIGNMENT for size in nbytes]
    equal = [max(own)] * len(own)
    num_senders = sum(map(bool, own))
    return equal if are_equal and num_senders > 1 and sum(equal) <= 2 * max(sum(own), bucket_bytes) else own


def _shares(nest: Nest, layout: Distribution) -> Shares:
    """Return what each rank sends of a nest from a tensor: its share of what several ranks own alike."""
    nests: dict[int, list[Nest]] = {}
    first, last = nest.source, nest.source + extent(nest.axes, "source")
    for holders in layout.holders:
        if holders.span.end <= first or holders.span.start >= last:
            continue  # most ranks own nothing of one expert
        for part in nests_within(nest, holders.region, layout.shape):
            for place, rank in enumerate(holders.ranks):
                nests.setdefault(rank, []).extend(_share(part, place, len(holders.ranks)))
    return nests


def _share(nest: Nest, place: int, num_replicas: int) -> Iterator[Nest]:
    """Yield the part of a nest that the replica of number `place` sends."""
    if num_replicas == 1:
        yield nest
        return
    size, source, destination = nest.axes[0]
    first, last = (size * number // num_replicas for number in (place, place + 1))
    if first < last:
        moved = nest.shifted(source=first * source, destination=first * destination)
        yield replace(moved, axes=(Axis(last - first, source, destination), *nest.axes[1:]))
