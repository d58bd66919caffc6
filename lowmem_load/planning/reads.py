"""Steps: what the executor does to fill memory, made from copies. Pure, no I/O.

A step is data: it can be compared, costed and proved without files. The million reads of a strided copy are one `Read`
with loops, which the executor runs through. Only the pieces of an elementwise operation are listed one by one, because
the inputs of each have plans of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lowmem_load.planning.expression import Source, Strided, row_major_strides
from lowmem_load.planning.nest import Axis, Copy, Nest, extent, offsets


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading costs: `call_s` for each read, and its bytes at `bytes_per_s`.

    Between two needed pieces of a file lies a gap. Reading the gap as well costs its bytes; skipping it costs one more
    read. The defaults were measured on two cores of an AMD EPYC, reading from the page cache: 25 us for each read, most
    of it in Python, and 7.6 GB/s. Ranks that read at the same time share the memory bandwidth, hence 5 GB/s.
    """

    call_s: float = 25e-6
    bytes_per_s: float = 5e9  # of one thread
    block_bytes: int = 1  # that a network file system reads as a whole; 1 for others
    request_bytes: int = 0  # most bytes of a request to a remote store; 0 for file systems

    @property
    def max_gap_bytes(self) -> int:
        """Bytes of the largest gap that costs no more than another read."""
        return int(self.call_s * self.bytes_per_s)


class ReadLimits(NamedTuple):
    """How large reads are.

    Attributes:
        staging_bytes: most bytes of a staged read, and of the inputs and the result of one piece of an operation. Each
            reading thread has a buffer of this size; larger ones were not faster on local disks or the page cache.
        direct_bytes: most bytes of a read straight into its destination. The limit is there for the progress bar, and
            so that several threads share a large partition.
        max_gap_bytes: largest gap that is read along. See `ReadCost`.
    """

    staging_bytes: int = 8 << 20
    direct_bytes: int = 64 << 20
    max_gap_bytes: int = ReadCost().max_gap_bytes


BLOCK_NUMEL = 1 << 16
"""Elements of an elementwise operation that are computed at a time. So many stay in the processor's cache."""

GROUPED_NUMEL = 1 << 18
"""Elements of a part, with groups: bitsandbytes takes 15 bytes for each on the CPU, and a GPU wants many at a time."""


@dataclass(frozen=True, slots=True)
class Read:
    """Reads of one source tensor: one read of `numel` elements for each combination of the `outer` axes.

    If it is direct, the bytes go straight into the destination, which is host memory of the same dtype.
    """

    tensor: Source
    first: int  # element of the tensor at which the first read starts
    numel: int  # of each read, gaps included
    outer: tuple[Axis, ...]
    nest: Nest  # of the elements of the first read; those of the others go further on by `outer`'s destination
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
        """Bytes of one read that are needed. An element that goes to several places counts once."""
        return math.prod(axis.size for axis in self.nest.axes if axis.source) * self.tensor.dtype.itemsize

    def iterations(self) -> Iterator[tuple[int, int]]:
        """Yield for each read its first element of the tensor, and how far its elements go further on."""
        for start, destination in offsets(self.outer):
            yield self.first + start, destination


class Move(NamedTuple):
    """Moves elements of the plan's value number `value`, which is in memory when the step runs."""

    value: int
    nest: Nest


class ApplyPiece(NamedTuple):
    """One call of an elementwise operation that gives `numel` elements; `inputs` fill the same range of each input."""

    numel: int
    inputs: tuple[Fill, ...]
    nest: Nest


class Apply(NamedTuple):
    """An elementwise operation: function number `function` of the constants, applied piece by piece.

    For groups, see `Elementwise`.
    """

    operation: str
    function: int
    dtype: torch.dtype
    pieces: tuple[ApplyPiece, ...]
    group: int = 1
    part_group: int = 1


Step = Read | Move | Apply


