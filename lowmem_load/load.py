"""What callers use: load_model by name, streaming around their own code, load_report."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowmem_load.errors import ConfigError, LoadOrderWarning
from lowmem_load.hf import loader, names
from lowmem_load.hf.active import active_zero3_config, was_dropped
from lowmem_load.planning.copies import plan_digest
from lowmem_load.ranks.group import RankGroup
from lowmem_load.ranks.process_group import DistributedInterface
from lowmem_load.report import LoadReport
from lowmem_load.settings.ds_config import (
    comparable,
    for_loading,
    hidden_size_of,
    read_ds_config,
    resolve_auto,
    zero_stage,
)
from lowmem_load.settings.precision import Precision, precision_of
from lowmem_load.stages import REPORT_ATTRIBUTE, Stream
from lowmem_load.targets.choice import Partition, choices_of

DROPPED = (
    "a HfDeepSpeedConfig was made but nothing keeps it alive, so this model is loaded whole on every rank, not into "
    "ZeRO-3 partitions; transformers holds the object weakly: keep it in a variable for as long as models are loaded. "
    "If the load is meant to be an ordinary one, call transformers.integrations.unset_hf_deepspeed_config() before it"
)
"""Warning of a load that an `HfDeepSpeedConfig` was probably meant for."""


def load_model(
    name: str | os.PathLike[str],
    ds_config: Any,
    *,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    progress: bool | None = None,
    data_parallel_group: Any = None,
    partition: Partition | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a checkpoint straight into ZeRO-3 partitions; return an ordinary transformers model.

    Every rank must call it. Under ZeRO stage 3 every parameter of the result is partitioned; each rank has read only
    the bytes of its own partitions. Under stage 0, 1 or 2 the result is whole on every rank, read without mmap.

    Args:
        name: a local folder or a Hub id.
        ds_config: a dict, the path of a JSON file, or an `HfDeepSpeedConfig`; never changed. Its "auto" values are
            resolved as `config.resolve_auto` says; `load_report(model).ds_config` holds the result.
        auto_class: a transformers class, its name, or None for the class that the config's `architectures` names.
        dtype: "auto" for the dtype in which DeepSpeed will run this ds_config (bf16, fp16 or, with both off or
            absent, fp32). Under stage 3 any other value must agree with it, unless `partition` is given: then it
            is the dtype of the parameters that stay whole.
        progress: True shows a progress bar on rank 0, False none, None one on long loads when stderr is a terminal.
        partition: under stage 3, what to partition: module names or globs, module classes, predicates on
            (name, module), or a sequence of these; all else is loaded whole on every rank. None partitions all, an
            empty sequence nothing. Train such a model with `lowmem_load.initialize`.
        data_parallel_group: a group of torch.distributed among whose ranks parameters are cut up, such as one for
            data and sequence parallelism; then the ranks of that group call this, and no others. None: all ranks.
        **from_pretrained_kwargs: as `from_pretrained` takes them: revision, token, cache_dir, subfolder, ...

    Returns:
        The model, in eval mode, with a `LoadReport` as `model.lowmem_load_report`.

    Collective: all ranks. No weight crosses the network; two small status exchanges do.
    Memory: the partitions, plus the reader's staging (`reader.STAGING_NBYTES` per thread).

    Raises:
        ConfigError: ds_config, dtype or auto_class cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that cannot be streamed.
        RankError: another rank failed; the same error is raised on every rank.
    """
    name = os.fspath(name)
    ranks = DistributedInterface().subgroup(data_parallel_group)
    kwargs = dict(from_pretrained_kwargs)
    if "torch_dtype" in kwargs:  # the older name of the same keyword
        dtype = kwargs.pop("torch_dtype") if dtype == "auto" else dtype
    with ranks.agreed("checking the arguments"):
        config_dict = read_ds_config(ds_config)
        stage = zero_stage(config_dict)
        precision = precision_of(config_dict, absent="disabled")
        if partition is not None:
            if stage != 3:
                raise ConfigError(f"partition needs ZeRO stage 3, the ds_config has stage {stage}; drop partition")
            choices_of(partition)
        kwargs["dtype"] = _storage_dtype(dtype, precision, must_agree=stage == 3 and partition is None)
        names.check_name(name, kwargs.get("subfolder", ""))
        config = names.model_config(name, kwargs)
        cls = names.model_class(auto_class, config, bool(kwargs.get("trust_remote_code")))
        if stage == 3:
            if kwargs.get("device_map") is not None:
                raise ConfigError("device_map and ZeRO-3 both place parameters; remove device_map")
            names.refuse_quantized(config, kwargs)
            names.check_weights(name, kwargs.get("subfolder", ""), kwargs.get("use_safetensors"))
        resolve_auto(config_dict, world_size=ranks.world_size, hidden_size=hidden_size_of(config), precision=precision)
    with _streaming(ds_config, ranks, progress, partition, must_match=True):
        return cls.from_pretrained(name, **kwargs)


