"""A function that is described once gives each tensor what it would give it itself."""

from __future__ import annotations

import torch

from lowmem_load.hf.dequantize import Patterns
from lowmem_load.io.executor import Executor
from lowmem_load.io.fill import read_whole
from lowmem_load.planning import expression as ex
from lowmem_load.symbolic.tensor import SymbolicTensor, expression_of


def read(expression: ex.Expression, reason: str = "") -> torch.Tensor:
    with Executor() as executor:
        return read_whole(executor, expression)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    return read(expression_of(tensor))


def symbolic(tensor: torch.Tensor) -> SymbolicTensor:
    return SymbolicTensor(ex.hold(tensor, str(float(tensor.sum()))), read)


def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([weight, weight[:1]]).reshape(-1, 2)
    return (rows.to(torch.float64) * scale[:, None]).flip(0).t()[:, 1:]


def test_each_gets_its_own_values_and_torch_is_asked_once() -> None:
    patterns, calls = Patterns(), []

    def counted(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return scaled(weight, scale)

    experts = [(torch.rand(3, 4), torch.rand(8)) for _ in range(5)]
    found = [patterns.applied(counted, tuple(map(symbolic, expert)), "scaled") for expert in experts]
    assert len(calls) == 1
    assert len({id(each.expression.pattern) for each in found if isinstance(each.expression, ex.Instance)}) == 1
    for made, expert in zip(found, experts, strict=True):
        expected = scaled(*expert)
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert torch.equal(value_of(made), expected)
    stacked = torch.stack(found)[:, 1]
    assert torch.equal(value_of(stacked), torch.stack([scaled(*expert) for expert in experts])[:, 1])


def test_other_shapes_strides_dtypes_and_settings_are_described_anew() -> None:
    patterns, calls = Patterns(), []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.shape)
        return tensor + 1

    x = torch.rand(2, 2)
    arguments = [(x, 0), (x[:1], 0), (x.double(), 0), (x, 1), (x, 0)]
    for tensor, settings in arguments:
        assert torch.equal(value_of(patterns.applied(counted, (symbolic(tensor),), settings)), tensor + 1)
    assert torch.equal(value_of(patterns.applied(counted, (symbolic(x).t(),), 0)), x.t() + 1)
    assert len(calls) == 5


def test_a_function_that_asks_for_values_is_called_each_time() -> None:
    patterns = Patterns()
    for x in (torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])):
        made = patterns.applied(lambda tensor: tensor * 2 if tensor[0] > 0 else tensor, (symbolic(x),), None)
        assert torch.equal(value_of(made), x * 2 if x[0] > 0 else x)


def test_leaves_are_those_of_the_inputs_and_of_the_pattern() -> None:
    """Not its placeholders; so ranks with other files have other fingerprints, and reports name the operation."""
    patterns = Patterns()
    for x in (torch.tensor([1.0]), torch.tensor([2.0])):
        found = ex.leaves(expression_of(patterns.applied(lambda tensor: tensor * 2, (symbolic(x),), None)))
        assert [type(leaf) for leaf in found] == [ex.Held, ex.Elementwise]
        assert isinstance(found[0], ex.Held)
        assert found[0].origin == str(float(x))
