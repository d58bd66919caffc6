"""What an engine is asked for, and its functions that are handled: optimizer, scale, arguments by name."""

import inspect
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lowmem_load.engines.engine import PartitionedPart, Shell, arguments_with_gradient, with_gradient
from lowmem_load.engines.hooks import asked_first
from lowmem_load.foreign_names import INITIALIZE


def part_of(params: dict[str, Any], **engine: Any) -> PartitionedPart:
    """A part whose engine answers so, and whose ds_config had these params of the optimizer."""
    part = PartitionedPart.__new__(PartitionedPart)
    part.engine, part._optimizer_params = SimpleNamespace(**engine), params
    return part


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("AdamW", {"lr": 0.5, "betas": (0.5, 0.75)}, torch.optim.AdamW),
        ("Adam", {"lr": 0.5, "weight_decay": 0.25}, torch.optim.AdamW),  # as DeepSpeed: adam_w_mode unless told not to
        ("Adam", {"lr": 0.5, "adam_w_mode": False}, torch.optim.Adam),
    ],
)
def test_next_to_an_optimizer_in_host_memory_torch_steps_the_other_parameters(
    name: str, params: dict[str, Any], expected: type[torch.optim.Optimizer]
) -> None:
    part = part_of(params, optimizer_name=lambda: name, zero_use_cpu_optimizer=lambda: True)
    made = part.optimizer_over([nn.Parameter(torch.ones(1))])
    assert type(made) is expected
    (group,) = made.param_groups
    known = {key: value for key, value in params.items() if key != "adam_w_mode"}
    assert {key: group[key] for key in known} == known


def test_an_engine_that_took_settings_out_gets_them_back_for_the_other_parameters() -> None:
    """As releases before 0.19.6 do: without `torch_adam` the other part would have DeepSpeed's own Adam."""
    params = {"lr": 0.5, "torch_adam": True}
    left = {"lr": 0.5}
    part = part_of(
        params,
        optimizer_name=lambda: "AdamW",
        optimizer_params=lambda: left,
        zero_use_cpu_optimizer=lambda: False,
        _configure_basic_optimizer=lambda parameters: (parameters, dict(left)),
    )
    assert part.optimizer_over([]) == ([], params)


def test_where_the_loss_scale_grows_both_parts_are_unscaled_by_the_new_one() -> None:
    """As DeepSpeed does: it updates the scale, then unscales and clips."""
    zero = SimpleNamespace(loss_scale=4.0, overflow=False)
    part = part_of(
        {},
        optimizer=zero,
        step=lambda: vars(zero).update(loss_scale=8.0),
        fp16_enabled=lambda: True,
        gradient_clipping=lambda: 1.0,
        get_global_grad_norm=lambda: 2.0,
    )
    assert part.step(16.0) == pytest.approx(1 / (8.0 * 2.0))


def test_modules_in_eval_mode_stay_so_under_an_engine() -> None:
    model = nn.ModuleDict({"llm": nn.Dropout(), "head": nn.Linear(2, 2)}).train()
    model["llm"].eval()
    shell = Shell(model, {"llm": model["llm"]}, None)
    assert shell.training and not model["llm"].training


# -- what enters the partitioned part needs a gradient -----------------------------------------------------------------

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


# -- handlers of functions of DeepSpeed --------------------------------------------------------------------------------


def ordinary(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return "ordinary", args, kwargs


def test_a_handler_gets_the_arguments_by_name_and_may_answer() -> None:
    """What cannot be bound is for DeepSpeed to refuse."""
    seen: list[Any] = []

    def answer(arguments: dict[str, Any]) -> str | None:
        seen.append(arguments)
        return "ours" if arguments["model"] == 1 else None

    call = asked_first(INITIALIZE, answer)
    assert call(ordinary, None, 1) == "ours"
    assert call(ordinary, model=2) == ("ordinary", (), {"model": 2})
    assert call(ordinary, modell=1) == ("ordinary", (), {"modell": 1})
    assert seen == [{"args": None, "model": 1}, {"model": 2}]
