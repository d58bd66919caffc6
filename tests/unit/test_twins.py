"""Shapes of results: torch is asked once for each kind of call, and other results are of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowmem_load.describe import twins
from lowmem_load.describe.twins import Twins

aten = torch.ops.aten
META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def test_torch_is_asked_once() -> None:
    known, asked = Twins(), []

    def func(*args: Any) -> torch.Tensor:
        asked.append(args)
        return aten.stack.default(*args)

    first = known.of_call(func, ([meta(2, 3), meta(2, 3)], 1), {})
    again = known.of_call(func, ((meta(2, 3), torch.zeros(2, 3)), 1), {})
    assert first is again
    assert (tuple(first.shape), len(asked)) == ((2, 2, 3), 1)
    assert known.of((2, 3), torch.float32) is known.of((2, 3), torch.float32)


@pytest.mark.parametrize(
    ("func", "one", "other"),
    [
        (aten.mul.Tensor, (meta(3), meta(3)), (meta(3), meta(3, 1))),
        (aten.mul.Tensor, (meta(3), meta(3)), (meta(3), meta(3, dtype=torch.float64))),
        (aten.clone.default, (meta(2, 2),), (meta(2, 2).t(),)),
        (aten.mul.Scalar, (meta(3, dtype=torch.int32), 1), (meta(3, dtype=torch.int32), 1.0)),
        (aten.mul.Scalar, (meta(3, dtype=torch.bool), True), (meta(3, dtype=torch.bool), 1)),
        (aten.sum.dim_IntList, (meta(2, 3), [0]), (meta(2, 3), [1])),
    ],
)
def test_calls_of_other_results_are_of_other_kinds(func: Any, one: Any, other: Any) -> None:
    known = Twins()
    for args in (one, other, one):
        found, expected = known.of_call(func, args, {}), func(*args)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_keywords_count_and_the_device_does_not() -> None:
    known = Twins()
    for dtype in (torch.float32, torch.bfloat16):
        found = known.of_call(aten._to_copy.default, (meta(3),), {"dtype": dtype, "device": torch.device("cpu")})
        assert (found.dtype, found.device) == (dtype, META)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "MAX_KINDS", 3)
    known = Twins()
    for size in range(10):
        assert tuple(known.of((size,), torch.float32).shape) == (size,)
        assert len(known._known) <= 3


def test_what_a_replaced_function_makes_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside a zero.Init, which makes tensors in another dtype."""
    known, ordinary = Twins(), torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: ordinary(*args, **{**kwargs, "dtype": torch.half}))
        assert known.of((2,), torch.float32).dtype == torch.half
    assert known.of((2,), torch.float32).dtype == torch.float32
