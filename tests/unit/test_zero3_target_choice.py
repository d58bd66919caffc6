"""Which target a model gets under which settings, and the targets that consist of little else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.ds.zero3_target import KIND, Zero3, target_maker
from lowmem_load.errors import ConfigError
from lowmem_load.planning.expression import hold
from lowmem_load.planning.load_plan import REPLICATED, Destination, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.target import Layout, Replicated, Target

GPU, CPU = torch.device("cuda"), torch.device("cpu")


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
    assert type(target) is Replicated
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


@pytest.mark.parametrize("partition", ["body", ["bo*"], lambda name, _: name == "body"])
def test_a_partition_cuts_up_what_it_chooses_and_leaves_the_rest_on_the_accelerator(partition: Partition) -> None:
    target = target_maker(0, GPU)(settings(3, partition=partition), model())
    assert type(target) is Zero3
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


# -- replicated -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_all_of_a_parameter_as_it_is(dtype: torch.dtype) -> None:
    layout = Replicated(CPU).layout("w", torch.empty(3, 4, dtype=dtype, device="meta"))
    assert layout == Layout(REPLICATED, dtype, (FlatRange(0, 12),), (12,), on_host=True)


def test_memory_of_an_accelerator_is_not_host_memory() -> None:
    assert not Replicated(torch.device("cuda")).layout("w", torch.empty(3, device="meta")).on_host


@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_fills_the_memory_is_the_parameter(requires_grad: bool) -> None:
    values, target = torch.arange(6.0).view(2, 3), Replicated(CPU)
    described = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad)
    fill = Planner().plan_fill("w", hold(values), FlatRange(0, 6))
    destination = Destination(FlatRange(0, 6), 6, fill)
    plan = TargetPlan(("w",), (2, 3), torch.float32, REPLICATED, (destination,), False, False, (), "")
    target.prepare(nn.Module())
    made, (memory,) = target.make(plan, described, lambda: None)
    memory.copy_(values.view(-1))
    target.finish()
    assert type(made) is nn.Parameter
    assert made.requires_grad is requires_grad
    assert torch.equal(made, values)


# -- partial ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "inside"),
    [
        (("a",), ["a.weight", "a.bias"]),
        (("a", "norm"), ["a.weight", "a.bias", "norm.weight", "norm.bias"]),
        ((), []),
        (("",), ["a.weight", "a.bias", "ab.weight", "ab.bias", "norm.weight", "norm.bias"]),
    ],
)
def test_a_parameter_goes_where_its_module_does(chosen: tuple[str, ...], inside: list[str]) -> None:
    whole = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    target = Zero3(settings(3), 0, CPU, None, chosen)
    kinds = {name: target.layout(name, parameter).kind for name, parameter in whole.named_parameters()}
    assert [name for name, kind in kinds.items() if kind == KIND] == inside
    assert set(kinds.values()) <= {KIND, REPLICATED}
