"""What enters the partitioned part is made to need a gradient, but for masks and positions, however they are passed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.ds.engine import PartitionedPart

X = torch.ones(2, 3)


class Layer(nn.Module):
    def forward(self, hidden: Any, attention_mask: Any = None, *rest: Any, position_bias: Any = None) -> Any:
        raise NotImplementedError


def entered(module: nn.Module, *args: Any, **kwargs: Any) -> list[bool | None]:
    """Whether each argument needs a gradient when the module's forward gets it."""
    part = PartitionedPart.__new__(PartitionedPart)
    part._anchor, part._inside, part._depth = torch.zeros((), requires_grad=True), True, 0
    part._entered = {module}
    args, kwargs = part._enter_chosen(module, args, kwargs)
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


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("AdamW", {"lr": 0.5, "betas": (0.5, 0.75)}, torch.optim.AdamW),
        ("Adam", {"lr": 0.5, "weight_decay": 0.25}, torch.optim.AdamW),  # as DeepSpeed: adam_w_mode unless told not to
        ("Adam", {"lr": 0.5, "adam_w_mode": False}, torch.optim.Adam),
    ],
)
def test_beside_an_optimizer_in_host_memory_torch_steps_the_other_parameters(
    name: str, params: dict[str, Any], expected: type[torch.optim.Optimizer]
) -> None:
    asked = SimpleNamespace(optimizer_name=lambda: name, zero_use_cpu_optimizer=lambda: True)
    part = SimpleNamespace(engine=asked, _optimizer_params=params)
    made = PartitionedPart.optimizer_over(part, [torch.nn.Parameter(torch.ones(1))])
    assert type(made) is expected
    (group,) = made.param_groups
    assert {key: group[key] for key in params if key != "adam_w_mode"} == {
        key: value for key, value in params.items() if key != "adam_w_mode"
    }


def test_an_engine_that_took_settings_out_gets_them_back_for_the_other_parameters() -> None:
    """As releases before 0.19.6 do: without `torch_adam` the other part would have DeepSpeed's own Adam."""
    params = {"lr": 0.5, "torch_adam": True}
    left = {"lr": 0.5}
    asked = SimpleNamespace(
        optimizer_name=lambda: "AdamW",
        optimizer_params=lambda: left,
        zero_use_cpu_optimizer=lambda: False,
        _configure_basic_optimizer=lambda parameters: (parameters, dict(left)),
    )
    part = SimpleNamespace(engine=asked, _optimizer_params=params)
    assert PartitionedPart.optimizer_over(part, []) == ([], params)
