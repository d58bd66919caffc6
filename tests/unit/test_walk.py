"""What is listed of a module is what torch lists, shared parts and empty places included."""

from __future__ import annotations

import torch
from torch import nn

from lowmem_load.walk import children_first, own_buffers, own_parameters


def model() -> nn.Module:
    shared = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    whole = nn.Sequential(nn.Embedding(3, 2), shared, nn.ModuleDict({"again": shared, "last": nn.Linear(2, 3)}))
    whole[2]["last"].weight = whole[0].weight
    whole[1].register_parameter("absent", None)
    whole[1].register_buffer("nothing", None)
    whole[2]["again"].register_module("nobody", None)
    whole.register_parameter("own", nn.Parameter(torch.zeros(1)))
    return whole


def test_a_module_s_own_parameters_and_buffers_are_what_torch_lists() -> None:
    for module in model().modules():
        every = dict(recurse=False, remove_duplicate=False)
        parameters, buffers = module.named_parameters(**every), module.named_buffers(**every)
        assert [(name, id(each)) for name, each in own_parameters(module)] == [(n, id(p)) for n, p in parameters]
        assert [(name, id(each)) for name, each in own_buffers(module)] == [(n, id(b)) for n, b in buffers]


def test_children_come_before_their_parents_in_the_order_of_zero_init() -> None:
    built: list[nn.Module] = []

    def visit(module: nn.Module) -> None:  # as __init__ returns: of the children first
        for child in module.children():
            if child not in built:
                visit(child)
        built.append(module)

    whole = model()
    visit(whole)
    assert children_first(whole) == built
