"""What the keys of a ds_config may hold that decide what a load does; all that is wrong is said at once, before it.

DeepSpeed looks at some of them only after memory was allocated, and at others never. Keys that a load does not read are
DeepSpeed's to judge.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_load.errors import ConfigError
from lowmem_load.settings.precision import AUTO

MAX_SIZE = (1 << 63) - 1
"""Of a number of elements, as torch counts them. Thresholds may well be 1e12, "never"."""

MAX_BUFFERS = 1 << 16
MAX_RANKS = 1 << 32

_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a key may hold: in words, with an example, and as a test. "auto" is looked at elsewhere."""

    expected: str
    fits: Callable[[Any], bool]


def _integer(least: int, most: int) -> _Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return _Kind(f"an integer from {least} to {most}", fits)


def _size(least: int) -> _Kind:
    def fits(value: Any) -> bool:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 1e9 is a float
        return is_whole and not isinstance(value, bool) and least <= value <= MAX_SIZE

    return _Kind(f"a whole number from {least} to {MAX_SIZE}", fits)


def _object(example: str, *, or_null: bool = True) -> _Kind:
    return _Kind(
        f"an object such as {example}", lambda value: isinstance(value, Mapping) or (or_null and value is None)
    )


_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_PATH = _Kind("the path of a folder", lambda value: value is None or isinstance(value, str | os.PathLike))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_DEVICE = _Kind('"none", "cpu" or "nvme"', lambda value: isinstance(value, str) and value in ("none", "cpu", "nvme"))
_PATTERNS = _Kind(
    'a list of names such as ["norm"]',
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
_OFFLOAD: Mapping[str, _Kind] = {
    "device": _DEVICE,
    "nvme_path": _PATH,
    "buffer_count": _integer(0, MAX_BUFFERS),
    "pin_memory": _FLAG,
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
    **{
        f"zero_optimization.{section}": _object('{"device": "cpu"}')
        for section in ("offload_param", "offload_optimizer")
    },
    **{f"zero_optimization.offload_param.{key}": kind for key, kind in _OFFLOAD.items()},
    **{f"zero_optimization.offload_optimizer.{key}": kind for key, kind in _OFFLOAD.items()},
    "zero_optimization.offload_param.buffer_size": _size(0),
    "zero_optimization.offload_param.max_in_cpu": _size(0),
    "zero_optimization.zero_hpz_partition_size": _integer(0, MAX_RANKS),
    "zero_optimization.mics_shard_size": _integer(-1, MAX_RANKS),
    "zero_optimization.reduce_bucket_size": _size(1),
    **{
        f"zero_optimization.{key}": _size(0)
        for key in (
            *("allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
            "stage3_model_persistence_threshold",
        )
    },
    **{
        f"zero_optimization.{key}": _FLAG
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    },
}
"""By dotted key; a section stands before what is in it.

Source: deepspeed 0.19.8 runtime/zero/config.py and offload_config.py; runtime/config.py:562 for keep_in_fp32_modules;
runtime/swap_tensor/aio_config.py. bf16 and fp16: `settings/precision.py`; batch sizes: `settings/auto.py`.
"""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Refuse values of a ds_config that no load can go by. "auto" passes: it is resolved, or refused, later.

    Raises:
        ConfigError: one error with all such keys, what they hold and what was expected.
    """
    problems = []
    for path, kind in KINDS.items():
        value = _at(config, path)
        if value is not _MISSING and not (isinstance(value, str) and value == AUTO) and not kind.fits(value):
            problems.append(f"- {path}: expected {kind.expected}, got {reprlib.repr(value)}")
    if problems:
        raise ConfigError(f"ds_config: {len(problems)} key(s) hold what they cannot\n" + "\n".join(problems))


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value