@contextlib.contextmanager
def streaming(
    ds_config: Any = None,
    *,
    progress: bool | None = None,
    partition: Partition | None = None,
    data_parallel_group: Any = None,
) -> Iterator[None]:
    """Inside, any `from_pretrained` of a transformers model loads as `load_model` does, whoever calls it.

    Models keep the dtype that the caller asked for under stages 0 to 2; under stage 3 the ds_config decides, as it
    does with stock ZeRO-3. On exit, also after an exception, everything is as it was before.

    Args:
        ds_config: as for `load_model`. None follows transformers: each load goes by the ZeRO-3 configuration that is
            active at that moment, which TrainingArguments, accelerate's plugin or an `HfDeepSpeedConfig` has set; while
            there is none, loads are the ordinary ones.
        progress: as for `load_model`.
        partition: as for `load_model`, applied to each model that is loaded inside; one in which it chooses no
            module stays whole.
        data_parallel_group: as for `load_model`.

    Raises:
        ConfigError: ds_config cannot be used.
    """
    if ds_config is None:
        if partition is not None or data_parallel_group is not None:
            raise ConfigError("streaming() without a ds_config takes neither partition nor data_parallel_group")
        with loader.intercepted(lambda call: _load_as_active(call, progress), _zero3_is_active):
            yield
        return
    ranks = DistributedInterface().subgroup(data_parallel_group)
    with _streaming(ds_config, ranks, progress, partition, must_match=False):
        yield


@contextlib.contextmanager
def _streaming(
    ds_config: Any, ranks: RankGroup, progress: bool | None, partition: Partition | None, *, must_match: bool
) -> Iterator[None]:
    with ranks.agreed("checking the ds_config") as digest:
        config_dict = read_ds_config(ds_config)
        zero_stage(config_dict)
        precision_of(config_dict, absent="disabled")
        digest.append(_digest(config_dict))
        if partition is not None:
            choices_of(partition)
    stream = Stream(config_dict, ranks, progress, partition, must_match)
    with loader.deepspeed_config(config_dict), loader.intercepted(stream.load):
        yield


def _zero3_is_active() -> bool:
    if active_zero3_config() is not None:
        return True
    if was_dropped():
        warnings.warn(DROPPED, LoadOrderWarning, stacklevel=4)  # the caller of from_pretrained
    return False


def _load_as_active(call: loader.Call, progress: bool | None) -> tuple[nn.Module, dict[str, Any]]:
    active = active_zero3_config()
    assert active is not None  # asked a moment ago, by _zero3_is_active
    distributed = DistributedInterface()
    with distributed.agreed("checking the active ds_config") as digest:
        config = for_loading(read_ds_config(active))
        digest.append(_digest(config))
        stream = Stream(config, distributed, progress)
    return stream.load(call)


def _digest(config: Any) -> str:
    return f"ds_config {plan_digest([str(comparable(config))])}"


def load_report(model: Any) -> LoadReport:
    """Return the `LoadReport` of a model that lowmem_load loaded, also when an engine or an adapter wraps it.

    Raises:
        ValueError: lowmem_load did not load this model.
    """
    report = getattr(model, REPORT_ATTRIBUTE, None)
    if not isinstance(report, LoadReport):
        raise ValueError(  # noqa: TRY004  the model has the right type, the wrong history
            f"{type(model).__name__} was not loaded by lowmem_load, so there is no report of its load"
        )
    return report


def _storage_dtype(dtype: str | torch.dtype | None, precision: Precision, *, must_agree: bool) -> torch.dtype:
    engine = _torch_dtype(precision.value)
    if dtype in (None, "auto"):
        return engine
    asked = dtype if isinstance(dtype, torch.dtype) else _torch_dtype(str(dtype))
    if must_agree and asked != engine:
        raise ConfigError(
            f"dtype {asked} contradicts the ds_config, under which DeepSpeed runs in {engine}; "
            "drop dtype, or change bf16.enabled and fp16.enabled"
        )
    return asked


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not a torch dtype; use 'auto' or one such as 'bfloat16'")
    return found
