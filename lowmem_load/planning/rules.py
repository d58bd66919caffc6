"""Rules by which a tensor lies on the ranks of a group: each rank knows what all others hold, and asks none. Pure.

[Note: rules] The ranks agree on a digest of all rules, and each one proves that its own elements are those of the rule.
So the rule holds for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lowmem_load.planning.expression import Shape
from lowmem_load.planning.ranges import FlatRange, Grid, Region, bounding_range, partition_range
from lowmem_load.planning.splits import Split, grid_of

NOTHING = FlatRange(0, 0)


@dataclass(frozen=True, slots=True)
class OnFirst:
    """A tensor of which rank 0 counts, as all ranks hold it in full."""

    numel: int

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank holds."""
        return [FlatRange(0, self.numel), *[NOTHING] * (world_size - 1)]


@dataclass(frozen=True, slots=True)
class Partitions:
    """A ZeRO-3 parameter. Each `shard_size` ranks in a row hold one replica: all ranks, or fewer under MiCS."""

    numel: int
    shard_size: int

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank holds."""
        replica = [partition_range(self.numel, rank, self.shard_size) for rank in range(self.shard_size)]
        return [replica[rank % self.shard_size] for rank in range(world_size)]


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The ranks of a device mesh, row-major, and its shape. Compared by identity: there are few, of many ranks."""

    ranks: tuple[int, ...]
    shape: Shape

    def coordinate(self, place: int) -> list[int]:
        """Return the coordinate of `ranks[place]`."""
        indices: list[int] = []
        for size in reversed(self.shape):
            place, index = divmod(place, size)
            indices.insert(0, index)
        return indices

    def dims_along(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """Return the dims along which these ranks follow each other, row-major, from the first one; None if none do."""
        places = {rank: place for place, rank in enumerate(self.ranks)}
        coordinates = [self.coordinate(places[rank]) for rank in ranks]
        dims = tuple(dim for dim in range(len(self.shape)) if len({indices[dim] for indices in coordinates}) > 1)
        are_rows = [self.index(indices, dims) for indices in coordinates] == list(range(len(ranks)))
        return dims if are_rows and math.prod(self.shape[dim] for dim in dims) == len(ranks) else None

    def index(self, coordinate: Sequence[int], dims: Sequence[int]) -> int:
        """Return the number of a coordinate among those that differ along these dims, row-major."""
        return functools.reduce(lambda number, dim: number * self.shape[dim] + coordinate[dim], dims, 0)


@dataclass(frozen=True, slots=True)
class Cuts:
    """A DTensor. Each cut is the dims of the mesh that it runs along, and a split whose index counts along them."""

    shape: Shape
    mesh: Mesh
    cuts: tuple[tuple[tuple[int, ...], Split], ...]

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank holds; none on those that are not in the mesh."""
        regions: list[Region] = [Grid((((0, 0),),))] * world_size
        alike: dict[tuple[int, ...], Region] = {}
        for place, rank in enumerate(self.mesh.ranks):
            coordinate = self.mesh.coordinate(place)
            indices = tuple(self.mesh.index(coordinate, dims) for dims, _ in self.cuts)
            if indices not in alike:
                splits = [replace(cut, index=index) for (_, cut), index in zip(self.cuts, indices, strict=True)]
                alike[indices] = grid_of(self.shape, splits)
            regions[rank] = alike[indices]
        return regions


Rule = OnFirst | Partitions | Cuts


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold some elements, in order. `span` is the smallest flat range that has them all."""

    region: Region
    span: FlatRange
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What each rank holds of tensors of one shape that lie alike: by rank, and the ranks by what they hold."""

    regions: Sequence[Region]
    shape: Shape
    holders: Sequence[Holders] = field(init=False)

    def __post_init__(self) -> None:
        ranks: dict[Region, list[int]] = {}
        for rank, region in enumerate(self.regions):
            if region.numel:
                ranks.setdefault(region, []).append(rank)
        all_holders = [
            Holders(region, bounding_range(region, self.shape), of_region) for region, of_region in ranks.items()
        ]
        object.__setattr__(self, "holders", all_holders)
