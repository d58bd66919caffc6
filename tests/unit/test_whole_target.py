"""The target of parameters that every rank holds whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowmem_load.planning.expression import held
from lowmem_load.planning.load_plan import REPLICATED, Destination, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.targets.target import Layout
from lowmem_load.targets.whole_target import Whole

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_all_of_a_parameter_as_it_is(dtype: torch.dtype) -> None:
    layout = Whole(CPU).layout("w", torch.empty(3, 4, dtype=dtype, device="meta"))
    assert layout == Layout(REPLICATED, dtype, (FlatRange(0, 12),), (12,), on_host=True)


def test_memory_of_an_accelerator_is_not_host_memory() -> None:
    assert not Whole(torch.device("cuda")).layout("w", torch.empty(3, device="meta")).on_host


@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_fills_the_memory_is_the_parameter(requires_grad: bool) -> None:
    values, target = torch.arange(6.0).view(2, 3), Whole(CPU)
    described = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad)
    fill = Planner().plan_fill("w", held(values), FlatRange(0, 6))
    destination = Destination(FlatRange(0, 6), 6, True, fill)
    plan = TargetPlan(("w",), (2, 3), torch.float32, REPLICATED, (destination,), False, False, (), "")
    target.prepare(nn.Module())
    made, (memory,) = target.make(plan, described, lambda: None)
    memory.copy_(values.view(-1))
    target.finish()
    assert type(made) is nn.Parameter
    assert made.requires_grad is requires_grad
    assert torch.equal(made, values)


def test_no_buffer_is_recast() -> None:
    model = nn.BatchNorm1d(3)
    assert Whole(CPU).fp32_buffers(model) == []
