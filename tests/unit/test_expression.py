"""Expressions: what each constructor makes of its parts, and what it leaves out because it would change nothing."""

from collections.abc import Callable

import pytest
import torch

from lowmem_load.planning import expression as ex

SOURCE = ex.Source("file", "w", 64, (2, 3, 4), torch.float32)


def other(name: str = "other", shape: ex.Shape = (2, 3, 4)) -> ex.Source:
    return ex.Source("file", name, 0, shape, torch.float32)


def doubled(*parts: ex.Expression) -> ex.Elementwise:
    return ex.Elementwise("aten.add", lambda values: values[0] * 2, parts, parts[0].shape, parts[0].dtype)


def flipped(*inputs: ex.Expression) -> ex.Computed:
    return ex.Computed("aten.flip", lambda values: values[0].flip(0), inputs, inputs[0].shape, inputs[0].dtype)


# -- leaves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [lambda base: base.t(), lambda base: base[:, 1:], lambda base: base[1, 2], lambda base: base[:1].expand(3, 3)],
)
def test_a_held_view_is_row_major(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.arange(6).view(2, 3))
    held = ex.hold(tensor)
    assert held.shape == tuple(tensor.shape)
    assert held.flat.tolist() == tensor.flatten().tolist()


# -- walking ---------------------------------------------------------------------------------------------------------


def test_leaves_come_once_in_order_with_what_they_need() -> None:
    a, b, c = other("a"), other("b"), other("c")
    product = doubled(ex.cast(b, torch.float64), a)
    computed = flipped(ex.permute(product, (2, 1, 0)))
    found = ex.leaves(ex.concat([computed, ex.reshape(c, (4, 3, 2)), ex.reshape(a, (4, 3, 2))], 0))
    assert found == [computed, product, b, a, c]
    assert ex.leaves(SOURCE) == [SOURCE]


def test_leaves_of_a_deep_expression() -> None:
    """A walk that recursed would end at Python's limit of a thousand."""
    node: ex.Expression = SOURCE
    for _ in range(3000):
        node = ex.permute(node, (2, 0, 1))
    assert ex.leaves(node) == [SOURCE]
