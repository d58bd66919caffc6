"""Operations that are told as data give what they gave; others are not told, and not made."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lowmem_load.describe.arguments import Template
from lowmem_load.describe.pointwise import Pointwise, pointwise, pointwise_of

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
A, B = torch.tensor([1.5, -2.0, 3.0]), torch.tensor([4.0, 0.25, -1.0])
THIRDS = A / 3


@pytest.mark.parametrize(
    ("func", "args", "casts", "tensors", "expected"),
    [
        (aten.mul.Tensor, (A, B), [(), ()], [A, B], A * B),
        (aten.mul.Tensor, (B, A), [(), ()], [B, A], A * B),
        (aten.mul.Tensor, (A, B), [(BF16, F32), ()], [THIRDS, B], THIRDS.to(BF16).float() * B),
        (aten.sub.Tensor, (A, 127.0), [(F32,)], [A.to(BF16)], A - 127.0),
        (aten.sub.Tensor, (A, B), [(), ()], [A, B], A - B),
        (aten.exp2.default, (A,), [()], [A], A.exp2()),
    ],
)
def test_what_was_told_gives_the_same(
    func: Any, args: Any, casts: Any, tensors: list[torch.Tensor], expected: Any
) -> None:
    told = json.loads(json.dumps(Pointwise(func, Template((args, {})), casts).told()))
    made = pointwise_of(told, len(tensors))
    assert torch.equal(made(tensors), expected)
    assert made.told() == told
    assert pointwise(func, Template((args, {})), casts) is made


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.add.Tensor, (A, B), {}),  # not in the list
        (aten.mul.Scalar, (A, 2.0), {}),
        (aten.sub.Tensor, (A, B), {"alpha": 2}),
        (aten.sub.Tensor, (A, float("nan")), {}),
        (aten.sub.Tensor, (A, True), {}),
    ],
)
def test_others_are_not_told(func: Any, args: Any, kwargs: Any) -> None:
    casts = [()] * sum(isinstance(each, torch.Tensor) for each in args)
    assert Pointwise(func, Template((args, kwargs)), casts).told() is None


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        "aten.mul.Tensor",
        [["aten.mul.Tensor"]],
        ["aten.system.default", [], []],
        ["aten.mul.Tensor", []],
        ["aten.mul.Tensor", [], [], []],
        ["aten.mul.Tensor", [], "text"],
        ["aten.mul.Tensor", [], ["nn"]],
        ["aten.mul.Tensor", [], [1]],
        ["aten.mul.Tensor", [], [], None],
        ["aten.mul.Tensor", [], [], float("inf")],
    ],
)
def test_others_are_not_made(told: Any) -> None:
    with pytest.raises(ValueError, match=r"not in the list|other arguments"):
        pointwise_of(told, 2)
