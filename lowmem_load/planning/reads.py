"""From copies to the steps that an executor performs: nests of reads, moves of values in memory. Pure, no I/O.

A step is data: it can be compared, costed and proved without files. A million reads of one strided copy are one `Read`,
whose loops the executor runs through. (The pieces of an elementwise operation are listed one by one: what each needs of
its inputs is another plan.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lowmem_load.planning.copies import Copy
from lowmem_load.planning.expression import Source
from lowmem_load.planning.nest import Axis, Nest, extent, offsets

LOCAL = "local"
"""`ReadCost.origin` of files that do not lie on the network."""


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading costs: `call_s` for each read, and its bytes at `bytes_per_s`.

    Between two wanted pieces lies a gap: reading it along costs its bytes, leaving it out costs another read. The
    defaults were measured on two cores of an AMD EPYC, reading 192 to 3072 of every 6144 bytes from the page cache: 25
    us for each read, of which the system call is the smaller part, and 7.6 GB/s where the gaps are read along. What
    several ranks of a machine read at a time shares the bandwidth of its memory, so it is taken as 5 GB/s.

    Attributes:
        call_s: seconds for each read, beside its bytes.
        bytes_per_s: that one thread reads.
        block_bytes: that a network file system reads as a whole; 1 elsewhere.
        origin: type of the network file system, or `LOCAL`.
    """

    call_s: float = 25e-6
    bytes_per_s: float = 5e9
    block_bytes: int = 1
    origin: str = LOCAL

    @property
    def max_gap_bytes(self) -> int:
        """Of the largest gap that costs no more than another read."""
        return int(self.call_s * self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How large reads are.

    Attributes:
        staging_bytes: of one staged read, and of what one piece of an elementwise operation holds. Larger gains
            nothing on local disks and the page cache, and each reading thread has a buffer of this size.
        direct_bytes: of one read into its destination. Needs no buffer; the bound keeps the progress bar and the
            threads fed.
        max_gap_bytes: between two wanted pieces up to which one read takes both. See `ReadCost`.
    """

    staging_bytes: int = 8 << 20
    direct_bytes: int = 64 << 20
    max_gap_bytes: int = ReadCost().max_gap_bytes


BLOCK_NUMEL = 1 << 16
"""Elements of an elementwise operation that are computed at a time: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Read:
    """Reads of one tensor in a file: for every combination of the `outer` axes, one of `numel` elements.

    Attributes:
        tensor: what is read.
        first: element of the tensor at which the first read starts.
        numel: elements that each read fetches, gaps between wanted ones included.
        outer: one read for every combination.
        nest: where the elements of the first read go; those of the others go `outer.destination` further on.
        is_direct: whether the bytes go straight to their destination, which is host memory of the same dtype.
    """

    tensor: Source
    first: int
    numel: int
    outer: tuple[Axis, ...]
    nest: Nest
    is_direct: bool

    @property
    def num_reads(self) -> int:
        """Number of reads."""
        return math.prod(axis.size for axis in self.outer)

    @property
    def read_bytes(self) -> int:
        """Bytes of all reads."""
        return self.num_reads * self.numel * self.tensor.dtype.itemsize

    @property
    def needed_bytes_each(self) -> int:
        """Bytes of one read that are wanted: an element that goes to several places counts once."""
        return self.nest.source_numel * self.tensor.dtype.itemsize

    def each(self) -> Iterator[tuple[int, int]]:
        """Yield, for each read, its first element of the tensor and its offset in the destination."""
        for start, destination in offsets(self.outer):
            yield self.first + start, destination


@dataclass(frozen=True, slots=True)
class Move:
    """Elements of a value that is in memory when the step runs: number `value` of the plan's values."""

    value: int
    nest: Nest


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of an elementwise operation.

    Attributes:
        numel: elements that it computes.
        inputs: how the same range of each input is filled.
        nest: where the result goes.
    """

    numel: int
    inputs: tuple[Fill, ...]
    nest: Nest


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise operation: number `function` of the plan's functions, piece by piece.

    A piece is computed in blocks, into an input of its dtype where it has one, and else into memory besides.
    """

    operation: str
    function: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


Step = Read | Move | Apply


@dataclass(frozen=True, slots=True)
class Fill:
    """How flat memory of `numel` elements is filled: each of them by exactly one step.

    Attributes:
        needs: numbers of the values that the steps move, in order of first use.
    """

    numel: int
    dtype: torch.dtype
    steps: tuple[Step, ...]
    needs: tuple[int, ...]


def written(step: Step) -> Iterator[Nest]:
    """Yield nests whose destinations are the elements that a step writes."""
    if isinstance(step, Apply):
        for piece in step.pieces:
            yield piece.nest
    elif isinstance(step, Read) and step.outer:
        yield replace(step.nest, axes=(*step.outer, *step.nest.axes))
    else:
        yield step.nest


def plan_reads(copy: Copy, tensor: Source, limits: ReadLimits, *, on_host: bool) -> Iterator[Read]:
    """Yield the reads of `copy`, whose leaf is `tensor`.

    Files can be read straight into a destination that is host memory (`on_host`).
    """
    itemsize = tensor.dtype.itemsize
    if on_host and copy.nest.is_run and not copy.nest.casts:
        yield from _direct(copy.nest, tensor, max(1, limits.direct_bytes // itemsize))
        return
    for part in _staged(copy.nest, itemsize, limits):
        yield Read(tensor, part.first, part.numel, part.outer, part.nest, is_direct=False)


def plan_pieces(copy: Copy, itemsize: int, limits: ReadLimits) -> Iterator[tuple[int, int, Nest]]:
    """Yield the pieces of a copy that fit a staging buffer of elements of `itemsize` bytes.

    Each is: first element of the leaf, elements that it spans, and where they go.
    """
    for part in _staged(copy.nest, itemsize, limits):
        for start, destination in offsets(part.outer):
            yield part.first + start, part.numel, part.nest.shifted(destination=destination)


def _direct(nest: Nest, tensor: Source, step: int) -> Iterator[Read]:
    full, rest = divmod(nest.numel, step)
    for first, count, size in ((0, full, step), (full * step, 1, rest)):
        if count and size:
            run = Nest(0, nest.destination + first, (Axis(size, 1, 1),))
            outer = (Axis(count, step, step),) if count > 1 else ()
            yield Read(tensor, nest.source + first, size, outer, run, is_direct=True)


class _Staged(NamedTuple):
    """One buffer of `numel` elements for every combination of `outer`.

    `first` is the element of the source at which the first buffer starts; `nest` says where its elements go.
    """

    first: int
    numel: int
    outer: tuple[Axis, ...]
    nest: Nest


def _staged(nest: Nest, itemsize: int, limits: ReadLimits) -> Iterator[_Staged]:
    """Yield the parts of a nest of which each buffer fits the staging limit.

    The axes with the smallest source strides are read in one go as long as the gaps between wanted elements stay
    within the limit; the others become separate reads.
    """
    axes = sorted(nest.axes, key=lambda axis: axis.source)
    budget = max(1, limits.staging_bytes // itemsize)
    span, num_inner = 1, 0
    for size, stride, _ in axes:
        if (stride - span) * itemsize > limits.max_gap_bytes or stride + span > budget:
            break
        span, num_inner = (size - 1) * stride + span, num_inner + 1
        if span > budget:
            break
    inner, outer = tuple(axes[:num_inner]), tuple(reversed(axes[num_inner:]))
    if span <= budget:
        yield _Staged(nest.source, span, outer, replace(nest, source=0, axes=inner))
        return
    (widest_size, source, destination), inner = inner[-1], inner[:-1]  # cut into blocks that fit the budget
    below = extent(inner, "source")
    block = max(1, (budget - below) // source + 1)
    full, rest = divmod(widest_size, block)
    for first, count, size in ((0, full, block), (full * block, 1, rest)):
        if not (count and size):
            continue
        blocks = (Axis(count, block * source, block * destination),) if count > 1 else ()
        part = replace(nest, source=0, axes=(*inner, Axis(size, source, destination)))
        yield _Staged(
            nest.source + first * source,
            (size - 1) * source + below,
            (*outer, *blocks),
            part.shifted(destination=first * destination),
        )
