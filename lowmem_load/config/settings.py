"""The settings of one load, from the caller's ds_config and arguments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from lowmem_load.config.ds_config import (
    AUTO,
    check_kinds,
    comparable,
    is_int,
    plain_copy,
    precision_of,
    read_ds_config,
    zero_stage,
)
from lowmem_load.errors import ConfigError
from lowmem_load.text import MAX_VALUE, fingerprint

Choice: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool]"
Partition: TypeAlias = "Choice | Sequence[Choice]"
"""A module name or glob, a module class, a predicate on (name, module), or several of these.

Names and predicates choose among the modules below the model; only its class chooses the model itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a load, made by `read_settings`.

    Attributes:
        ds_config: a plain copy. After `for_model` it has no "auto" that loading reads.
        stage: of ZeRO, 0 to 3.
        dtype: of parameters in DeepSpeed under this ds_config.
        world_size: ranks that load together. A parameter is partitioned among all of them.
        partition: what to partition; None for the full model.
        must_match: whether every entry of `partition` must choose a module.
    """

    ds_config: Mapping[str, Any]
    stage: int
    dtype: torch.dtype
    world_size: int
    partition: Partition | None = None
    must_match: bool = False

    def for_model(self, model_config: Any) -> Settings:
        """Return these settings with every "auto" resolved for a model as Trainer does with its default arguments.

        Known batch sizes decide the open ones; if nothing decides, they are 8 per rank and 1 step. A config without
        train_batch_size and train_micro_batch_size_per_gpu, which DeepSpeed refuses, gets a micro batch size of 1.
        Other absent keys stay absent. bf16.enabled and fp16.enabled become explicit. "auto" stays in "optimizer" and
        "scheduler", and in keys for which DeepSpeed defines it.
        """
        config = plain_copy(self.ds_config)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            config[name] = {**config.get(name, {}), "enabled": self.dtype is dtype}
        if config.get("gradient_clipping") == AUTO:
            config["gradient_clipping"] = _DEFAULT_GRADIENT_CLIPPING
        problems = _fill_batch_sizes(config, self.world_size)
        section, hidden_size = config.get("zero_optimization", {}), hidden_size_of(model_config)
        for key, value_for in _HIDDEN_SIZE_KEYS.items():
            if section.get(key) == AUTO and hidden_size is not None:
                section[key] = value_for(hidden_size)
        for _, _, path in _autos(config):
            problem = 'cannot be resolved from "auto" here; write a value, or remove the key'
            if path in _RESOLVED_PATHS:
                problem = 'is "auto", but the model config has no hidden_size; write a number of elements'
            problems.setdefault(path, problem)
        if problems:
            lines = [f"- {path}: {problem}" for path, problem in problems.items()]
            raise ConfigError(f"ds_config: {len(lines)} key(s) cannot be resolved\n" + "\n".join(lines))
        return replace(self, ds_config=config)

    @property
    def offload_device(self) -> str:
        """Where partitions stay between steps: "none" for the accelerator, "cpu" or "nvme"."""
        device = (self.ds_config["zero_optimization"].get("offload_param") or {}).get("device")
        return str(getattr(device, "value", device or "none"))

    @property
    def swap_bytes(self) -> int:
        """Bytes of each rank's host buffers for parameters offloaded to nvme; 0 without them."""
        if self.offload_device != "nvme":
            return 0
        section = self.ds_config["zero_optimization"]["offload_param"]
        # Source: deepspeed 0.19.8 `runtime/zero/offload_config.py`
        return int(section.get("buffer_count", 5)) * int(section.get("buffer_size", 1e8)) * self.dtype.itemsize

    @property
    def secondary_size(self) -> int:
        """Ranks among which hpZ's secondary copy is partitioned; 0 without hpZ. A single rank has a copy, too."""
        size: int = self.ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)
        return min(size, self.world_size) if size > 1 else 0

    @property
    def compared(self) -> dict[str, str]:
        """The values that must be equal on all ranks, by key; digests of long ones. Paths may differ."""
        values = {f"ds_config {key}": text for key, text in _leaves(comparable(self.ds_config))}
        values["precision"] = str(self.dtype).removeprefix("torch.")
        values["partition"] = "of the full model" if self.partition is None else "of chosen modules"
        return {key: text if len(text) <= MAX_VALUE else fingerprint([text]) for key, text in values.items()}


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the JSON of each value in a section, and of an empty section."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value)


def read_settings(
    ds_config: Any,
    *,
    world_size: int,
    partition: Partition | None = None,
    must_match: bool = False,
    is_active: bool = False,
    trainer_bf16: bool | None = None,
    trainer_fp16: bool | None = None,
) -> Settings:
    """Read a ds_config and check it; raise ConfigError if it or the partition cannot be used.

    With `is_active`, a training loop has yet to complete the ds_config. For the other arguments, see `Settings`,
    `read_ds_config` and `precision_of`.
    """
    config = read_ds_config(ds_config)
    check_kinds(config)
    if is_active:
        config = _for_loading(config)
    stage = zero_stage(config)
    dtype = precision_of(config, trainer_bf16=trainer_bf16, trainer_fp16=trainer_fp16)
    if partition is not None:
        if stage != 3:
            raise ConfigError(f"partition needs ZeRO stage 3, the ds_config has stage {stage}; drop partition")
        choices_of(partition)
    return Settings(config, stage, dtype, world_size, partition, must_match)


def choices_of(partition: Partition) -> list[Choice]:
    """Return a partition argument as a list; raise ConfigError for an entry that `Partition` does not allow."""
    entries = list(partition) if isinstance(partition, Sequence) and not isinstance(partition, str) else [partition]
    for entry in entries:
        module_class = isinstance(entry, type) and issubclass(entry, nn.Module)
        predicate = callable(entry) and not isinstance(entry, type)
        if not (isinstance(entry, str) or module_class or predicate):
            raise ConfigError(
                f"partition: cannot use {entry!r}; give module names or globs, module classes, "
                "or a function of (name, module) that returns a bool"
            )
    return entries


