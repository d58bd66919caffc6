"""The ds_config's optimizer for parameters outside of the partitioned part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_load.ds.engine import optimizer_over


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
    made = optimizer_over(asked, params, [torch.nn.Parameter(torch.ones(1))])
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
    assert optimizer_over(asked, params, []) == ([], params)
