"""Which elements of a tensor a rank holds: flat ranges (ZeRO-3 partitions) and grids (DTensor shards). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements `[start, end)` of a row-major tensor."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        """Elements in the range."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Grid:
    """Elements whose index along each dim `d` lies in one of `runs[d]`, held as a row-major tensor of shape `sizes`.

    A run is `[start, end)`. The runs of a dim do not overlap, and are in the order in which memory holds them.
    """

    runs: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Indices along each dim."""
        return tuple(sum(end - start for start, end in dim) for dim in self.runs)

    @property
    def numel(self) -> int:
        """Elements in the grid."""
        return math.prod(self.sizes)


Region = FlatRange | Grid
"""The elements of a tensor that one piece of memory holds."""


def bounding_range(region: Region, shape: tuple[int, ...]) -> FlatRange:
    """Return the smallest flat range of a tensor of `shape` that holds all elements of `region`."""
    if isinstance(region, FlatRange):
        return region
    if not region.numel:
        return FlatRange(0, 0)
    first = last = 0
    for runs, extent in zip(region.runs, shape, strict=True):
        indices = [index for start, end in runs if start < end for index in (start, end - 1)]
        first, last = first * extent + min(indices), last * extent + max(indices)
    return FlatRange(first, last + 1)


def flat_ranges(grid: Grid, shape: tuple[int, ...]) -> Iterator[FlatRange]:
    """Yield the elements of a grid of a tensor of `shape` as flat ranges, in the order in which memory holds them."""
    if not grid.numel:
        return
    runs, row = [(0, 1)], 1
    for dim, size in zip(reversed(grid.runs), reversed(shape), strict=True):  # from the last dim: rows join if complete
        if runs == [(0, row)]:
            runs = [(start * row, end * row) for start, end in dim]
        else:
            indices = [index * row for start, end in dim for index in range(start, end)]
            runs = [(index + start, index + end) for index in indices for start, end in runs]
        row *= size
    yield from (FlatRange(start, end) for start, end in runs)


def partition_numel(numel: int, world_size: int) -> int:
    """Return the elements of a ZeRO-3 partition with its padding, which are the same on all ranks.

    Source: deepspeed 0.19.8 `runtime/zero/partition_parameters.py`, `_aligned_size`.
    """
    return -(-numel // world_size)


def partition_range(numel: int, rank: int, world_size: int) -> FlatRange:
    """Return the flat range of a parameter of `numel` elements that `rank` owns, without padding.

    Source: deepspeed 0.19.8 `runtime/zero/partition_parameters.py`, `_padding_size` and `_partition_param`.
    """
    size = partition_numel(numel, world_size)
    return FlatRange(min(rank * size, numel), min((rank + 1) * size, numel))


def secondary_range(numel: int, rank: int, world_size: int, secondary_size: int) -> tuple[FlatRange, int]:
    """Return the range of hpZ's secondary partition on `rank`, without padding, and its elements with padding.

    Among `secondary_size` ranks each holds a whole number of partitions: padding is that of partitions.
    """
    size = partition_numel(numel, world_size) * (world_size // secondary_size)
    first = size * (rank % secondary_size)
    return FlatRange(min(first, numel), min(first + size, numel)), size