@dataclass(frozen=True, slots=True)
class Fill:
    """How flat memory is filled: each element by exactly one step. `needs` numbers the values that the steps move."""

    numel: int
    dtype: torch.dtype
    steps: tuple[Step, ...]
    needs: tuple[int, ...]


def written_nests(step: Step) -> Iterator[Nest]:
    """Yield nests whose destinations are all elements that a step writes."""
    if isinstance(step, Apply):
        for piece in step.pieces:
            yield piece.nest
    elif isinstance(step, Read) and step.outer:
        yield replace(step.nest, axes=(*step.outer, *step.nest.axes))
    else:
        yield step.nest


def plan_reads(copy: Copy, tensor: Source, limits: ReadLimits, *, on_host: bool) -> Iterator[Read]:
    """Yield the reads of `copy`, whose leaf is `tensor`. Only host memory (`on_host`) can be read into directly."""
    can_be_direct = on_host and not copy.nest.casts
    if can_be_direct and copy.nest.is_run:
        limits = limits._replace(staging_bytes=limits.direct_bytes)
    for first, numel, outer, nest in _blocks(copy.nest, tensor.dtype.itemsize, limits):
        yield Read(tensor, first, numel, outer, nest, can_be_direct and nest.is_run)


def plan_pieces(copy: Copy, itemsize: int, limits: ReadLimits) -> Iterator[tuple[int, int, Nest]]:
    """Yield first element, elements spanned and nest of each piece of a copy that fits the staging limit.

    The leaf is elementwise. Pieces end where rows of its parts do: one that ends within a block of a scale would have
    the same scales read several times.
    """
    dims = (part.dims for part in getattr(copy.leaf, "parts", ()) if isinstance(part, Strided))
    rows = (row for each in dims for row in row_major_strides([size for size, _ in each]))
    row = max((row for row in rows if row * itemsize <= limits.staging_bytes), default=1)
    for first, numel, outer, nest in _blocks(copy.nest, itemsize, limits, row):
        for start, destination in offsets(outer):
            yield first + start, numel, nest.shifted(destination=destination)


def _blocks(
    nest: Nest, itemsize: int, limits: ReadLimits, row: int = 1
) -> Iterator[tuple[int, int, tuple[Axis, ...], Nest]]:
    # Yields `first`, `numel`, `outer` and `nest` of reads. Axes with small source strides are read at once, while gaps
    # are within the limit. Others become loops of reads. They end at the end of a row of the source, where they can.
    axes = sorted(nest.axes, key=lambda axis: axis.source)  # the order of the file, not of the destination
    budget = max(1, limits.staging_bytes // itemsize)
    span, num_inner = 1, 0  # elements that the axes so far reach from the first to the last, and their number
    for size, stride, _ in axes:
        if (stride - span) * itemsize > limits.max_gap_bytes or stride + span > budget:
            break
        span, num_inner = (size - 1) * stride + span, num_inner + 1
        if span > budget:
            break
    inner, outer = tuple(axes[:num_inner]), tuple(reversed(axes[num_inner:]))
    if span <= budget:
        yield nest.source, span, outer, replace(nest, source=0, axes=inner)
        return
    (widest_size, source, destination), inner = inner[-1], inner[:-1]  # the widest is cut so that blocks fit
    below = extent(inner, "source")
    block = max(1, (budget - below) // source + 1)
    head, per_row = 0, row // source if row % source == 0 else 1
    if block >= per_row > 1:
        head = -(nest.source // source) % per_row  # the start, up to the end of a row, and as many rows as fit
        head += (block - head) // per_row * per_row
        block -= block % per_row
    full, rest = divmod(widest_size - head, block)
    for first, count, size in ((0, 1, head), (head, full, block), (head + full * block, 1, rest)):
        if not (count and size):
            continue
        blocks = (Axis(count, block * source, block * destination),) if count > 1 else ()
        part = replace(nest, source=0, axes=(*inner, Axis(size, source, destination)))
        numel = (size - 1) * source + below
        yield nest.source + first * source, numel, (*outer, *blocks), part.shifted(destination=first * destination)
