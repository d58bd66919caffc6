"""Which target a model gets under which settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.errors import ConfigError
from lowmem_load.planning.load_plan import REPLICATED
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.targets.make_target import Partial, target_maker
from lowmem_load.targets.target import Target
from lowmem_load.targets.whole_target import Whole
from lowmem_load.targets.zero3 import KIND, Zero3

GPU = torch.device("cuda")


def settings(
    stage: int, *, world_size: int = 2, partition: Partition | None = None, must_match: bool = False, **zero: Any
) -> Settings:
    config = {"zero_optimization": {"stage": stage, **zero}}
    return read_settings(config, world_size=world_size, partition=partition, must_match=must_match).for_model(None)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"body": nn.Linear(3, 4, bias=False), "head": nn.Linear(3, 5, bias=False)})


def layouts(target: Target) -> dict[str, tuple[str, tuple[Any, ...], bool]]:
    found = {name: target.layout(name, parameter) for name, parameter in model().named_parameters()}
    return {name: (layout.kind, layout.regions, layout.on_host) for name, layout in found.items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_all_is_whole_in_host_memory(stage: int) -> None:
    target = target_maker(1, GPU)(settings(stage), model())
    assert type(target) is Whole
    assert target.device == torch.device("cpu")
    assert layouts(target) == {
        "body.weight": (REPLICATED, (FlatRange(0, 12),), True),
        "head.weight": (REPLICATED, (FlatRange(0, 15),), True),
    }


def test_stage_3_cuts_up_all() -> None:
    target = target_maker(1, GPU)(settings(3), model())
    assert type(target) is Zero3
    assert target.device == GPU
    assert layouts(target) == {
        "body.weight": (KIND, (FlatRange(6, 12),), False),
        "head.weight": (KIND, (FlatRange(8, 15),), False),  # ceil(15 / 2) = 8
    }


def test_hpz_keeps_a_secondary_partition() -> None:
    target = target_maker(2, GPU)(settings(3, world_size=4, zero_hpz_partition_size=2), model())
    body = target.layout("body.weight", model().get_parameter("body.weight"))
    assert body.regions == (FlatRange(6, 9), FlatRange(0, 6))  # partitions of 3, secondary ones of two of them
    with pytest.raises(ConfigError, match="does not divide the 3 ranks"):
        target_maker(0, GPU)(settings(3, world_size=3, zero_hpz_partition_size=2), model())


@pytest.mark.parametrize("partition", ["body", ["bo*"], lambda name, _: name == "body"])
def test_a_partition_cuts_up_what_it_chooses_and_leaves_the_rest_on_the_accelerator(partition: Partition) -> None:
    target = target_maker(0, GPU)(settings(3, partition=partition), model())
    assert type(target) is Partial
    assert target.device == GPU
    assert layouts(target) == {
        "body.weight": (KIND, (FlatRange(0, 6),), False),
        "head.weight": (REPLICATED, (FlatRange(0, 15),), False),
    }


def test_an_empty_partition_is_not_the_whole_model() -> None:
    target = target_maker(0, GPU)(settings(3, partition=[]), model())
    assert {kind for kind, _, _ in layouts(target).values()} == {REPLICATED}


def test_an_entry_that_chooses_nothing_is_refused_only_where_it_must_match() -> None:
    with pytest.raises(ConfigError, match="'tail' choose"):
        target_maker(0, GPU)(settings(3, partition=["tail"], must_match=True), model())
    target = target_maker(0, GPU)(settings(3, partition=["tail", "body"]), model())
    assert layouts(target)["body.weight"][0] == KIND
