"""The ZeRO-3 target: what ranks hold, element by element, and what is refused before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.ds.zero3_target import MARK, Zero3
from lowmem_load.errors import ConfigError, IncompatibleVersionError, UnsupportedError
from lowmem_load.planning.expression import hold
from lowmem_load.planning.load_plan import Destination, TargetPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.target import HostBytes

CPU = torch.device("cpu")


def settings(world_size: int, *, bf16: bool = False, config: dict[str, Any] | None = None, **zero: Any) -> Settings:
    sections = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": bf16}, **(config or {})}
    return read_settings(sections, world_size=world_size).for_model(None)


def held_by(target: Zero3, *shape: int, dtype: torch.dtype = torch.float32) -> list[tuple[int, int, int]]:
    """Start, end and allocated elements of each region."""
    layout = target.layout("w", torch.empty(shape, dtype=dtype, device="meta"))
    return [
        (region.start, region.end, numel)
        for region, numel in zip(layout.regions, layout.numels, strict=True)
        if isinstance(region, FlatRange)
    ]


@pytest.mark.parametrize(
    ("rank", "world_size", "shape", "expected"),
    [
        (0, 1, (5, 7), (0, 35, 35)),
        (1, 4, (5, 7), (9, 18, 9)),  # ceil(35 / 4) = 9
        (3, 4, (5, 7), (27, 35, 9)),  # one element of padding
        (3, 4, (3,), (3, 3, 1)),  # padding alone
        (1, 2, (), (1, 1, 1)),
    ],
)
def test_partitions(rank: int, world_size: int, shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    assert held_by(Zero3(settings(world_size), rank, CPU), *shape) == [expected]


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [
        (0, 1, [(0, 10, 10), (0, 10, 10)]),  # also on one rank, as DeepSpeed has it
        (1, 2, [(5, 10, 5), (5, 10, 5)]),
        (2, 4, [(6, 9, 3), (0, 6, 6)]),  # partitions of ceil(10 / 4) = 3, secondary ones of two of them
        (3, 4, [(9, 10, 3), (6, 10, 6)]),
    ],
)
def test_secondary_partitions(rank: int, world_size: int, expected: list[tuple[int, int, int]]) -> None:
    assert held_by(Zero3(settings(world_size, zero_hpz_partition_size=2), rank, CPU), 10) == expected


def test_a_secondary_group_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_hpz_partition_size 2 does not divide the 3 ranks"):
        Zero3(settings(3, zero_hpz_partition_size=2), 0, CPU)


@pytest.mark.parametrize(
    ("config", "zero", "group", "message"),
    [
        ({"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, {}, None, "quantized_initialization"),
        (
            {},
            {"zero_hpz_partition_size": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
            None,
            "no swapper for secondary",
        ),
        ({}, {"zero_hpz_partition_size": 2}, object(), "cuts secondary groups out of all ranks"),
    ],
)
def test_what_cannot_be_followed_is_refused(config: Any, zero: Any, group: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Zero3(settings(2, config=config, **zero), 0, CPU, group)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.int64),
        (torch.bool, torch.bool),
    ],
)
def test_parameters_take_the_engines_dtype_if_they_have_fractions(stored: torch.dtype, expected: torch.dtype) -> None:
    target = Zero3(settings(2, bf16=True), 0, CPU)
    assert target.layout("w", torch.empty(4, dtype=stored, device="meta")).dtype == expected


@pytest.mark.parametrize(
    ("device", "offload", "on_host"),
    [
        ("cpu", None, True),
        ("cuda", None, False),
        ("cuda", "cpu", True),
        ("cuda", "nvme", True),
        ("cuda", "none", False),
    ],
)
def test_where_memory_will_be_is_known_without_the_device(device: str, offload: str | None, on_host: bool) -> None:
    zero = {} if offload is None else {"offload_param": {"device": offload, "nvme_path": "/x"}}
    target = Zero3(settings(2, **zero), 0, torch.device(device))
    assert target.layout("w", torch.empty(4, device="meta")).on_host is on_host
    assert target.device.type == device


@pytest.mark.parametrize(
    ("device", "offload", "inside", "outside"),
    [
        ("cpu", {}, 24, 24),
        ("cuda", {}, 0, 0),
        ("cuda", {"device": "cpu"}, 24, 0),
        ("cuda", {"device": "nvme", "nvme_path": "/x", "buffer_count": 3, "buffer_size": 100}, 3 * 100 * 4, 0),
        ("cuda", {"device": "nvme", "nvme_path": "/x"}, 5 * 100_000_000 * 4, 0),
    ],
)
def test_host_memory_is_that_of_what_lies_there(device: str, offload: Any, inside: int, outside: int) -> None:
    """Under nvme the buffers of the swapper, whatever the model's size is."""
    plan = plan_of(nn.Linear(3, 2, bias=False).weight, FlatRange(0, 6))
    with_settings = settings(2, **({"offload_param": offload} if offload else {}))
    target = Zero3(with_settings, 0, torch.device(device))
    assert target.host_bytes([plan]) == HostBytes(inside)
    elsewhere = Zero3(with_settings, 0, torch.device(device), modules=("other",))
    buffers = inside if offload.get("device") == "nvme" else 0
    assert elsewhere.host_bytes([plan]) == HostBytes(outside + buffers)


def test_buffers_are_kept_in_fp32_by_name(lone_process: None) -> None:
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "other": nn.BatchNorm1d(2)})
    named = {"data_types": {"keep_in_fp32_modules": ["norm"]}}
    target = Zero3(settings(1, bf16=True, config=named), 0, CPU)
    kept = {id(buffer) for buffer in target.fp32_buffers(model)}
    assert id(model["norm"].running_mean) in kept
    assert id(model["other"].running_mean) not in kept


def plan_of(parameter: nn.Parameter, region: FlatRange) -> TargetPlan:
    fill = Planner().plan_fill("w", hold(torch.zeros(parameter.shape)), region)
    made = (Destination(region, region.numel, fill),)
    return TargetPlan(("w",), tuple(parameter.shape), torch.float32, "zero3", made, False, False, (), "")


def test_memory_that_deepspeed_would_make_otherwise_is_an_error(lone_process: None) -> None:
    """And not a partition with the wrong elements."""
    target, model = Zero3(settings(1), 0, CPU), nn.Linear(3, 2, bias=False, device="meta")
    target.prepare(model)
    with pytest.raises(IncompatibleVersionError, match=r"w: DeepSpeed's partitions have \[6\] elements, those of"):
        target.make(plan_of(model.weight, FlatRange(0, 3)), model.weight, lambda: None)


def test_settings_that_deepspeed_reads_otherwise_are_an_error(lone_process: None) -> None:
    of_two = replace(settings(1), world_size=2)
    with pytest.raises(
        IncompatibleVersionError, match=r"hpZ's group \(.*, 0, 1, \(0, 0\)\) from this ds_config, the plan"
    ):
        Zero3(of_two, 0, CPU).prepare(nn.Linear(1, 1, device="meta"))


def test_the_modules_that_are_partitioned_are_marked(lone_process: None) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, device="meta"), "b": nn.Linear(1, 1, device="meta")})
    Zero3(settings(1), 0, CPU, None, ("b",)).prepare(model)
    assert [MARK in vars(module) for module in (model, model["a"], model["b"])] == [False, False, True]
