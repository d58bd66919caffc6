"""What keys of a ds_config may hold: each that loading goes by is refused by name when it holds something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from lowmem_load.config.kinds import KINDS, check_kinds
from lowmem_load.config.settings import read_settings
from lowmem_load.errors import ConfigError


def with_value(path: str, value: Any) -> dict[str, Any]:
    """Returns a ds_config of stage 3 with a value under a dotted key."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return config


WRONG: tuple[Any, ...] = (7, -1, 10**400, 1.5, float("inf"), "7", "", True, [], [7], {"a": 1}, None)


@pytest.mark.parametrize("path", KINDS)
def test_each_key_is_named_with_what_it_holds(path: str) -> None:
    refused = [value for value in WRONG if not KINDS[path].fits(value)]
    assert refused
    for value in refused:
        with pytest.raises(ConfigError, match=rf"1 key\(s\) hold what they cannot\n- {path}: expected .*, got "):
            check_kinds(with_value(path, value))


@pytest.mark.parametrize(
    "path",
    [
        *("optimizer", "scheduler", "aio", "weight_quantization", "data_types", "data_types.keep_in_fp32_modules"),
        *("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
        *("zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path"),
        *("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
        "zero_optimization.stage3_param_persistence_threshold",
    ],
)
@pytest.mark.parametrize("is_active", [False, True])
def test_a_load_refuses_them_before_it_reads_them(path: str, is_active: bool, tmp_path: Path) -> None:
    """Also where a training loop has yet to complete the ds_config, and from a file."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(with_value(path, [7])))
    for given in (with_value(path, [7]), str(file)):
        with pytest.raises(ConfigError, match=rf"- {path}: expected .*, got \[7\]"):
            read_settings(given, world_size=2, is_active=is_active)


def test_all_wrong_keys_are_one_error() -> None:
    with pytest.raises(
        ConfigError, match=r"2 key\(s\) hold what they cannot\n- aio: .*\n- zero_optimization.sub_group_"
    ):
        check_kinds({"aio": 7, "zero_optimization": {"sub_group_size": -1}})


@pytest.mark.parametrize("value", [10**12, 1e12, (1 << 63) - 1, 0, "auto"])
def test_thresholds_may_be_as_large_as_torch_counts(value: Any) -> None:
    check_kinds(with_value("zero_optimization.stage3_max_live_parameters", value))


@pytest.mark.parametrize("value", [1 << 63, 10**19, -1, 0.5, float("-inf")])
def test_thresholds_beyond_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="stage3_max_live_parameters: expected a whole number from 0 to 9223372036"):
        check_kinds(with_value("zero_optimization.stage3_max_live_parameters", value))


def test_long_values_are_shown_in_part() -> None:
    with pytest.raises(ConfigError) as caught:
        check_kinds({"aio": "x" * 100_000})
    assert len(str(caught.value)) < 300


def test_deepspeed_takes_its_own_defaults() -> None:
    defaults = DeepSpeedZeroConfig(stage=3, offload_param={}, offload_optimizer={}).model_dump(by_alias=True)
    check_kinds({"zero_optimization": defaults})
    known = {path.split(".")[1] for path in KINDS if path.startswith("zero_optimization.")}
    assert known - set(defaults) == {"mics_shard_size"}  # which it has no more
