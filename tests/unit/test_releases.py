"""What a release of DeepSpeed does not have is refused by name, whichever is installed."""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import pytest

from lowmem_load.ds import partition
from lowmem_load.ds.partition import (
    HAS_AUTOCAST,
    HAS_AUTOEP,
    HAS_MICS,
    KEEPS_FP32,
    refuse_what_is_absent,
    warn_of_deadlocks,
)
from lowmem_load.errors import UnsupportedError

SETTINGS: dict[str, dict[str, Any]] = {
    HAS_MICS: {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    HAS_AUTOCAST: {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True}},
    HAS_AUTOEP: {"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": True}},
    KEEPS_FP32: {"zero_optimization": {"stage": 3}, "data_types": {"keep_in_fp32_modules": ["norm"]}},
}


@pytest.mark.parametrize(
    ("module", "name"),
    list(zip(SETTINGS, ("mics_shard_size", "torch_autocast", "expert_parallel", "data_types"), strict=True)),
)
def test_a_setting_without_its_module_is_refused_by_name(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "has", lambda asked: asked != module)
    with pytest.raises(UnsupportedError, match=rf"^{name}\S*: deepspeed \d\S+ .*install another release$"):
        refuse_what_is_absent(SETTINGS[module])
    for other in SETTINGS.keys() - {module}:
        refuse_what_is_absent(SETTINGS[other])


def test_what_is_switched_off_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "has", lambda _: False)
    refuse_what_is_absent({"zero_optimization": {"stage": 3, "mics_shard_size": -1}})
    refuse_what_is_absent({"zero_optimization": {}, "torch_autocast": {"enabled": False}, "data_types": {}})
    refuse_what_is_absent({"zero_optimization": {}, "torch_autocast": None, "data_types": {"keep_in_fp32_modules": []}})


@pytest.mark.parametrize(
    ("version", "device", "warned"),
    [("0.17.6", "nvme", True), ("0.17.6", "cpu", False), ("0.18.4", "nvme", False), ("0.16.4+cpu", "nvme", True)],
)
def test_a_swapper_that_may_hang_is_warned_of(
    version: str, device: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_deadlocks({"zero_optimization": {"stage": 3, "offload_param": {"device": device}}})
        warn_of_deadlocks({"zero_optimization": {"stage": 3}})
    assert [f"deepspeed {version} may hang" in str(one.message) for one in caught] == [True] * warned


def test_a_module_is_found_without_its_import() -> None:
    assert partition.has("deepspeed.runtime.zero.stage3")
    assert not partition.has("deepspeed.runtime.zero.stage4")
