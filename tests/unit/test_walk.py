"""Listings of a model's modules and parameters are torch's own, shared ones and empty places included."""

from __future__ import annotations

import torch
from torch import nn

from lowmem_load.walk import children_first, named_modules, named_parameters, own_buffers, own_parameters


def model() -> nn.Module:
    shared = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    whole = nn.Sequential(nn.Embedding(3, 2), shared, nn.ModuleDict({"again": shared, "last": nn.Linear(2, 3)}))
    whole[2]["last"].weight = whole[0].weight
    whole[1].register_parameter("absent", None)
    whole[1].register_buffer("nothing", None)
    whole[2]["again"].register_module("nobody", None)
    whole.register_parameter("own", nn.Parameter(torch.zeros(1)))
    return whole


def test_modules_and_parameters_come_as_torch_lists_them() -> None:
    whole = model()
    assert named_modules(whole) == list(whole.named_modules())
    assert named_modules(whole, by_all_names=True) == list(whole.named_modules(remove_duplicate=False))
    assert [(name, id(each)) for name, each in named_parameters(whole).items()] == [
        (name, id(each)) for name, each in whole.named_parameters()
    ]
    for module in whole.modules():
        every = dict(recurse=False, remove_duplicate=False)
        assert [(n, id(p)) for n, p in own_parameters(module)] == [
            (n, id(p)) for n, p in module.named_parameters(**every)
        ]
        assert [(n, id(b)) for n, b in own_buffers(module)] == [(n, id(b)) for n, b in module.named_buffers(**every)]


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
