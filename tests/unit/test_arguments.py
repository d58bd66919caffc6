"""Arguments of calls as trees."""

from __future__ import annotations

import weakref

import torch

from lowmem_load.describe.arguments import Template, tree_map, values_of

X, Y = torch.ones(2), torch.zeros(3)
TREE = ((X, [1, (Y, None)]), {"a": X, "b": ()})


def test_values_come_in_order() -> None:
    found = values_of(TREE)
    assert [value for value in found if not isinstance(value, torch.Tensor)] == [1, None]
    assert [id(value) for value in found if isinstance(value, torch.Tensor)] == [id(X), id(Y), id(X)]


def test_a_mapped_tree_has_the_same_containers() -> None:
    assert tree_map(type, TREE) == ((torch.Tensor, [int, (torch.Tensor, type(None))]), {"a": torch.Tensor, "b": ()})


def test_a_template_keeps_places_and_no_tensor() -> None:
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    template = Template(([tensor, 2], {"b": tensor}))
    del tensor
    assert gone() is None
    assert template.filled(["first", "second"]) == (["first", 2], {"b": "second"})


def test_a_template_of_one_kind_leaves_others_where_they_are() -> None:
    parameter = torch.nn.Parameter(X)
    ((kept, taken),) = [Template((X, parameter), torch.nn.Parameter).filled(["here"])]
    assert kept is X
    assert taken == "here"
