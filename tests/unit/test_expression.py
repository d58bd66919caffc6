"""Expressions: what each constructor makes of its parts, and what it leaves out because it would change nothing."""

from __future__ import annotations

import dataclasses
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


def test_a_source_is_equal_to_one_of_the_same_bytes() -> None:
    same = ex.Source("file", "w", 64, (2, 3, 4), torch.float32)
    assert same == SOURCE
    assert hash(SOURCE) == hash(same)
    for change in ({"path": "b"}, {"name": "v"}, {"start": 65}, {"shape": (24,)}, {"dtype": torch.int32}):
        assert dataclasses.replace(SOURCE, **change) != SOURCE


def test_other_nodes_are_equal_to_themselves_alone() -> None:
    assert ex.permute(SOURCE, (2, 0, 1)) != ex.permute(SOURCE, (2, 0, 1))
    ones = torch.ones(2)
    assert ex.hold(ones) != ex.hold(ones)


def test_a_held_tensor_shares_the_memory_of_a_contiguous_one() -> None:
    tensor = torch.arange(6.0).view(2, 3).requires_grad_()
    held = ex.hold(tensor, "here")
    assert (held.first, held.shape, held.dtype, held.origin) == (0, (2, 3), torch.float32, "here")
    assert held.flat.data_ptr() == tensor.data_ptr()
    assert not held.flat.requires_grad
    assert ex.hold(tensor).origin == ex.IN_MEMORY


@pytest.mark.parametrize(
    "view",
    [lambda base: base.t(), lambda base: base[:, 1:], lambda base: base[1, 2], lambda base: base[:1].expand(3, 3)],
)
def test_a_held_view_is_row_major(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.arange(6).view(2, 3))
    held = ex.hold(tensor)
    assert held.shape == tuple(tensor.shape)
    assert held.flat.tolist() == tensor.flatten().tolist()


# -- constructors ----------------------------------------------------------------------------------------------------


def test_a_cast_to_the_same_dtype_is_none() -> None:
    assert ex.cast(SOURCE, torch.float32) is SOURCE
    cast = ex.cast(SOURCE, torch.bfloat16)
    assert isinstance(cast, ex.Cast)
    assert (cast.part, cast.shape, cast.dtype) == (SOURCE, (2, 3, 4), torch.bfloat16)


def test_a_cast_back_is_not_left_out() -> None:
    """The cast in between rounds."""
    back = ex.cast(ex.cast(SOURCE, torch.bfloat16), torch.float32)
    assert isinstance(back, ex.Cast)
    assert isinstance(back.part, ex.Cast)


def test_reshapes_are_merged_and_none_where_the_shape_is_the_same() -> None:
    assert ex.reshape(SOURCE, [2, 3, 4]) is SOURCE
    flat = ex.reshape(SOURCE, [24])
    assert isinstance(flat, ex.Reshape)
    assert (flat.part, flat.shape, flat.dtype) == (SOURCE, (24,), torch.float32)
    rows = ex.reshape(flat, (6, 4))
    assert isinstance(rows, ex.Reshape)
    assert (rows.part, rows.shape) == (SOURCE, (6, 4))


def test_a_permutation_in_order_is_none() -> None:
    assert ex.permute(SOURCE, [0, 1, 2]) is SOURCE
    permuted = ex.permute(SOURCE, [2, 0, 1])
    assert isinstance(permuted, ex.Permute)
    assert (permuted.part, permuted.dims, permuted.shape) == (SOURCE, (2, 0, 1), (4, 2, 3))


def test_expanding_to_what_it_has_is_at_most_a_reshape() -> None:
    assert ex.expand(SOURCE, (2, 3, 4)) is SOURCE
    padded = ex.expand(SOURCE, (1, 2, 3, 4))
    assert isinstance(padded, ex.Reshape)
    assert padded.shape == (1, 2, 3, 4)


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


def test_casts_are_told_apart_from_what_was_cast() -> None:
    part = ex.Source("file", "w", 0, (2, 3), torch.bfloat16)
    cast = ex.reshape(ex.cast(ex.cast(part, torch.float16), torch.float64), (6,))
    inner, dtypes = ex.without_casts(cast)
    assert isinstance(inner, ex.Reshape) and (inner.part, inner.shape) == (part, (6,))
    assert dtypes == (torch.float16, torch.float64)
    assert ex.without_casts(part) == (part, ())
