"""What each rank holds of each parameter: by rule, so that no rank has to be asked, or as the ranks say it, once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lowmem_load.planning.ranges import FlatRange, Grid, Region
from lowmem_load.planning.rules import Layout, Mesh, OnFirst, Partitions, Rule
from lowmem_load.saving.local_shards import LocalShard, is_dtensor
from lowmem_load.text import fingerprint


def rules_of(shards: Sequence[LocalShard], world_size: int) -> list[Rule | None]:
    """Return the rule by which each shard lies, None where a DTensor's mesh says only what its own ranks hold."""
    meshes: dict[Any, Mesh] = {}
    return [_rule_of(shard, world_size, meshes) for shard in shards]


def _rule_of(shard: LocalShard, world_size: int, meshes: dict[Any, Mesh]) -> Rule | None:
    tensor = shard.tensor
    if is_dtensor(tensor):
        from lowmem_load.dtensor.mesh import cuts_of

        return cuts_of(shard.source.name, tensor, world_size, meshes)
    if shard.is_partitioned:
        assert "deepspeed" in sys.modules
        from lowmem_load.ds.parameters import full_numel, group_size_of

        return Partitions(full_numel(tensor), group_size_of(tensor))
    return OnFirst(tensor.numel())


def digest_of(rules: Sequence[Rule | None]) -> str:
    """Return a digest of all that the rules say."""
    numbers: dict[Rule | None, int] = {}
    chosen = [numbers.setdefault(rule, len(numbers)) for rule in rules]
    return fingerprint((*map(repr, numbers), repr(chosen)))


def layouts_by_rule(
    shards: Sequence[LocalShard], rules: Sequence[Rule | None], rank: int, world_size: int
) -> dict[str, Layout] | None:
    """Return the layout of each parameter; None if a rule is missing, or is not that of this rank's elements."""
    layouts: dict[Rule, Layout] = {}
    named: dict[str, Layout] = {}
    for shard, rule in zip(shards, rules, strict=True):
        if rule is None:
            return None
        if rule not in layouts:
            layouts[rule] = Layout(rule.regions(world_size), shard.source.shape)
        layout = named[shard.source.name] = layouts[rule]
        if layout.regions[rank] != shard.local_region and layout.regions[rank].numel + shard.local_region.numel:
            return None
    return named


Regions = tuple[list[Any], list[int]]
"""The regions that a rank holds, as JSON data: each one that occurs, and its number for each shard."""


def encoded(shards: Sequence[LocalShard]) -> Regions:
    """Return the regions that this rank holds."""
    numbers: dict[Region, int] = {}
    chosen = [numbers.setdefault(shard.local_region, len(numbers)) for shard in shards]
    return [[r.start, r.end] if isinstance(r, FlatRange) else [r.runs] for r in numbers], chosen


def layouts_of(payloads: Sequence[Regions], shards: Sequence[LocalShard]) -> Mapping[str, Layout]:
    """Return the layout of each parameter, from what all ranks have encoded."""
    regions = [[*map(_decoded, fields)] for fields, _ in payloads]
    layouts: dict[Any, Layout] = {}
    named: dict[str, Layout] = {}
    for shard, numbers in zip(shards, zip(*(chosen for _, chosen in payloads), strict=True), strict=True):
        key = shard.source.shape, numbers
        if key not in layouts:
            of_ranks = [regions[rank][number] for rank, number in enumerate(numbers)]
            layouts[key] = Layout(of_ranks, shard.source.shape)
        named[shard.source.name] = layouts[key]
    return named


def _decoded(fields: Any) -> Region:
    if len(fields) == 2:
        return FlatRange(*fields)
    return Grid(tuple(tuple((start, end) for start, end in dim) for dim in fields[0]))
