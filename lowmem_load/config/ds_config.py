"""Reads a ds_config, which is untrusted input, into a copy, checks what a load uses, and decides the precision."""

from __future__ import annotations

import copy
import enum
import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

from lowmem_load.errors import ConfigError

AUTO: Literal["auto"] = "auto"
"""Hugging Face's placeholder of a value that the training loop fills in."""

MAX_FILE_NBYTES = 4 << 20
"""Limit of a ds_config file: parsed in less than a second and 100 MB. Long ones have 4 KB."""

MAX_DEPTH, MAX_VALUES = 64, 1 << 20
"""Limits of nesting and of all values. DeepSpeed's own sections nest 5 deep."""

MAX_INT_BITS = 1024
"""Limit of an integer. Python refuses to print one of more than 4300 digits."""

_PLAIN = (str, bool, int, float, type(None))


def read_ds_config(ds_config: Mapping[str, Any] | str | os.PathLike[str] | object) -> dict[str, Any]:
    """Return a deep copy of a ds_config as plain dicts and lists; raise ConfigError if it cannot be used.

    It may be a mapping, the path of a JSON file, JSON text, or an object with a mapping as its `config` attribute
    (HfDeepSpeedConfig).
    """
    if isinstance(ds_config, Mapping):
        return plain_copy(ds_config)
    if isinstance(ds_config, (str, os.PathLike)):
        is_text = isinstance(ds_config, str) and ds_config.lstrip().startswith("{")
        path = f"ds_config file {os.fspath(ds_config)}"
        text, source = (str(ds_config), "ds_config string") if is_text else (_read_file(ds_config, path), path)
        return plain_copy(_parse_json(text, source))
    config = getattr(ds_config, "config", None)
    if isinstance(config, Mapping):
        return plain_copy(config)
    raise ConfigError(
        f"ds_config: cannot use a {type(ds_config).__name__}; "
        "pass a dict, the path of a JSON file, or an HfDeepSpeedConfig"
    )


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage, 0 to 3, that a ds_config asks for; raise ConfigError where it is absent or malformed."""
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
    num_values = 0

    def items(section: Mapping[str, Any], depth: int) -> dict[str, Any]:
        for key in section:
            _check_number(key, "a key")
        return {key: value(item, key, depth + 1) for key, item in section.items()}

    def value(item: Any, key: str, depth: int) -> Any:
        nonlocal num_values
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            raise ConfigError(
                f"ds_config {key!r}: is within itself, or more than {MAX_DEPTH} deep, or one of more than {MAX_VALUES} "
                "values; write less"
            )
        if isinstance(item, (list, tuple)):
            return [value(inner, key, depth + 1) for inner in item]
        _check_number(item, repr(key))
        if type(item) in _PLAIN:
            return item
        if isinstance(item, Mapping):
            return items(item, depth)
        try:
            return copy.deepcopy(item)
        except (TypeError, RecursionError) as error:
            raise ConfigError(
                f"ds_config {key!r}: a {type(item).__name__} cannot be copied ({error}); write a plain value"
            ) from error

    return items(config, 0)


def _check_number(value: object, where: str) -> None:
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"ds_config {where}: is NaN; write a number")
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ConfigError(f"ds_config {where}: is an integer of {value.bit_length()} bits, at most {MAX_INT_BITS}")


# -- text ------------------------------------------------------------------------------------------------------------


def _read_file(path: str | os.PathLike[str], label: str) -> str:
    if not os.path.exists(path):
        raise ConfigError(f"{label}: no such file; pass the path of a JSON file, or a dict")
    if not os.path.isfile(path):  # opening a FIFO would wait for a writer
        raise ConfigError(f"{label}: is not a regular file; pass the path of a JSON file")
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror})") from error
    if len(content) > MAX_FILE_NBYTES:
        raise ConfigError(f"{label}: has more than {MAX_FILE_NBYTES} bytes; is it another file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: not UTF-8 text at byte {error.start}; save it as UTF-8 JSON") from error


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
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not JSON at line {error.lineno}, column {error.colno} ({error.msg}); correct it there "
            "(comments and trailing commas are not JSON either)"
        ) from error
    except (ValueError, RecursionError) as error:  # an integer of too many digits; objects in objects
        raise ConfigError(f"{source}: cannot be parsed: {error}; write less") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: expected an object {{...}} at top level, got {type(config).__name__}")
    return config


# -- values ----------------------------------------------------------------------------------------------------------

MAX_NUMEL = (1 << 63) - 1
"""Elements that torch can count. Thresholds may well be 1e12, "never"."""

MAX_BUFFERS = 1 << 16
MAX_RANKS = 1 << 32

_MISSING = object()


class _Kind(NamedTuple):
    """What a key may hold: in words, and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: int = MAX_NUMEL) -> _Kind:
    def fits(value: Any) -> bool:  # a count of elements may be a float, such as 1e9
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer() and most == MAX_NUMEL)
        return is_whole and not isinstance(value, bool) and least <= value <= most

    return _Kind(f"a whole number from {least} to {most}", fits)


