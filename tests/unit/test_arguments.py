"""Arguments of calls as trees."""

from __future__ import annotations

import weakref

import torch

from lowmem_load.symbolic.call_arguments import Template


def test_a_template_keeps_places_and_no_tensor() -> None:
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    template = Template(([tensor, 2], {"b": tensor}))
    del tensor
    assert gone() is None
    assert template.filled(["first", "second"]) == (["first", 2], {"b": "second"})


def test_a_template_of_one_kind_leaves_others_where_they_are() -> None:
    kept = torch.ones(2)
    parameter = torch.nn.Parameter(kept)
    ((found, taken),) = [Template((kept, parameter), torch.nn.Parameter).filled(["here"])]
    assert found is kept
    assert taken == "here"
