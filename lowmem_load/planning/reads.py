"""From copies to the steps that an executor performs: nests of reads, moves of values in memory. Pure, no I/O.

A step is data: it can be compared, costed and proved without files. A million reads of one strided copy are one `Read`,
whose loops the executor runs through. (The pieces of an elementwise operation are listed one by one: what each needs of
its inputs is another plan.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowmem_load.planning.copies import Copy
from lowmem_load.planning.expression import Source

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


class Loop(NamedTuple):
    """`size` iterations, each `source` and `destination` elements further on."""

    size: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Moves elements of a flat buffer to a flat destination, cast through `casts` in order.

    For every combination of the loops, element `source_start + sum(t * source)` of the buffer goes to element
    `destination_start + sum(t * destination)`.
    """

    source_start: int
    destination_start: int
    loops: tuple[Loop, ...]
    casts: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Reads of one tensor in a file: for every combination of the `outer` loops, one of `numel` elements.

    Attributes:
        tensor: what is read.
        first: element of the tensor at which the first read starts.
        numel: elements that each read fetches, gaps between wanted ones included.
        outer: one read for every combination.
        scatter: where what the first read fetched goes; the others' goes `outer.destination` further on.
        is_direct: whether the bytes go straight to their destination, which is host memory of the same dtype.
    """

    tensor: Source
    first: int
    numel: int
    outer: tuple[Loop, ...]
    scatter: Scatter
    is_direct: bool

    @property
    def num_reads(self) -> int:
        """Number of reads."""
        return math.prod(loop.size for loop in self.outer)

    @property
    def read_bytes(self) -> int:
        """Bytes of all reads."""
        return self.num_reads * self.numel * self.tensor.dtype.itemsize

    @property
    def needed_bytes_each(self) -> int:
        """Bytes of one read that are wanted: an element that goes to several places counts once."""
        return math.prod(loop.size for loop in self.scatter.loops if loop.source) * self.tensor.dtype.itemsize

    def each(self) -> Iterator[tuple[int, int]]:
        """Yield, for each read, its first element of the tensor and its offset in the destination."""
        for start, destination in _offsets(self.outer):
            yield self.first + start, destination


@dataclass(frozen=True, slots=True)
class Move:
    """Elements of a value that is in memory when the step runs: number `value` of the plan's values."""

    value: int
    scatter: Scatter


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of an elementwise operation.

    Attributes:
        numel: elements that it computes.
        inputs: how the same range of each input is filled.
        scatter: where the result goes.
    """

    numel: int
    inputs: tuple[Fill, ...]
    scatter: Scatter


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


@dataclass(frozen=True, slots=True)
class Written:
    """The destination side of a step, for the proof of coverage."""

    destination_start: int
    sizes: tuple[int, ...]
    destination_strides: tuple[int, ...]


def written(step: Step) -> Iterator[Written]:
    """Yield the elements of the destination that a step writes."""
    if isinstance(step, Apply):
        for piece in step.pieces:
            yield _written(piece.scatter, ())
    else:
        yield _written(step.scatter, step.outer if isinstance(step, Read) else ())


def _written(scatter: Scatter, outer: tuple[Loop, ...]) -> Written:
    loops = (*outer, *scatter.loops) or (Loop(1, 1, 1),)
    return Written(
        scatter.destination_start, tuple(loop.size for loop in loops), tuple(loop.destination for loop in loops)
    )


def scatter_of(copy: Copy, source_start: int) -> Scatter:
    """Return how the elements of `copy` go from a buffer in which the first of them is at `source_start`."""
    return Scatter(source_start, copy.destination_start, _loops(copy), copy.casts)


def plan_reads(copy: Copy, tensor: Source, limits: ReadLimits, *, on_host: bool) -> Iterator[Read]:
    """Yield the reads of `copy`, whose leaf is `tensor`.

    Args:
        copy: what to read.
        tensor: its leaf.
        limits: how large reads are.
        on_host: whether the destination is host memory, into which files can be read.
    """
    itemsize = tensor.dtype.itemsize
    if copy.is_contiguous and not copy.casts and on_host:
        yield from _direct(copy, tensor, max(1, limits.direct_bytes // itemsize))
        return
    for nest in _nests(copy, itemsize, limits):
        scatter = Scatter(0, copy.destination_start + nest.destination, nest.inner, copy.casts)
        yield Read(tensor, copy.leaf_start + nest.source, nest.numel, nest.outer, scatter, is_direct=False)


def plan_pieces(copy: Copy, itemsize: int, limits: ReadLimits) -> Iterator[tuple[int, int, Scatter]]:
    """Yield the pieces of a copy that fit a staging buffer of elements of `itemsize` bytes.

    Each is: first element of the leaf, elements that it spans, and where they go.
    """
    for nest in _nests(copy, itemsize, limits):
        for start, destination in _offsets(nest.outer):
            first = copy.leaf_start + nest.source + start
            yield (
                first,
                nest.numel,
                Scatter(0, copy.destination_start + nest.destination + destination, nest.inner, copy.casts),
            )


def _direct(copy: Copy, tensor: Source, step: int) -> Iterator[Read]:
    full, rest = divmod(copy.numel, step)
    for first, count, size in ((0, full, step), (full * step, 1, rest)):
        if count and size:
            scatter = Scatter(0, copy.destination_start + first, (Loop(size, 1, 1),), ())
            outer = (Loop(count, step, step),) if count > 1 else ()
            yield Read(tensor, copy.leaf_start + first, size, outer, scatter, is_direct=True)


class _Nest(NamedTuple):
    """Reads of `numel` elements each; `source` and `destination` are offsets of the first in elements."""

    source: int
    destination: int
    numel: int
    outer: tuple[Loop, ...]
    inner: tuple[Loop, ...]


def _loops(copy: Copy) -> tuple[Loop, ...]:
    return tuple(map(Loop, copy.sizes, copy.leaf_strides, copy.destination_strides))


def _nests(copy: Copy, itemsize: int, limits: ReadLimits) -> Iterator[_Nest]:
    """Yield nests of which each read needs at most one staging buffer.

    The loops with the smallest source strides are read in one go as long as the gaps between wanted elements stay
    within the limit; the others become separate reads.
    """
    loops = sorted(_loops(copy), key=lambda loop: loop.source)
    budget = max(1, limits.staging_bytes // itemsize)
    span, num_inner = 1, 0
    for size, stride, _ in loops:
        if (stride - span) * itemsize > limits.max_gap_bytes or stride + span > budget:
            break
        span, num_inner = (size - 1) * stride + span, num_inner + 1
        if span > budget:
            break
    inner, outer = tuple(loops[:num_inner]), tuple(reversed(loops[num_inner:]))
    if span <= budget:
        yield _Nest(0, 0, span, outer, inner)
        return
    widest = inner[-1]  # cut into blocks that fit the budget
    below = 1 + sum((loop.size - 1) * loop.source for loop in inner[:-1])
    block = max(1, (budget - below) // widest.source + 1)
    full, rest = divmod(widest.size, block)
    for first, count, size in ((0, full, block), (full * block, 1, rest)):
        if not (count and size):
            continue
        blocks = (Loop(count, block * widest.source, block * widest.destination),) if count > 1 else ()
        yield _Nest(
            first * widest.source,
            first * widest.destination,
            (size - 1) * widest.source + below,
            (*outer, *blocks),
            (*inner[:-1], Loop(size, widest.source, widest.destination)),
        )


def _offsets(loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    """Yield (source, destination) offsets of every combination of `loops`, the last of them running fastest."""
    for iterations in itertools.product(*(range(loop.size) for loop in loops)):
        pairs = list(zip(iterations, loops, strict=True))
        yield sum(t * loop.source for t, loop in pairs), sum(t * loop.destination for t, loop in pairs)