# -- "auto", resolved in a copy ------------------------------------------------------------------------------------
#
# DeepSpeed replaces an "auto" silently by its own default (deepspeed 0.19.8 runtime/config_utils.py:56), so one that
# cannot be resolved is refused here.

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_BATCH_KEYS = (_TRAIN, _MICRO, _STEPS)

# Defaults of TrainingArguments; transformers 5.23.0 training_args.py:777, 866. It accumulates 1 step.
_DEFAULT_MICRO_BATCH_SIZE = 8
_DEFAULT_GRADIENT_CLIPPING = 1.0

# Source: transformers 5.23.0 integrations/deepspeed.py:232-242, HfTrainerDeepSpeedConfig.trainer_config_finalize.
_HIDDEN_SIZE_KEYS: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden_size: hidden_size * hidden_size,
    "stage3_prefetch_bucket_size": lambda hidden_size: int(0.9 * hidden_size * hidden_size),
    "stage3_param_persistence_threshold": lambda hidden_size: 10 * hidden_size,
}

_RESOLVED_PATHS = frozenset({"gradient_clipping"} | {f"zero_optimization.{key}" for key in _HIDDEN_SIZE_KEYS})
"""Keys that `Settings.for_model` resolves, in addition to batch sizes and precision."""

_TRAINING_LOOP_SECTIONS = ("optimizer", "scheduler")
"""Trainer completes these once it knows the number of steps."""

_DEEPSPEED_AUTO_KEYS = ("data_types.keep_in_fp32_modules", "zero_optimization.zenflow.", "expert_parallel.")
"""Keys for which DeepSpeed itself defines "auto".

Source: deepspeed 0.19.8 runtime/constants.py:391, runtime/zenflow/zenflow_config.py:18-26,
module_inject/auto_ep_config.py:61-82.
"""


def _for_loading(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ds_config that a training loop has yet to complete, without what only the loop can say.

    Batch sizes become 1 per rank. "optimizer", "scheduler" and every "auto" that `Settings.for_model` cannot resolve
    are dropped, as DeepSpeed does; one inside a list stays, and `for_model` names it. So bf16.enabled and fp16.enabled
    read as false unless Trainer or accelerate has filled them in before the load, as in DeepSpeed's own ZeRO-3 loading.
    """
    without = (*_BATCH_KEYS, *_TRAINING_LOOP_SECTIONS)
    kept = {key: value for key, value in ds_config.items() if key not in without}
    for section, key, path in _autos(kept):
        if path not in _RESOLVED_PATHS and "[" not in path:
            del section[key]
    return {**kept, _MICRO: 1}


def hidden_size_of(model_config: Any) -> int | None:
    """Return the hidden size by which Trainer resolves bucket sizes; None if the model config has none."""
    text_config = None
    with contextlib.suppress(AttributeError, ValueError):  # transformers cannot choose between several text configs
        text_config = model_config.get_text_config()
    for config in (model_config, getattr(model_config, "text_config", None), text_config):
        for sizes in ([getattr(config, "hidden_size", None)], getattr(config, "hidden_sizes", None)):
            if isinstance(sizes, list | tuple) and sizes and all(map(is_int, sizes)):
                largest: int = max(sizes)
                return largest
    return None


def _fill_batch_sizes(config: dict[str, Any], world_size: int) -> dict[str, str]:
    """Resolve the batch sizes in place; return the problems by key. DeepSpeed checks their product."""
    if config.get(_TRAIN) is None and config.get(_MICRO) is None:
        config[_MICRO] = 1
    problems = {
        key: f'expected a positive integer or "auto", got {config[key]!r}'
        for key in _BATCH_KEYS
        if not (config.get(key) in (None, AUTO) or (is_int(config[key]) and config[key] > 0))
    }
    sequence_parallel_size = config.get("sequence_parallel_size", 1)
    if not is_int(sequence_parallel_size) or sequence_parallel_size < 1 or world_size % sequence_parallel_size:
        problems["sequence_parallel_size"] = (
            f"expected a divisor of the {world_size} rank(s), got {sequence_parallel_size!r}"
        )
    if problems:
        return problems
    ranks = world_size // sequence_parallel_size
    train, micro, steps = (None if config.get(key) == AUTO else config.get(key) for key in _BATCH_KEYS)
    # Source: deepspeed 0.19.8 runtime/config.py:607, which must give the same for keys that stay absent.
    if train is None:
        micro = micro or _DEFAULT_MICRO_BATCH_SIZE
        train = micro * (steps or 1) * ranks
    elif micro is None:
        micro = train // ((steps or 1) * ranks)
    elif steps is None:
        steps = train // (micro * ranks)
    for key, size in zip(_BATCH_KEYS, (train, micro, steps or 1), strict=True):
        if config.get(key) == AUTO:
            config[key] = size
    return {}


def _autos(section: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield section, key and dotted path of each "auto" that neither the training loop nor DeepSpeed resolves."""
    for key, value in list(section.items() if isinstance(section, dict) else enumerate(section)):
        inner = f"{path}[{key}]" if isinstance(section, list) else f"{path}.{key}" if path else str(key)
        if inner in _TRAINING_LOOP_SECTIONS or inner in _BATCH_KEYS:  # an open batch size has a message of its own
            continue
        if isinstance(value, dict | list):
            yield from _autos(value, inner)
        elif isinstance(value, str) and value == AUTO and not inner.startswith(_DEEPSPEED_AUTO_KEYS):
            yield section, key, inner
