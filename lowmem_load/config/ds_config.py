"""Reads a ds_config, which is untrusted input, into a copy, checks what a load uses, and decides the precision."""

from __future__ import annotations

import copy
import json
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from lowmem_load.errors import ConfigError

AUTO: Literal["auto"] = "auto"
"""Hugging Face's placeholder of a value that the training loop fills in."""


def read_ds_config(ds_config: Mapping[str, Any] | str | os.PathLike[str] | object) -> dict[str, Any]:
    """Return a deep copy of a ds_config as plain dicts and lists; raise ConfigError if it cannot be used.

    It may be a mapping, the path of a JSON file, JSON text, or an object with a mapping as its `config` attribute
    (HfDeepSpeedConfig).
    """
    config: Any = ds_config if isinstance(ds_config, Mapping) else getattr(ds_config, "config", None)
    if isinstance(ds_config, str | os.PathLike):
        is_text = isinstance(ds_config, str) and ds_config.lstrip().startswith("{")
        path = f"ds_config file {os.fspath(ds_config)}"
        text, source = (str(ds_config), "ds_config string") if is_text else (_read_file(ds_config, path), path)
        config = _parse_json(text, source)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"ds_config: cannot use a {type(ds_config).__name__}; "
            "pass a dict, the path of a JSON file, or an HfDeepSpeedConfig"
        )
    return plain_copy(config)


def given_ds_configs(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the ds_configs that are among the arguments of `deepspeed.initialize`, by name."""
    own = arguments.get("config"), arguments.get("config_params")
    return [each for each in (*own, getattr(arguments.get("args"), "deepspeed_config", None)) if each is not None]


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage, 0 to 3, that a ds_config asks for; raise ConfigError if it is absent or malformed."""
    example = 'write "zero_optimization": {"stage": 3}'
    section = ds_config.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"ds_config zero_optimization: expected an object, got {section!r}; {example}")
    stage = section.get("stage")  # without one DeepSpeed would take stage 0
    if not is_int(stage) or not 0 <= stage <= 3:
        raise ConfigError(f"ds_config zero_optimization.stage: expected 0, 1, 2 or 3, got {stage!r}; {example}")
    return stage


