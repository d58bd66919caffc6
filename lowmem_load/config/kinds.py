"""What the keys of a ds_config may hold that decide what a load does; all that is wrong is said at once, before it.

DeepSpeed looks at some of them only after memory was allocated, and at others never. Keys that a load does not read are
DeepSpeed's to judge.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lowmem_load.config.precision import AUTO
from lowmem_load.errors import ConfigError

MAX_SIZE = (1 << 63) - 1
"""Of a number of elements, as torch counts them. Thresholds may well be 1e12, "never"."""

MAX_BUFFERS = 1 << 16
MAX_RANKS = 1 << 32

_MISSING = object()


class _Kind(NamedTuple):
    """What a key may hold: in words, with an example, and as a test. "auto" is looked at elsewhere."""

    expected: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: int = MAX_SIZE) -> _Kind:
    """Return the kind of a number of elements, buffers or ranks; 1e9 is a float."""

    def fits(value: Any) -> bool:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer() and most == MAX_SIZE)
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
_ZERO: Mapping[str, _Kind] = {
    **{f"offload_param{key}": kind for key, kind in _OFFLOAD.items()},
    **{f"offload_optimizer{key}": kind for key, kind in _OFFLOAD.items()},
    "offload_param.buffer_size": _whole(0),
    "offload_param.max_in_cpu": _whole(0),
    "zero_hpz_partition_size": _whole(0, MAX_RANKS),
    "mics_shard_size": _whole(-1, MAX_RANKS),
    "reduce_bucket_size": _whole(1),
    "allgather_bucket_size": _whole(0),
    "sub_group_size": _whole(0),
    "stage3_prefetch_bucket_size": _whole(0),
    "stage3_max_live_parameters": _whole(0),
    "stage3_max_reuse_distance": _whole(0),
    "stage3_param_persistence_threshold": _whole(0),
    "stage3_model_persistence_threshold": _whole(0),
    "zero_quantized_weights": _FLAG,
    "zero_quantized_nontrainable_weights": _FLAG,
    "zero_quantized_gradients": _FLAG,
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
    **{f"zero_optimization.{key}": kind for key, kind in _ZERO.items()},
}
"""By dotted key; a section stands before what is in it.

Source: deepspeed 0.19.8 runtime/zero/config.py and offload_config.py; runtime/config.py:562 for keep_in_fp32_modules;
runtime/swap_tensor/aio_config.py. bf16 and fp16: `config/precision.py`; batch sizes: `config/auto.py`.
"""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Refuse values of a ds_config that no load can go by. "auto" passes: it is resolved, or refused, later.

    Raises:
        ConfigError: one error with all such keys, what they hold and what was expected.
    """
    problems = []
    for path, kind in KINDS.items():
        value: Any = config
        for key in path.split("."):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING and not (isinstance(value, str) and value == AUTO) and not kind.fits(value):
            problems.append(f"- {path}: expected {kind.expected}, got {reprlib.repr(value)}")
    if problems:
        raise ConfigError(f"ds_config: {len(problems)} key(s) hold what they cannot\n" + "\n".join(problems))
