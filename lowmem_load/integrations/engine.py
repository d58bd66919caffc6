"""DeepSpeed under `install`: `deepspeed.initialize`, and the engine's `load_checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.config.ds_config import given_ds_configs
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.engines.engine_states import is_plain_zero3
from lowmem_load.engines.hooks import asked_first, is_shell
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.errors import ConfigError, LoadOrderWarning, outside_level
from lowmem_load.load.load import REPORT_ATTRIBUTE
from lowmem_load.load.load_model import fallback_of
from lowmem_load.models.active import transformers_models
from lowmem_load.replaced import Handlers
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.training_checkpoints.zero_checkpoint import saved_by
from lowmem_load.weights_out.rank_shards import ranks_of, unwrapped


def _before_engine(arguments: Mapping[str, Any]) -> None:
    """Do what `deepspeed.initialize` needs done to its model, and warn of one that was loaded too early."""
    model = arguments.get("model")
    if not isinstance(model, nn.Module):
        return
    try:
        settings = read_settings(next(iter(given_ds_configs(arguments)), None), world_size=1)
    except ConfigError:  # there is none, or DeepSpeed is about to report it
        return
    _cast_adapters(model, settings)
    if settings.stage == 3 and not is_shell(model):
        _check_load_order(model)


def _cast_adapters(model: nn.Module, settings: Settings) -> None:
    """Cast what was added to a loaded model of 4-bit weights, as DeepSpeed's engine does if nothing is partitioned."""
    reports = [getattr(inner, REPORT_ATTRIBUTE, None) for inner in transformers_models(model)]
    is_packed = any(report is not None and report.num_quantized for report in reports)
    if not is_packed or settings.dtype is torch.float32:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_partitioned(parameter):
            parameter.data = parameter.data.to(settings.dtype)


def _check_load_order(model: nn.Module) -> None:
    """Warn for each transformers model that `deepspeed.initialize` partitions only now."""
    for inner in transformers_models(model):  # with any partition, it was loaded under ZeRO-3, and added to since
        parameters = list(inner.parameters())
        if parameters and not any(map(is_partitioned, parameters)) and not fallback_of(inner):
            mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
            warnings.warn(
                f"{type(inner).__name__}: every rank has all {mib:.1f} MiB of it, and ZeRO-3 partitions it only now, "
                "because no ZeRO-3 configuration was active when it was loaded. First make TrainingArguments("
                "deepspeed=...), Accelerator(deepspeed_plugin=...) or HfDeepSpeedConfig(...), keep it in a variable, "
                "then call from_pretrained",
                LoadOrderWarning,
                stacklevel=outside_level(),
            )


def _load_checkpoint(arguments: dict[str, Any]) -> tuple[str | None, dict[str, Any]] | None:
    """Load a checkpoint that another number of ranks saved, in place of `engine.load_checkpoint`; else return None."""
    engine = arguments.pop("self")
    if not is_plain_zero3(engine) or engine.load_universal_checkpoint() or arguments.get("custom_load_fn") is not None:
        return None
    ranks = ranks_of(unwrapped(engine))
    # Ranks may see only the files of their own node. All must take the same way.
    with ranks.step("finding the checkpoint") as step:
        step.payload = saved_by(arguments["load_dir"], arguments.get("tag"))
    saved_for = set(step.payloads)
    if len(saved_for) > 1 or saved_for <= {None, ranks.world_size}:
        return None
    return load_checkpoint(engine, **{name: value for name, value in arguments.items() if name != "custom_load_fn"})


HANDLERS: Handlers = {
    foreign_names.INITIALIZE: asked_first(foreign_names.INITIALIZE, _before_engine),
    foreign_names.LOAD_CHECKPOINT: asked_first(foreign_names.LOAD_CHECKPOINT, _load_checkpoint),
}
