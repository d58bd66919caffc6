"""What every target must do, under each setting that changes what ranks hold."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import read_settings
from lowmem_load.engines.target import Layout, Replicated, Target
from lowmem_load.engines.zero3_target import Zero3
from lowmem_load.files.executor import Executor
from lowmem_load.planning.expression import cast, hold
from lowmem_load.planning.load_plan import REPLICATED, Destination, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import FlatRange, Region

SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (5, 7),
    "even": (8, 12),
    "deep": (3, 5, 2),
    "row": (13,),
    "fewer_elements_than_ranks": (2,),
    "column": (3, 1),
    "one": (1, 1),
    "scalar": (),
    "empty": (0, 4),
}
DTYPES = (torch.float32, torch.bfloat16)

CPU = torch.device("cpu")


class Kind(NamedTuple):
    """How the target of a rank of so many is made, for modules that decide what becomes of a parameter."""

    target: Callable[[int, int], Target]
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    modules: tuple[str, ...] = ("model",)


def zero3(*args: Any, bf16: bool = False, **zero: Any) -> Callable[[int, int], Target]:
    def target(rank: int, world_size: int) -> Target:
        config = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": bf16}}
        return Zero3(read_settings(config, world_size=world_size).for_model(None), rank, CPU, *args)

    return target


KINDS = {
    "ZeRO-3": Kind(zero3()),
    "offloaded": Kind(zero3(offload_param={"device": "cpu"})),
    "secondary partitions": Kind(zero3(zero_hpz_partition_size=2), worlds=(1, 2, 4)),  # DeepSpeed makes groups of 2
    "replicated": Kind(lambda *_: Replicated(CPU)),
    "partial": Kind(
        zero3(None, ("inside", "inside_too"), bf16=True), modules=("inside", "outside", "inside_too", "insides")
    ),
}

pytestmark = [pytest.mark.usefixtures("lone_process"), pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)]


def parameters(kind: Kind) -> Iterator[tuple[str, nn.Parameter]]:
    for module in kind.modules:
        for dtype in DTYPES:
            for label, shape in SHAPES.items():
                parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), label != "even")
                yield f"{module}.{label}_{str(dtype).rpartition('.')[2]}", parameter


def layouts_of(kind: Kind, name: str, parameter: nn.Parameter, world_size: int) -> list[Layout]:
    return [kind.target(rank, world_size).layout(name, parameter) for rank in range(world_size)]


def values_of(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def elements(shape: torch.Size, region: Region) -> torch.Tensor:
    """Return the flat indices of the elements of `region`, in the order in which memory holds them."""
    indices = torch.arange(shape.numel())
    if isinstance(region, FlatRange):
        return indices[region.start : region.end]
    indices = indices.view(shape)
    for dim, runs in enumerate(region.runs):
        indices = torch.cat([indices.narrow(dim, start, end - start) for start, end in runs], dim)
    return indices.reshape(-1)


def filled(name: str, values: torch.Tensor, layout: Layout, number: int) -> torch.Tensor:
    planner, region = Planner(), layout.regions[number]
    fill = planner.plan_fill(name, cast(hold(values), layout.dtype), region, on_host=layout.on_host)
    memory = torch.full((layout.numels[number],), float("nan"), dtype=layout.dtype)
    with Executor() as executor:
        executor.fill(fill, memory[: fill.numel], planner.values, planner.constants)
    assert memory[fill.numel :].isnan().all(), f"{name}: padding was written"
    return memory[: fill.numel]


def target_plan(name: str, parameter: nn.Parameter, layout: Layout) -> TargetPlan:
    planner, shape = Planner(), tuple(parameter.shape)
    stored = cast(hold(torch.zeros(math.prod(shape), dtype=parameter.dtype).view(shape)), layout.dtype)
    destinations = tuple(
        Destination(region, numel, planner.plan_fill(name, stored, region, on_host=layout.on_host))
        for region, numel in zip(layout.regions, layout.numels, strict=True)
    )
    return TargetPlan(
        names=(name,),
        shape=shape,
        dtype=layout.dtype,
        kind=layout.kind,
        destinations=destinations,
        is_recast=parameter.dtype != layout.dtype,
        is_uninitialised=False,
        slow_paths=(),
        fingerprint="",
    )


def test_every_element_is_held_as_often_as_its_kind_says(kind: Kind) -> None:
    """Whole on every rank if it is replicated. Else once, and equally often in what is held besides."""
    for name, parameter in parameters(kind):
        for world_size in kind.worlds:
            layouts = layouts_of(kind, name, parameter, world_size)
            for number in range(len(layouts[0].regions)):
                counts = torch.zeros(parameter.shape, dtype=torch.int64)
                for layout in layouts:
                    held_once = torch.zeros_like(counts)
                    held_once.view(-1)[elements(held_once.shape, layout.regions[number])] += 1
                    counts += held_once
                distinct = set(counts.reshape(-1).tolist())
                where = (name, f"{world_size} ranks", f"region {number}")
                if layouts[0].kind == REPLICATED:
                    assert distinct <= {world_size}, where
                elif number == 0:
                    assert distinct <= {1}, where
                else:
                    assert len(distinct) <= 1, where
                    assert 0 not in distinct, where


def test_what_all_ranks_hold_is_the_parameter(kind: Kind) -> None:
    """Filled as the planner plans it, the pieces of all ranks are its elements, in the target's dtype."""
    for seed, (name, parameter) in enumerate(parameters(kind)):
        values = values_of(parameter, seed)
        for world_size in kind.worlds:
            layouts = layouts_of(kind, name, parameter, world_size)
            for number in range(len(layouts[0].regions)):
                whole = torch.full(parameter.shape, float("nan"), dtype=layouts[0].dtype)
                for layout in layouts:
                    region = layout.regions[number]
                    piece = filled(name, values, layout, number)
                    whole.view(-1)[elements(whole.shape, region)] = piece.to(whole.dtype)
                assert torch.equal(whole, values.to(layouts[0].dtype)), (name, world_size)


def test_memory_is_made_as_planned(kind: Kind) -> None:
    """On rank 0 of 1: for each destination flat memory in the planned dtype, whose padding is zero."""
    target, model = kind.target(0, 1), nn.Module()
    for module in kind.modules:
        model.add_module(module, nn.Module())
    for name, parameter in parameters(kind):
        module, _, last = name.rpartition(".")
        model.get_submodule(module).register_parameter(last, parameter)
    plans = [target_plan(name, parameter, target.layout(name, parameter)) for name, parameter in parameters(kind)]
    target.prepare(model)
    assert all(nbytes >= 0 for nbytes in target.files(plans).values())
    made: dict[str, nn.Parameter] = {}
    for plan in plans:
        parameter = model.get_parameter(plan.name)
        made[plan.name], memory = target.make(plan, parameter, lambda: None)
        for destination, tensor in zip(plan.destinations, memory, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (plan.dtype, (destination.numel,)), plan.name
            assert tensor.is_contiguous(), plan.name
            assert not tensor[destination.region.numel :].any(), plan.name
            tensor[: destination.region.numel].fill_(1)
        assert isinstance(made[plan.name], nn.Parameter)
        assert made[plan.name].requires_grad == parameter.requires_grad, plan.name
    target.finish()
    for name, parameter in made.items():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, parameter)
