"""What DeepSpeed is asked about parameters and buffers; stand-ins have the attributes that ZeRO-3 hangs on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.ds.parameters import fp32_buffers, is_partitioned, partition_of, persistent, whole_numel


def partitioned(numel: int) -> nn.Parameter:
    """As a ZeRO-3 parameter that is cut up between two ranks: empty, with its partition beside it."""
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_numel, parameter.ds_tensor = 0, numel, torch.zeros((numel + 1) // 2)
    return parameter  # type: ignore[no-any-return]


def test_elements_of_a_parameter_are_those_of_the_whole() -> None:
    cut, whole = partitioned(7), nn.Parameter(torch.empty(2, 3))
    assert (is_partitioned(cut), cut.numel(), whole_numel(cut), partition_of(cut).numel()) == (True, 0, 7, 4)
    assert (is_partitioned(whole), whole_numel(whole)) == (False, 6)


def test_a_partition_shares_its_memory() -> None:
    cut: Any = partitioned(4)
    partition_of(cut).fill_(5.0)
    assert cut.ds_tensor.tolist() == [5.0, 5.0]


# -- buffers ---------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("score_bias",)
    _keep_in_fp32_modules = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("score_bias", torch.zeros(2))
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("score_bias_count", torch.zeros(2, dtype=torch.int64))


def model() -> nn.Module:
    other = nn.Module()
    other.register_buffer("score_bias", torch.zeros(2))  # not below a class that names it
    return nn.ModuleDict({"router": Router(), "other": other})


@pytest.mark.parametrize(
    ("setting", "dtype", "expected"),
    [
        (None, torch.bfloat16, ["router.score_bias"]),
        ("auto", torch.bfloat16, ["router.score_bias"]),
        (None, torch.float16, ["router.score_bias", "router.scale"]),
        (None, torch.float32, []),
        ([], torch.bfloat16, []),
        (["score_bias"], torch.bfloat16, ["router.score_bias", "other.score_bias"]),
        (["other.*bias"], torch.float16, ["other.score_bias"]),
        (["r*.sc*e$"], torch.bfloat16, ["router.scale"]),
    ],
)
def test_buffers_that_stay_in_fp32(setting: Any, dtype: torch.dtype, expected: list[str]) -> None:
    made = model()
    kept = {id(buffer) for buffer in fp32_buffers(made, setting, dtype)}
    assert [name for name, buffer in made.named_buffers() if id(buffer) in kept] == expected


# -- parameters that are kept whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "in_all", "expected"),
    [
        (10, 1000, {"a": 4, "b": 10, "d": 3}),  # at most 10 elements each
        (9, 1000, {"a": 4, "d": 3}),
        (100, 14, {"a": 4, "b": 10}),  # 4 + 10 is as much as there may be
        (100, 13, {"a": 4, "d": 3}),  # b does not fit, d behind it does
        (0, 1000, {}),
    ],
)
def test_small_parameters_are_kept_as_long_as_there_is_room(each: int, in_all: int, expected: dict[str, int]) -> None:
    made = nn.ParameterDict({"a": partitioned(4), "b": partitioned(10), "c": partitioned(11), "d": partitioned(3)})
    config = {
        "stage": 3,
        "stage3_param_persistence_threshold": each,
        "stage3_model_persistence_threshold": in_all,
    }
    assert persistent({"zero_optimization": config}, made) == expected


def test_parameters_that_are_not_partitioned_do_not_count() -> None:
    made = nn.ParameterDict({"whole": nn.Parameter(torch.ones(2)), "cut": partitioned(3)})
    config = {"stage": 3, "stage3_param_persistence_threshold": 10, "stage3_model_persistence_threshold": 3}
    assert persistent({"zero_optimization": config}, made) == {"cut": 3}
