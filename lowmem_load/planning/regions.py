"""Which elements of a tensor a rank owns: flat ranges (ZeRO-3 partitions) and grids (DTensor shards). Pure.

[Note: rules] By a rule each rank knows what all others own, and asks none. The ranks agree on a digest of all rules,
and each one proves that its own elements are those of the rule. So the rule is true for all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lowmem_load.planning.expression import Shape

Run = tuple[int, int]
"""Indices `[start, end)` along one dim."""


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
    """Elements whose index along each dim `d` lies in one of `runs[d]`, in memory as a row-major tensor of `sizes`.

    A run is `[start, end)`. The runs of a dim do not overlap, and are in the order of memory.
    """

    runs: tuple[tuple[Run, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Indices along each dim."""
        return tuple(sum(end - start for start, end in dim) for dim in self.runs)

    @property
    def numel(self) -> int:
        """Elements in the grid."""
        return math.prod(self.sizes)

    def boxes(self) -> Iterator[tuple[Shape, Shape, Shape]]:
        """Yield one run of each dim, in all combinations: its first indices in the memory and the tensor, its shape."""
        dims = []
        for runs in self.runs:
            lengths = [end - start for start, end in runs]
            places = itertools.accumulate(lengths, initial=0)
            dims.append([(place, run[0], length) for place, run, length in zip(places, runs, lengths, strict=False)])
        for box in itertools.product(*dims):
            yield tuple(run[0] for run in box), tuple(run[1] for run in box), tuple(run[2] for run in box)


NOTHING = FlatRange(0, 0)

Region = FlatRange | Grid
"""The elements of a tensor that are in one piece of memory."""


def bounding_range(region: Region, shape: tuple[int, ...]) -> FlatRange:
    """Return the smallest flat range of a tensor of `shape` that has all elements of `region`."""
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
    """Yield the elements of a grid of a tensor of `shape` as flat ranges, in the order of memory."""
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


# -- partitions of ZeRO-3 ----------------------------------------------------------------------------------------------


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

    Among `secondary_size` ranks each keeps several complete partitions, so the padding is that of partitions.
    """
    size = partition_numel(numel, world_size) * (world_size // secondary_size)
    first = size * (rank % secondary_size)
    return FlatRange(min(first, numel), min(first + size, numel)), size


# -- cuts of a tensor's dims among ranks, as DTensor makes them --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """One cut of dim `dim` of a tensor among the ranks of one mesh dim."""

    dim: int
    num_chunks: int  # ranks along the mesh dim
    index: int  # of the chunk that this rank owns
    split_factor: int = 1  # groups that the dim is cut into first; each is then cut into chunks, as by `_StridedShard`


def grid_of(shape: Sequence[int], splits: Iterable[Split]) -> Grid:
    """Return the elements of a tensor of `shape` that remain after the splits, in order. Pure.

    Source: torch 2.13 `distributed/tensor/placement_types.py`, `Shard._split_tensor`, `_StridedShard._split_tensor`.
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for split in splits:
        # The groups of a strided split are what a later mesh dim, such as tensor parallelism, gives to its ranks.
        groups = [_chunk(runs[split.dim], split.split_factor, number) for number in range(split.split_factor)]
        runs[split.dim] = [run for group in groups for run in _chunk(group, split.num_chunks, split.index)]
    return Grid(tuple(tuple(_joined(dim)) for dim in runs))


def _chunk(runs: Sequence[Run], num_chunks: int, index: int) -> list[Run]:
    """Return the part of some runs that is chunk `index` of `num_chunks`, by the rule of `torch.chunk`."""
    size = -(-sum(end - start for start, end in runs) // num_chunks)
    first, last = index * size, (index + 1) * size  # positions in the runs laid end to end
    chunk, position = [], 0
    for start, end in runs:
        low, high = max(first, position), min(last, position + end - start)
        if low < high:
            chunk.append((start + low - position, start + high - position))
        position += end - start
    return chunk


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Return runs with neighbors joined; `(0, 0)` if there are none."""
    joined: list[Run] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined or [(0, 0)]


# -- rules by which a tensor lies on the ranks of a group; see [Note: rules] -------------------------------------------


@dataclass(frozen=True, slots=True)
class OnFirst:
    """A tensor of which rank 0 counts, as all ranks keep it in full."""

    numel: int

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank owns."""
        return [FlatRange(0, self.numel), *[NOTHING] * (world_size - 1)]


@dataclass(frozen=True, slots=True)
class Partitions:
    """A ZeRO-3 parameter, which all ranks own in equal pieces, but for the last ones."""

    numel: int

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank owns."""
        return [partition_range(self.numel, rank, world_size) for rank in range(world_size)]


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The ranks of a device mesh, row-major, and its shape. Compared by identity: there are few, of many ranks."""

    ranks: tuple[int, ...]
    shape: Shape

    def dims_along(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """Return the dims of which these ranks are one line, in any order; None if there are none."""
        coordinates = np.argwhere(np.isin(self._grid, ranks))
        dims = tuple(int(dim) for dim in np.flatnonzero(np.ptp(coordinates, axis=0)))
        return dims if math.prod(self.shape[dim] for dim in dims) == len(ranks) else None

    def group_ranks(self, dims: Sequence[int]) -> dict[int, int]:
        """Return the number of each rank in the process group along these dims.

        torch sorts the ranks of a group, so this is not the rank's coordinate where the mesh has another order.

        Source: torch 2.13 `distributed/distributed_c10d.py`, `new_group` and `split_group`.
        """
        size = math.prod(self.shape[dim] for dim in dims)
        lines = np.moveaxis(self._grid, dims, range(-len(dims), 0)).reshape(-1, size)
        return {rank: number for line in np.sort(lines).tolist() for number, rank in enumerate(line)}

    @property
    def _grid(self) -> Any:
        return np.array(self.ranks).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Cuts:
    """A DTensor. Each cut is the dims of the mesh along which it runs, and a split; its index is the rank's there."""

    shape: Shape
    mesh: Mesh
    cuts: tuple[tuple[tuple[int, ...], Split], ...]

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank owns; none on those that are not in the mesh."""
        regions: list[Region] = [Grid((((0, 0),),))] * world_size
        numbers = [self.mesh.group_ranks(dims) for dims, _ in self.cuts]
        alike: dict[tuple[int, ...], Region] = {}
        for rank in self.mesh.ranks:
            indices = tuple(numbered[rank] for numbered in numbers)
            if indices not in alike:
                splits = [replace(cut, index=index) for (_, cut), index in zip(self.cuts, indices, strict=True)]
                alike[indices] = grid_of(self.shape, splits)
            regions[rank] = alike[indices]
        return regions


Rule = OnFirst | Partitions | Cuts


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that own some elements, in order. `span` is the smallest flat range that has them all."""

    region: Region
    span: FlatRange
    ranks: Sequence[int]


@dataclass(frozen=True, eq=False)
class Distribution:
    """What each rank owns of tensors of one shape that lie alike: by rank, and the ranks by what they own."""

    regions: Sequence[Region]
    shape: Shape

    @cached_property
    def holders(self) -> list[Holders]:
        """The ranks that own each region."""
        ranks: dict[Region, list[int]] = {}
        for rank, region in enumerate(self.regions):
            if region.numel:
                ranks.setdefault(region, []).append(rank)
        return [Holders(region, bounding_range(region, self.shape), of_region) for region, of_region in ranks.items()]
