"""What each rank holds of each parameter: by rule, so that no rank has to be asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.rules import Layout, OnFirst, Partitions, Rule
from lowmem_load.saving.local_shards import LocalShard, is_dtensor
from lowmem_load.text import fingerprint


def rules_of(shards: Sequence[LocalShard]) -> list[Rule]:
    """Return the rule by which each shard lies."""
    meshes: dict[Any, Any] = {}
    return [_rule_of(shard, meshes) for shard in shards]


def _rule_of(shard: LocalShard, meshes: dict[Any, Any]) -> Rule:
    tensor = shard.tensor
    if is_dtensor(tensor):
        from lowmem_load.dtensor.mesh import cuts_of

        return cuts_of(shard.source.name, tensor, meshes)
    if shard.is_partitioned:
        assert "deepspeed" in sys.modules
        from lowmem_load.ds.parameters import full_numel

        return Partitions(full_numel(tensor))
    return OnFirst(tensor.numel())


def digest_of_rules(rules: Sequence[Rule]) -> str:
    """Return a digest of all that the rules say."""
    numbers: dict[Rule, int] = {}
    chosen = [numbers.setdefault(rule, len(numbers)) for rule in rules]
    return fingerprint((*map(repr, numbers), repr(chosen)))


def layouts_by_rule(
    shards: Sequence[LocalShard], rules: Sequence[Rule], rank: int, world_size: int
) -> dict[str, Layout]:
    """Return the layout of each parameter. Raise UnsupportedError unless that of this rank's elements is its rule's."""
    layouts: dict[Rule, Layout] = {}
    named: dict[str, Layout] = {}
    for shard, rule in zip(shards, rules, strict=True):
        if rule not in layouts:
            layouts[rule] = Layout(rule.regions(world_size), shard.source.shape)
        layout = named[shard.source.name] = layouts[rule]
        by_rule, here = layout.regions[rank], shard.local_region
        if by_rule != here and by_rule.numel + here.numel:
            raise UnsupportedError(f"{shard.source.name}: this rank holds {here} of it, and by {rule} {by_rule}")
    return named
