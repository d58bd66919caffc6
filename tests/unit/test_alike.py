"""Parameters that are alike are planned once, and what is said of them is what their own plans say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.hf.quantizers import dequantizing
from lowmem_load.inspection.conversions import conversions_of, loaded
from lowmem_load.load.plan import plan_ranks
from lowmem_load.planning import expression as ex
from lowmem_load.planning.alike import Alike
from lowmem_load.planning.load_plan import LoadPlan
from tests import builders
from tests.multi_rank.test_formats import with_fp8

BF16 = torch.bfloat16


def source(name: str, *shape: int, dtype: torch.dtype = BF16) -> ex.Source:
    return ex.Source("/model/file", name, 8 * len(name), shape or (2, 3), dtype)


def experts(first: ex.Expression, second: ex.Expression, dim: int = 0) -> ex.Expression:
    return ex.cast(ex.permute(ex.concat([first, second], dim), (1, 0)), torch.float32)


def test_expressions_are_alike_that_differ_in_their_tensors_alone() -> None:
    alike, a, b, c, d = Alike(), source("a"), source("bb"), source("ccc"), source("dddd")
    assert not alike.leaves_out(["x"], experts(a, b), "layout")
    assert alike.leaves_out(["y", "tied"], experts(c, d), "layout")
    (found,) = alike.found
    assert (found.names, found.like, found.tensors) == (("y", "tied"), "x", {a: c, b: d})


def test_a_pattern_is_alike_for_each_of_its_instances() -> None:
    alike, slot = Alike(), ex.Slot((2, 3), BF16)
    pattern = ex.permute(slot, (1, 0))
    given = [ex.Instance(pattern, (slot,), (source(name),)) for name in ("a", "bb")]
    other = ex.Instance(ex.permute(slot, (1, 0)), (slot,), (source("a"),))
    assert [alike.leaves_out([str(each)], each, "layout") for each in (*given, other)] == [False, True, False]


@pytest.mark.parametrize(
    ("other", "layout"),
    [
        (experts(source("ccc"), source("dddd")), "another layout"),
        (experts(source("ccc"), source("dddd"), dim=1), "layout"),
        (experts(source("ccc"), source("ccc")), "layout"),
        (experts(source("ccc"), source("dddd", 3, 3)), "layout"),
        (experts(source("ccc", dtype=torch.float16), source("dddd")), "layout"),
        (experts(source("ccc"), ex.cast(source("dddd", dtype=torch.float16), BF16)), "layout"),
        (experts(source("ccc"), ex.held(torch.zeros(2, 3, dtype=BF16))), "layout"),
        (ex.concat([source("ccc"), source("dddd")], 0), "layout"),
    ],
)
def test_all_else_is_planned(other: ex.Expression, layout: str) -> None:
    alike = Alike()
    asked = [
        alike.leaves_out(["x"], experts(source("a"), source("bb")), "layout"),
        alike.leaves_out(["y"], other, layout),
    ]
    assert asked == [False, False] and not alike.found


def test_values_in_memory_are_alike_where_they_are_the_same() -> None:
    alike, value = Alike(), ex.held(torch.zeros(2, 3, dtype=BF16))
    given = [experts(source("a"), value), experts(source("bb"), value), experts(source("a"), ex.held(value.flat))]
    assert [alike.leaves_out([str(number)], each, "layout") for number, each in enumerate(given[:2])] == [False, True]


@pytest.mark.parametrize(
    "build",
    [
        lambda root: builders.tiny_mixtral(root, torch.float32, num_hidden_layers=3),
        builders.tiny_qwen3_vl_moe,
        builders.tiny_qwen2_tied,
        lambda root: with_fp8(root, root)[0],
    ],
    ids=["experts, cast", "transposed", "tied", "fp8"],
)
def test_what_is_said_of_a_model_is_what_all_of_its_plans_say(build: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = build(tmp_path)
    ds_config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    kwargs: dict[str, Any] = {"ranks": [0], "world_size": 1, "device": torch.device("cpu")}
    if folder.name == "fp8":
        kwargs["quantization_config"] = dequantizing(str(folder), {})

    def planned(alike: Alike | None) -> LoadPlan:
        return plan_ranks(folder, ds_config, alike=alike, **kwargs)[0]

    alike = Alike()
    whole, part = planned(None), planned(alike)
    assert len(part.targets) + len(alike.found) == len(whole.targets) and alike.found
    of_whole, of_part = loaded(whole, Alike()), loaded(part, alike)
    assert [each.names for each in of_part] == [target.names for target in whole.targets]
    assert conversions_of(part, of_part) == conversions_of(whole, of_whole)
