"""What enters the partitioned part is made to need a gradient, but for masks and positions, however they are passed."""

from __future__ import annotations

import inspect
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lowmem_load.ds.engine import arguments_with_gradient, with_gradient

X = torch.ones(2, 3)


class Layer(nn.Module):
    def forward(self, hidden: Any, attention_mask: Any = None, *rest: Any, position_bias: Any = None) -> Any:
        raise NotImplementedError


def entered(module: nn.Module, *args: Any, **kwargs: Any) -> list[bool | None]:
    """Whether each argument needs a gradient when the module's forward gets it."""
    args, kwargs = arguments_with_gradient(torch.zeros((), requires_grad=True), module, args, kwargs)
    given = inspect.signature(Layer().forward).bind(*args, **kwargs)
    return [None if value is None else value.requires_grad for value in (*given.args, *given.kwargs.values())]


@pytest.mark.parametrize(
    ("args", "kwargs", "needs"),
    [
        ((X,), {}, [True]),
        ((X, X), {}, [True, False]),
        ((X,), {"attention_mask": X, "position_bias": X}, [True, False, False]),
        ((), {"hidden": X, "attention_mask": X}, [True, False]),
        ((X, X, X, X), {}, [True, False, True, True]),  # more than forward names
        ((X, None, X), {}, [True, None, True]),
    ],
)
def test_a_mask_needs_no_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], needs: list[bool | None]) -> None:
    assert entered(Layer(), *args, **kwargs) == needs


@pytest.mark.parametrize("forward", [lambda *args: args, torch.add])
def test_where_forward_names_nothing_all_is_anchored(forward: Any) -> None:
    layer = Layer()
    layer.forward = forward  # type: ignore[method-assign]
    assert entered(layer, X, X) == [True, True]


def test_torch_add_has_no_signature() -> None:
    """As the test above needs."""
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(torch.add)


def test_what_enters_needs_a_gradient_in_every_container() -> None:
    @dataclass
    class Batch:
        embeds: torch.Tensor
        position_ids: torch.Tensor

    anchor = torch.zeros((), requires_grad=True)
    values, ids = torch.ones(2), torch.ones(2, dtype=torch.long)
    pair = namedtuple("pair", "embeds attention_mask")  # noqa: PYI024
    assert with_gradient(anchor, values).requires_grad and not values.requires_grad
    assert with_gradient(anchor, {"embeds": values, "deep": [(values,)]})["deep"][0][0].requires_grad
    assert not with_gradient(anchor, {"attention_mask": values})["attention_mask"].requires_grad
    assert with_gradient(anchor, UserDict(embeds=values))["embeds"].requires_grad
    output = with_gradient(anchor, BaseModelOutput(last_hidden_state=values))
    assert type(output) is BaseModelOutput and output.last_hidden_state.requires_grad
    batch = with_gradient(anchor, Batch(values, values))
    assert batch.embeds.requires_grad and not batch.position_ids.requires_grad
    assert with_gradient(anchor, pair(values, values)).embeds.requires_grad
    assert with_gradient(anchor, ids) is ids
