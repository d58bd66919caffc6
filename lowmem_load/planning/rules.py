"""Rules by which a tensor lies on the ranks of a group: each rank knows what all others hold, and asks none. Pure.

[Note: rules] The ranks agree on a digest of all rules, and each one proves that its own elements are those of the rule.
So the rule holds for all of them.
"""

from __future__ import annotations

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
    """A ZeRO-3 parameter, which all ranks hold in equal pieces, but for the last ones."""

    numel: int

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank holds."""
        return [partition_range(self.numel, rank, world_size) for rank in range(world_size)]


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
        """Return the dims of which these ranks are one line, in any order; None if there are none."""
        places = {rank: place for place, rank in enumerate(self.ranks)}
        coordinates = [self.coordinate(places[rank]) for rank in ranks]
        dims = tuple(dim for dim in range(len(self.shape)) if len({indices[dim] for indices in coordinates}) > 1)
        return dims if math.prod(self.shape[dim] for dim in dims) == len(ranks) else None

    def group_ranks(self, dims: Sequence[int]) -> dict[int, int]:
        """Return the number of each rank in the process group along these dims.

        torch sorts the ranks of a group, so this is not the rank's coordinate where the mesh has another order.

        Source: torch 2.13 `distributed/distributed_c10d.py`, `new_group` and `split_group`.
        """
        lines: dict[tuple[int, ...], list[int]] = {}
        for place, rank in enumerate(self.ranks):
            across = tuple(index for dim, index in enumerate(self.coordinate(place)) if dim not in dims)
            lines.setdefault(across, []).append(rank)
        return {rank: number for line in lines.values() for number, rank in enumerate(sorted(line))}


@dataclass(frozen=True, slots=True)
class Cuts:
    """A DTensor. Each cut is the dims of the mesh along which it runs, and a split; its index is the rank's there."""

    shape: Shape
    mesh: Mesh
    cuts: tuple[tuple[tuple[int, ...], Split], ...]

    def regions(self, world_size: int) -> list[Region]:
        """Return the elements that each rank holds; none on those that are not in the mesh."""
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
