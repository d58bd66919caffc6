"""Loads into a model that its owner has sharded: FSDP2, tensor and expert parallelism, any mesh of DTensors."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.api.request import Request, spelled
from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.distributed.group import RankGroup
from lowmem_load.dtensor.sharded_target import Sharded, ShardedModel, plain_class
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.hf import intercept
from lowmem_load.hf.active import transformers_models
from lowmem_load.hf.intercept import load_lock
from lowmem_load.hf.skeleton import hand_over
from lowmem_load.pipeline.load import REPORT_ATTRIBUTE, Load
from lowmem_load.report import LoadReport

_PLACES_BY_ITSELF = ("device_map", "quantization_config", "gguf_file", "distributed_config", "tp_plan")


def load_into(
    model: nn.Module,
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    auto_class: str | type | None = None,
    leave: Collection[str] = (),
    progress: bool | None = None,
    verify: bool = False,
    **from_pretrained_kwargs: Any,
) -> LoadReport:
    """Fill a sharded model from a checkpoint: each rank reads what its shards hold, into their memory.

    The caller has built a transformers model on the meta device, has sharded it (`fully_shard`, `parallelize_module`,
    expert parallelism, any mesh of DTensors), and has given it memory by `to_empty`. The values are those of an
    ordinary `from_pretrained`, also of parameters that no file has, if the random state is the same on rank 0.
    Parameters and buffers keep their dtypes: what the files hold is cast as it is read.

    Args:
        model: or what wraps one: PEFT, torch.compile, activation checkpointing.
        name: a local folder or a Hub id.
        dtype: in which the ordinary load would be done. None: that of the model's parameters.
        auto_class: the class of the ordinary load. None: that of the model.
        leave: names of parameters and buffers of the transformers model that the caller fills: adapters, a new head.
        progress: as for `load_model`.
        verify: as for `load_model`.
        **from_pretrained_kwargs: as `from_pretrained` takes them.

    Returns:
        The report of the load; `load_report(model)` finds it, too.

    Collective: all ranks of the default process group. No weight crosses the network.
    Memory: a staging buffer for each reading thread beside the model.

    Raises:
        ConfigError: there is no process group, or an argument cannot be used.
        CheckpointError: the files cannot be used, or hold another model.
        UnsupportedError: a placement or wrapper that cannot be filled; a parameter without memory.
        RankError: another rank failed; the same error is raised on every rank.
    """
    ranks = RankGroup(None)
    with load_lock(), ranks.session("load_into"):
        with ranks.step("checking the arguments") as step:
            plain = _transformers_model(model)
            sharded = ShardedModel(plain, leave)
            request, settings = ordinary_load(plain, name, dtype, auto_class, from_pretrained_kwargs, ranks.world_size)
            is_folder = os.path.isdir(request.name)
            kind = "a local folder" if is_folder else "a name on the Hub"
            step.digest = {"arguments": settings.fingerprint, "as name": kind}
            if is_folder:
                checked = request.checked(settings)
        if not is_folder:
            checked = request.checked_once(settings, ranks)
        load = Load(checked.settings, ranks, lambda _, described: Sharded(sharded, described), progress, verify)
        with intercept.intercepted(load):
            loaded = checked.from_pretrained()
        with ranks.step("filling buffers"), torch.no_grad():
            sharded.fill_buffers(loaded)
            hand_over(loaded, plain)
    report: LoadReport = getattr(loaded, REPORT_ATTRIBUTE)
    setattr(model, REPORT_ATTRIBUTE, report)
    return report


def _transformers_model(model: nn.Module) -> nn.Module:
    """Return the transformers model within a model; the model itself if there is none."""
    found = transformers_models(model)
    if len(found) > 1:
        raise UnsupportedError(
            f"{type(model).__name__}: holds {len(found)} transformers models; call load_into for each of them"
        )
    return found[0] if found else model


def ordinary_load(
    model: nn.Module,
    name: str | os.PathLike[str],
    dtype: str | torch.dtype | None,
    auto_class: str | type | None,
    kwargs: Mapping[str, Any],
    world_size: int,
) -> tuple[Request, Settings]:
    """Return the ordinary load that has the values of a sharded model, and its settings. See `load_into`.

    Raises:
        ConfigError: an argument says where parameters go, which the model says already.
    """
    for keyword in _PLACES_BY_ITSELF:
        if kwargs.get(keyword) is not None:
            raise ConfigError(f"load_into: remove {keyword}; the model says where its parameters go")
    if transformers_models(model):
        config = copy.deepcopy(model.config)
        vars(config).pop("distributed_config", None)
        auto_class, kwargs = auto_class or plain_class(model), {"config": config, **kwargs}
    floating = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    if dtype is None:
        dtype = next(iter(floating)) if len(floating) == 1 else torch.float32
    precision = str(dtype).removeprefix("torch.")
    sections = {"bf16": {"enabled": precision == "bfloat16"}, "fp16": {"enabled": precision == "float16"}}
    settings = read_settings({"zero_optimization": {"stage": 3}, **sections}, world_size=world_size)
    return Request(spelled(name), auto_class, "auto", kwargs), settings
