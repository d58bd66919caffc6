"""The settings of one load, from the caller's ds_config and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from lowmem_load.config.auto import for_loading, hidden_size_of, resolve_auto
from lowmem_load.config.ds_config import Precision, check_kinds, comparable, precision_of, read_ds_config, zero_stage
from lowmem_load.errors import ConfigError
from lowmem_load.fingerprint import MAX_VALUE, fingerprint

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
        precision: of DeepSpeed under this ds_config.
        world_size: ranks that load together. A parameter is partitioned among `shard_size` of them.
        partition: what to partition; None for the whole model.
        must_match: whether every entry of `partition` must choose a module.
        is_resolved: whether `for_model` was called.
    """

    ds_config: Mapping[str, Any]
    stage: int
    precision: Precision
    world_size: int
    partition: Partition | None = None
    must_match: bool = False
    is_resolved: bool = False

    def for_model(self, model_config: Any) -> Settings:
        """Return these settings with every "auto" resolved for a model. See `resolve_auto`."""
        if self.is_resolved:
            return self
        hidden_size = hidden_size_of(model_config)
        resolved = resolve_auto(
            self.ds_config, world_size=self.world_size, hidden_size=hidden_size, precision=self.precision
        )
        return replace(self, ds_config=resolved, is_resolved=True)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters in DeepSpeed."""
        dtype: torch.dtype = getattr(torch, self.precision.value)
        return dtype

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
    def shard_size(self) -> int:
        """Ranks among which a parameter is partitioned: a shard group under MiCS, else all."""
        size: int = self.ds_config["zero_optimization"].get("mics_shard_size", -1)
        return size if size > 0 else self.world_size

    @property
    def secondary_size(self) -> int:
        """Ranks among which hpZ's secondary copy is partitioned; 0 without hpZ. A single rank has a copy, too."""
        size: int = self.ds_config["zero_optimization"].get("zero_hpz_partition_size", 1)
        return min(size, self.world_size) if size > 1 else 0

    @property
    def compared(self) -> dict[str, str]:
        """The values that must be equal on all ranks, by key; digests of long ones. Paths may differ."""
        values = {f"ds_config {key}": text for key, text in _leaves(comparable(self.ds_config))}
        values["precision"] = self.precision.value
        values["partition"] = "of the whole model" if self.partition is None else "of chosen modules"
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
    absent: Literal["auto", "disabled"] = "disabled",
    trainer_bf16: bool | None = None,
    trainer_fp16: bool | None = None,
) -> Settings:
    """Read a ds_config and check it; raise ConfigError if it or the partition cannot be used.

    With `is_active`, a training loop has yet to complete the ds_config: see `for_loading`. For the other arguments, see
    `Settings`, `read_ds_config` and `precision_of`.
    """
    config = read_ds_config(ds_config)
    check_kinds(config)
    if is_active:
        config = for_loading(config)
    stage = zero_stage(config)
    precision = precision_of(config, absent=absent, trainer_bf16=trainer_bf16, trainer_fp16=trainer_fp16)
    if partition is not None:
        if stage != 3:
            raise ConfigError(f"partition needs ZeRO stage 3, the ds_config has stage {stage}; drop partition")
        choices_of(partition)
    return Settings(config, stage, precision, world_size, partition, must_match)


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