def _object(example: str, *, or_null: bool = True) -> _Kind:
    types = (Mapping, type(None)) if or_null else Mapping
    return _Kind(f"an object such as {example}", lambda value: isinstance(value, types))


_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_PATH = _Kind("the path of a folder", lambda value: isinstance(value, str | os.PathLike | None))
_DEVICE = _Kind('"none", "cpu" or "nvme"', lambda value: isinstance(value, str) and value in ("none", "cpu", "nvme"))
_PATTERNS = _Kind(
    'a list of names such as ["norm"]',
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
_OFFLOAD = {
    "": _object('{"device": "cpu"}'),
    ".device": _DEVICE,
    ".nvme_path": _PATH,
    ".buffer_count": _whole(0, MAX_BUFFERS),
    ".pin_memory": _FLAG,
}

KINDS: Mapping[str, _Kind] = {
    "optimizer": _object('{"type": "AdamW", "params": {"lr": 1e-5}}'),
    "optimizer.type": _TEXT,
    "optimizer.params": _object('{"lr": 1e-5}'),
    "scheduler": _object('{"type": "WarmupLR", "params": {}}'),
    "scheduler.type": _TEXT,
    "scheduler.params": _object('{"warmup_num_steps": 10}'),
    "aio": _object('{"block_size": 1048576}'),
    "aio.use_gds": _FLAG,
    "weight_quantization": _object("{}", or_null=False),
    "data_types": _object('{"grad_accum_dtype": "fp32"}', or_null=False),
    "data_types.keep_in_fp32_modules": _PATTERNS,
    "expert_parallel": _object('{"enabled": true, "autoep_size": 2}'),
    "tensor_parallel": _object('{"autotp_size": 2}', or_null=False),
    "tensor_parallel.autotp_size": _whole(0, MAX_RANKS),
    **{f"zero_optimization.offload_param{key}": kind for key, kind in _OFFLOAD.items()},
    **{f"zero_optimization.offload_optimizer{key}": kind for key, kind in _OFFLOAD.items()},
    "zero_optimization.offload_param.buffer_size": _whole(0),
    "zero_optimization.zero_hpz_partition_size": _whole(0, MAX_RANKS),
    "zero_optimization.mics_shard_size": _whole(-1, MAX_RANKS),
    "zero_optimization.reduce_bucket_size": _whole(1),
    "zero_optimization.sub_group_size": _whole(0),
    "zero_optimization.stage3_prefetch_bucket_size": _whole(0),
    "zero_optimization.stage3_max_live_parameters": _whole(0),
    "zero_optimization.stage3_param_persistence_threshold": _whole(0),
    "zero_optimization.stage3_model_persistence_threshold": _whole(0),
    "zero_optimization.zero_quantized_weights": _FLAG,
    "zero_optimization.zero_quantized_nontrainable_weights": _FLAG,
}
"""What a load reads, by dotted key, sections before their keys. DeepSpeed judges all other keys.

Source: deepspeed 0.19.8 runtime/zero/config.py and offload_config.py; runtime/config.py:562 for keep_in_fp32_modules;
runtime/swap_tensor/aio_config.py. bf16 and fp16: `precision_of`; batch sizes: `resolve_auto`.
"""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names them all, for values that no load can use. "auto" passes until `resolve_auto`."""
    # DeepSpeed checks some of them only after it has allocated memory, and others never.
    problems = []
    for path, kind in KINDS.items():
        value: Any = config
        for key in path.split("."):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING and not (isinstance(value, str) and value == AUTO) and not kind.fits(value):
            problems.append(f"- {path}: expected {kind.expected}, got {reprlib.repr(value)}")
    if problems:
        raise ConfigError(f"ds_config: {len(problems)} key(s) have values that cannot be used\n" + "\n".join(problems))


# -- bf16, fp16 or fp32: docs/reference/configuration.md lists every case ----------------------------------------------

_BF16 = "bf16"
_FP16 = "fp16"
# Source: deepspeed 0.19.8 runtime/precision_config.py:31, read only where "bf16" is absent or null.
_BF16_OLD = "bfloat16"


class Precision(enum.Enum):
    """The type of the parameters, by the name of the torch dtype."""

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"


def precision_of(
    ds_config: Mapping[str, Any],
    *,
    absent: Literal["auto", "disabled"],
    trainer_bf16: bool | None = None,
    trainer_fp16: bool | None = None,
) -> Precision:
    """Return the precision that a ds_config and the training arguments (None: there are none) agree on.

    A training argument replaces a ds_config value that is absent or "auto". A value that is still open is the opposite
    of the other one. If both are open, the answer is bf16. `absent` says how to read a section without "enabled" that
    no training argument replaces: as DeepSpeed does, or "auto", for a caller that then calls `with_precision`.
    """
    contradictions = []
    on: dict[str, bool | None] = {}
    origin = {}
    sections = ((_BF16, _bf16_section_name(ds_config), trainer_bf16), (_FP16, _FP16, trainer_fp16))
    for name, section, trainer in sections:
        if not (trainer is None or isinstance(trainer, bool)):
            raise ConfigError(f"TrainingArguments.{name}: expected True or False, got {trainer!r}")
        enabled = _enabled(ds_config, section)
        if enabled is None and absent == "disabled" and trainer is None:
            enabled = False
        if isinstance(enabled, bool):
            on[name], origin[name] = enabled, f"ds_config {name}.enabled"
            if trainer not in (None, enabled):
                contradictions.append(f"ds_config {name}.enabled={enabled} vs TrainingArguments.{name}={trainer}")
        else:
            on[name], origin[name] = trainer, f"TrainingArguments.{name}"
    if contradictions:
        raise ConfigError(
            f"{' and '.join(contradictions)}: ds_config and training arguments contradict each other; "
            'make them equal, or write "auto" in the ds_config to follow the training arguments'
        )
    bf16 = on[_BF16] if on[_BF16] is not None else not on[_FP16]
    fp16 = on[_FP16] if on[_FP16] is not None else not bf16
    if bf16 and fp16:
        raise ConfigError(
            f"bf16 and fp16 are both enabled ({origin[_BF16]}=True, {origin[_FP16]}=True): disable one of them"
        )
    return Precision.BF16 if bf16 else Precision.FP16 if fp16 else Precision.FP32


def with_precision(ds_config: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Return a deep copy of a ds_config in which bf16.enabled and fp16.enabled are explicit booleans.

    A section under the old name "bfloat16" becomes "bf16", because Hugging Face reads only that.
    """
    resolved = copy.deepcopy(dict(ds_config))
    bf16 = _section(resolved, _bf16_section_name(resolved))
    fp16 = _section(resolved, _FP16)
    resolved.pop(_BF16_OLD, None)
    resolved[_BF16] = {**bf16, "enabled": precision is Precision.BF16}
    resolved[_FP16] = {**fp16, "enabled": precision is Precision.FP16}
    return resolved


def _bf16_section_name(ds_config: Mapping[str, Any]) -> str:
    return _BF16_OLD if ds_config.get(_BF16) is None and _BF16_OLD in ds_config else _BF16


def _section(ds_config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = ds_config.get(name, {})
    # DeepSpeed reads a null "bf16" as absent, but fails on a null "fp16" or "bfloat16".
    if section is None and name == _BF16:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'ds_config {name}: expected an object such as {{"enabled": true}}, got {section!r}; '
            "write one, or remove the key"
        )
    return section


def _enabled(ds_config: Mapping[str, Any], name: str) -> bool | Literal["auto"] | None:
    section = _section(ds_config, name)
    if "enabled" not in section:
        return None
    enabled: bool | Literal["auto"] = section["enabled"]
    if not isinstance(enabled, bool) and enabled != AUTO:  # 1 == True, and Hugging Face and DeepSpeed differ on 1
        raise ConfigError(f'ds_config {name}.enabled: expected true, false or "auto", got {enabled!r}')
    return enabled