def is_int(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def comparable(value: Any) -> Any:
    """Return a configuration without what may differ between ranks: paths, and objects beyond their class."""
    if isinstance(value, Mapping):
        return {key: comparable(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, str):
        return "" if os.sep in value else value
    return value if isinstance(value, bool | int | float | None) else type(value).__name__


def plain_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy in which every mapping is a dict, also those that deepcopy refuses."""

    def copied(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: copied(item) for key, item in value.items()}
        return [copied(item) for item in value] if isinstance(value, list | tuple) else copy.deepcopy(value)

    try:
        return {key: copied(value) for key, value in config.items()}
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"ds_config: cannot be copied ({error}); write plain values") from error


# -- text ------------------------------------------------------------------------------------------------------------


def _read_file(path: str | os.PathLike[str], label: str) -> str:
    if not os.path.isfile(path):  # opening a FIFO would wait for a writer
        raise ConfigError(f"{label}: no such file; pass the path of a JSON file, or a dict")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: cannot be read ({error}); save it as UTF-8 JSON") from error


def _parse_json(text: str, source: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            duplicates = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise ConfigError(f"{source}: key(s) {', '.join(duplicates)} given more than once; keep one of each")
        return unique

    try:
        config = json.loads(text, object_pairs_hook=without_duplicates)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: not JSON: {error}; correct it there (comments and trailing commas are not JSON either)"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: expected an object {{...}} at top level, got {type(config).__name__}")
    return config


# -- values ----------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Which values a key may have: in words, and as a test."""

    expected: str
    fits: Callable[[Any], bool]


_SECTION = _Kind("an object {...}", lambda value: isinstance(value, Mapping))
_OBJECT = _Kind("an object {...} or null", lambda value: value is None or isinstance(value, Mapping))
_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_WHOLE = _Kind("a whole number", is_int)
_SIZE = _Kind("a number of elements", lambda value: is_int(value) or (isinstance(value, float) and value.is_integer()))
_DEVICE = _Kind('"none", "cpu" or "nvme"', lambda value: value in ("none", "cpu", "nvme"))
_NAMES = _Kind(
    "a list of names", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)

KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("optimizer", "optimizer.params", "scheduler", "scheduler.params"), _OBJECT),
    **dict.fromkeys(("optimizer.type", "scheduler.type"), _TEXT),
    **dict.fromkeys(("aio", "expert_parallel"), _OBJECT),
    **dict.fromkeys(("weight_quantization", "data_types", "tensor_parallel"), _SECTION),
    "aio.use_gds": _FLAG,
    "data_types.keep_in_fp32_modules": _NAMES,
    "tensor_parallel.autotp_size": _WHOLE,
    **{f"zero_optimization.offload_{what}": _OBJECT for what in ("param", "optimizer")},
    **{f"zero_optimization.offload_{what}.device": _DEVICE for what in ("param", "optimizer")},
    **{f"zero_optimization.offload_param.{key}": _SIZE for key in ("buffer_count", "buffer_size")},
    "zero_optimization.zero_hpz_partition_size": _WHOLE,
    "zero_optimization.mics_shard_size": _WHOLE,
}
"""What a load reads before DeepSpeed has checked it, by dotted key, sections before their keys."""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names them all, for values that do not fit `KINDS`. "auto" passes."""
    problems = []
    for path, kind in KINDS.items():
        value: Any = config
        for key in path.split("."):
            value = value.get(key, AUTO) if isinstance(value, Mapping) else AUTO
        if value != AUTO and not kind.fits(value):
            problems.append(f"- {path}: expected {kind.expected}, got {reprlib.repr(value)}")
    if problems:
        raise ConfigError(f"ds_config: {len(problems)} key(s) have values that cannot be used\n" + "\n".join(problems))


# -- bf16, fp16 or fp32: docs/reference/configuration.md lists every case ----------------------------------------------


def precision_of(
    ds_config: Mapping[str, Any], *, trainer_bf16: bool | None = None, trainer_fp16: bool | None = None
) -> torch.dtype:
    """Return the dtype of parameters that a ds_config and the training arguments (None: there are none) agree on.

    A training argument replaces a ds_config value that is absent or "auto". A value that is still open is the opposite
    of the other one. If both are open, the answer is bf16. A value that is absent, and that no training argument
    replaces, is off, as DeepSpeed reads it.
    """
    bf16 = _switch(ds_config, "bf16", trainer_bf16)
    fp16 = _switch(ds_config, "fp16", trainer_fp16)
    if bf16 is None:
        bf16 = not fp16
    if fp16 is None:
        fp16 = not bf16
    if bf16 and fp16:
        raise ConfigError("bf16 and fp16 are both enabled: disable one of them, in the ds_config or TrainingArguments")
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def _switch(ds_config: Mapping[str, Any], name: str, trainer: bool | None) -> bool | None:
    """Return whether bf16 or fp16 is on by the ds_config or the training argument; None if neither says it."""
    if "bfloat16" in ds_config:  # DeepSpeed reads it only without "bf16", and Hugging Face never does
        raise ConfigError('ds_config bfloat16: rename this section to "bf16"')
    section = ds_config.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'ds_config {name}: expected an object such as {{"enabled": true}}, got {section!r}; '
            "write one, or remove the key"
        )
    if not (trainer is None or isinstance(trainer, bool)):
        raise ConfigError(f"TrainingArguments.{name}: expected True or False, got {trainer!r}")
    enabled = section.get("enabled", False if trainer is None else AUTO)
    if enabled == AUTO:
        return trainer
    if not isinstance(enabled, bool):  # 1 == True, and Hugging Face and DeepSpeed differ on 1
        raise ConfigError(f'ds_config {name}.enabled: expected true, false or "auto", got {enabled!r}')
    if trainer not in (None, enabled):
        raise ConfigError(
            f"ds_config {name}.enabled={enabled} and TrainingArguments.{name}={trainer} contradict each other; "
            'make them equal, or write "auto" in the ds_config to follow the training arguments'
        )
    return enabled
