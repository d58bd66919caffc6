"""Reading a ds_config, its ZeRO stage, and what its keys may hold."""

import json
import os
import re
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from lowmem_load.config.ds_config import KINDS, check_kinds, read_ds_config, zero_stage
from lowmem_load.config.settings import read_settings
from lowmem_load.engines.partition import check_by_deepspeed
from lowmem_load.errors import ConfigError

# The ZeRO-3 example of the Hugging Face documentation.
HF_ZERO3: dict[str, Any] = json.loads(Path(__file__).with_name("hf_zero3.json").read_text())

# ---- read_ds_config


def test_every_source_gives_the_same_config(tmp_path: Path) -> None:
    text = json.dumps(HF_ZERO3, indent=2)
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    for source in (HF_ZERO3, types.MappingProxyType(HF_ZERO3), path, str(path), text, HfDeepSpeedConfig(HF_ZERO3)):
        assert read_ds_config(source) == HF_ZERO3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": "\xe9"}', r"cannot be read \(.*position 7: .*\); save it as UTF-8 JSON"),
        (b'{\n  // stage\n  "a": 1\n}', r"not JSON: .*: line 2 column 3 .*comments and trailing commas are not JSON"),
        (b"[1, 2]", r"expected an object \{\.\.\.\} at top level, got list"),
        (
            b'{"zero_optimization": {"stage": 2, "x": 0, "stage": 3, "x": 0}}',
            r"key\(s\) stage, x given more than once; keep one of each",
        ),
        (b'{"a": ' * 100_000, "not JSON: .*recursion"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^ds_config file {re.escape(str(path))}: {message}"):
        read_ds_config(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody writes into the FIFO: opening it the ordinary way waits for ever. /dev/zero has no end."""
    os.mkfifo(tmp_path / "fifo")
    others = (tmp_path / "absent.json", str(tmp_path / "absent.json"), "ds_config_zero3", "")
    for path in (tmp_path, tmp_path / "fifo", "/dev/zero", *others):
        with pytest.raises(ConfigError, match=rf"^ds_config file {path}: no such file; pass the path"):
            read_ds_config(path)


@pytest.mark.parametrize("source", [None, 3, ["a"], types.SimpleNamespace(config="ds.json"), b"{}"])
def test_other_types_are_refused(source: object) -> None:
    message = rf"ds_config: cannot use a {type(source).__name__}; pass a dict, the path of a JSON file, or an HfDeep"
    with pytest.raises(ConfigError, match=message):
        read_ds_config(source)


def within_itself() -> dict[str, Any]:
    config: dict[str, Any] = {"a": [1]}
    config["a"].append({"b": config})
    return config


@pytest.mark.parametrize("config", [within_itself(), {"a": threading.Lock()}], ids=["within itself", "a lock"])
def test_what_cannot_be_copied_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ds_config: cannot be copied .*; write plain values"):
        read_ds_config(config)


# ---- zero_stage


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, 'stage: expected 0, 1, 2 or 3, got None; write "zero_optimization": {"stage": 3}'),
        ({"zero_optimization": True}, "zero_optimization: expected an object, got True; write"),
        ({"zero_optimization": {}}, "stage: expected 0, 1, 2 or 3, got None; write"),
        ({"zero_optimization": {"stage": "auto"}}, "stage: expected 0, 1, 2 or 3, got 'auto'; write"),
        ({"zero_optimization": {"stage": 4}}, "stage: expected 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": True}}, "got True"),
        ({"zero_optimization": {"stage": 3.0}}, "got 3.0"),
    ],
)
def test_a_bad_stage_says_what_to_write(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        zero_stage(config)


# ---- check_kinds


def with_value(path: str, value: Any) -> dict[str, Any]:
    """Returns a ds_config of stage 3 with a value under a dotted key."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return config


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("is_active", [False, True])
def test_a_load_refuses_values_before_it_reads_them(path: str, is_active: bool, tmp_path: Path) -> None:
    """Also where a training loop has yet to complete the ds_config, and from a file."""
    wrong: Any = 1.5 if KINDS[path].fits(7) else 7
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(with_value(path, wrong)))
    for source in (with_value(path, wrong), str(file)):
        with pytest.raises(ConfigError, match=rf"1 key\(s\) have values .*\n- {path}: expected .*, got {wrong}"):
            read_settings(source, world_size=2, is_active=is_active)
    check_kinds(with_value(path, "auto"))


def test_all_wrong_keys_are_one_error_that_shows_long_values_in_part() -> None:
    with pytest.raises(
        ConfigError, match=r"2 key\(s\) have values that cannot be used\n- aio: .*\n- data_types"
    ) as caught:
        check_kinds({"aio": "x" * 100_000, "data_types": 7})
    assert len(str(caught.value)) < 300


def test_deepspeed_takes_its_own_defaults() -> None:
    defaults = DeepSpeedZeroConfig(stage=3, offload_param={}, offload_optimizer={}).model_dump(by_alias=True)
    check_kinds({"zero_optimization": defaults})
    known = {path.split(".")[1] for path in KINDS if path.startswith("zero_optimization.")}
    assert known - set(defaults) == {"mics_shard_size"}  # which it has no more


def test_deepspeed_itself_refuses_other_values() -> None:
    for key in ("sub_group_size", "stage3_param_persistence_threshold", "reduce_bucket_size"):
        with pytest.raises(ConfigError, match=rf"deepspeed .* refuses the ds_config: .*\n?.*{key}"):
            check_by_deepspeed({**with_value(f"zero_optimization.{key}", -1), "train_batch_size": 2}, 2)
    batches = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match="train_batch_size is not equal to micro_batch_per_gpu"):
        check_by_deepspeed({"zero_optimization": {"stage": 3}, **batches}, 4)
    check_by_deepspeed({"zero_optimization": {"stage": 3}, **batches}, 2)  # although no process group is there
