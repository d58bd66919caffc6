"""Builders of expressions: each gives the values that torch gives, or None where only running the operation can."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from lowmem_load.io.executor import Executor
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.symbolic.operations import BUILDERS, Template, describe

aten = torch.ops.aten
X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
Y = X + 100
VECTOR = torch.arange(5, dtype=torch.float32)
SCALAR = torch.tensor(3.5)


def described(overload: Any, args: tuple[Any, ...]) -> Any:
    """Return what `describe` makes of a call, its tensors held in memory; the twins are made by torch."""
    twins = overload(*tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, args))
    held = tree_map(lambda value: ex.hold(value) if isinstance(value, torch.Tensor) else value, args)
    return describe(overload.overloadpacket, held, twins)


def value_of(expression: ex.Expression) -> torch.Tensor:
    planner, memory = Planner(), torch.full((ex.numel(expression),), -1, dtype=expression.dtype)
    fill = planner.plan_fill("value", expression, FlatRange(0, ex.numel(expression)))
    with Executor() as executor:
        executor.fill(fill, memory, planner.values, planner.constants)
        executor.finish()
    return memory.view(expression.shape)


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "detach": (aten.detach.default, (X,)),
    "alias": (aten.alias.default, (X,)),
    "clone": (aten.clone.default, (X.transpose(0, 1),)),
    "lift_fresh": (aten.lift_fresh.default, (X,)),
    "view": (aten.view.default, (X, [3, -1])),
    "_unsafe_view": (aten._unsafe_view.default, (X, [6, 4])),
    "_reshape_alias": (aten._reshape_alias.default, (X, [4, 6], [6, 1])),
    "unsqueeze": (aten.unsqueeze.default, (X, -2)),
    "squeeze": (aten.squeeze.default, (X[:1],)),
    "squeeze of a dim": (aten.squeeze.dim, (X[:1], 0)),
    "squeeze of dims": (aten.squeeze.dims, (X[:1, :, :1], [0, 2])),
    "constant_pad_nd by nothing": (aten.constant_pad_nd.default, (X, [0, 0, 0, 0], 7)),
    "expand": (aten.expand.default, (X[:, :1], [2, 5, 4])),
    "expand by a dim, -1": (aten.expand.default, (X, [3, -1, -1, -1])),
    "expand of a scalar": (aten.expand.default, (SCALAR, [2, 2])),
    "transpose": (aten.transpose.int, (X, 0, -1)),
    "transpose of a scalar": (aten.transpose.int, (SCALAR, 0, -1)),
    "t": (aten.t.default, (X[0],)),
    "t of a vector": (aten.t.default, (VECTOR,)),
    "permute": (aten.permute.default, (X, [2, 0, 1])),
    "permute, negative": (aten.permute.default, (X, [-1, 0, -2])),
    "slice": (aten.slice.Tensor, (X, 2, 1, 3)),
    "slice of all": (aten.slice.Tensor, (X,)),
    "slice without a start": (aten.slice.Tensor, (X, 1, None, 2)),
    "slice, negative": (aten.slice.Tensor, (X, -1, -3, -1)),
    "slice beyond both ends": (aten.slice.Tensor, (X, 1, -99, 99)),
    "slice behind the end": (aten.slice.Tensor, (X, 1, 7, 9)),
    "slice with a step": (aten.slice.Tensor, (X, 2, 1, 4, 2)),
    "select": (aten.select.int, (X, 1, 2)),
    "select, negative": (aten.select.int, (X, -1, -2)),
    "select of a vector": (aten.select.int, (VECTOR, 0, 4)),
    "index": (aten.index.Tensor, (X, [None, torch.tensor([2, 0, -1])])),
    "index of the first dim": (aten.index.Tensor, (X, [torch.tensor([1])])),
    "split": (aten.split.Tensor, (X, 3, 2)),
    "split along the first dim": (aten.split.Tensor, (X, 1)),
    "split_with_sizes": (aten.split_with_sizes.default, (X, [1, 0, 2], -2)),
    "unbind": (aten.unbind.int, (X,)),
    "unbind of a dim": (aten.unbind.int, (X, -1)),
    "cat": (aten.cat.default, ([X, Y[:1]],)),
    "cat, negative": (aten.cat.default, ([X, Y[:, :, :1]], -1)),
    "cat of dtypes": (aten.cat.default, ([X.half(), Y.double()], 1)),
    "cat with the empty vector": (aten.cat.default, ([torch.empty(0), X, Y], 1)),
    "stack": (aten.stack.default, ([X, Y],)),
    "stack behind": (aten.stack.default, ([X, Y], -1)),
    "stack of scalars": (aten.stack.default, ([SCALAR, SCALAR + 1],)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_description_has_the_value_that_torch_gives(name: str) -> None:
    overload, args = CALLS[name]
    found, expected = described(overload, args), overload(*args)
    assert not isinstance(expected, torch.Tensor) or isinstance(found, ex.Expression)
    pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else list(zip(found, expected, strict=True))
    for part, tensor in pairs:
        assert (part.shape, part.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(value_of(part), tensor)
        assert all(isinstance(leaf, ex.Held) for leaf in ex.leaves(part))


def test_a_copy_to_a_dtype_is_a_cast() -> None:
    """Its dtype is a keyword, so that the twin alone tells it."""
    source = ex.hold(X / 3)
    found = describe(aten._to_copy, (source,), torch.empty(2, 3, 4, dtype=torch.bfloat16, device="meta"))
    assert torch.equal(value_of(found), (X / 3).bfloat16())
    assert describe(aten._to_copy, (source,), X.to("meta")) is source


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (aten.view.dtype, (X, torch.int32)),  # another meaning of the same bytes
        (aten.constant_pad_nd.default, (X, [0, 1])),
        (aten.mul.Tensor, (X, Y)),
        (aten.flip.default, (X, [0])),
        (aten.index.Tensor, (X, [torch.tensor([0, 1]), torch.tensor([0, 1])])),
        (aten.index.Tensor, (X, [torch.tensor([[0, 1]])])),
        (aten.index.Tensor, (X, [torch.zeros(65, dtype=torch.int64)])),
    ],
    ids=str,
)
def test_what_only_running_it_can_give_has_no_description(overload: Any, args: tuple[Any, ...]) -> None:
    assert described(overload, args) is None


def test_what_is_described_is_known() -> None:
    for overload, _ in CALLS.values():
        assert overload.overloadpacket in BUILDERS, overload
    assert aten._to_copy in BUILDERS
    for operation in (aten.mul, aten.flip, aten.equal, aten.copy_, aten.slice.Tensor):  # the last is an overload
        assert operation not in BUILDERS, operation


# -- arguments without tensors ---------------------------------------------------------------------------------------


def test_a_template_keeps_places_and_no_tensor() -> None:
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    template = Template(([tensor, 2], {"b": tensor}))
    del tensor
    assert gone() is None
    assert template.fill(["first", "second"]) == (["first", 2], {"b": "second"})


def test_a_template_of_one_kind_leaves_others_where_they_are() -> None:
    kept = torch.ones(2)
    parameter = torch.nn.Parameter(kept)
    ((found, taken),) = [Template((kept, parameter), torch.nn.Parameter).fill(["here"])]
    assert found is kept
    assert taken == "here"
