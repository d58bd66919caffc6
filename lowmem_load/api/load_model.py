"""Loads of a model by name, and the report that it keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from lowmem_load.api.load_sharded import is_sharding, load_sharded
from lowmem_load.api.request import Request, spelled
from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError
from lowmem_load.hf import intercept, names
from lowmem_load.hf.intercept import load_lock
from lowmem_load.pipeline.load import LEFT_ATTRIBUTE, REPORT_ATTRIBUTE, Load
from lowmem_load.report import LoadReport, OnLoad
from lowmem_load.targets.make_target import target_maker


def load_model(
    name: str | os.PathLike[str],
    ds_config: Any,
    *,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    progress: bool | None = None,
    data_parallel_group: Any = None,
    partition: Partition | None = None,
    verify: bool = False,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a checkpoint straight into ZeRO-3 partitions; return an ordinary transformers model.

    Every rank must call it. Under ZeRO stage 3 every parameter of the result is partitioned; each rank has read only
    the bytes of its own partitions. Under stage 0, 1 or 2 the result is whole on every rank, read without mmap.

    Args:
        name: a local folder or a Hub id.
        ds_config: a dict, the path of a JSON file, or an `HfDeepSpeedConfig`; never changed. Its "auto" values are
            resolved as `config.auto.resolve_auto` says; `load_report(model).ds_config` holds the result. Or
            transformers' `DistributedConfig` (FSDP2, HSDP, tensor and expert parallelism), or a `DeviceMesh` for FSDP2
            by layers; then `policy=` has the other keywords of `fully_shard`.
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
        verify: True hashes every file before it is read, once on each machine, and compares it with the checksum that
            the Hub gave or that lies beside it (see `verify_checkpoint`). A file that differs, or of which nothing is
            known, is an error.
        **from_pretrained_kwargs: as `from_pretrained` takes them: revision, token, cache_dir, subfolder, ...

    Returns:
        The model, in eval mode, with a `LoadReport` as `model.lowmem_load_report`.

    Collective: all ranks. No weight crosses the network. Ranks exchange small messages through the process group's
        store, and each writes a heartbeat there once a second.
    Memory: the partitions, plus a staging buffer per reading thread (`LoadPlan.staging_bytes`) where bytes are cast or
        rearranged.

    Raises:
        ConfigError: ds_config, dtype or auto_class cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that cannot be streamed.
        RankError: another rank failed; the same error is raised on every rank.
    """
    if is_sharding(ds_config):
        if partition is not None or data_parallel_group is not None:
            raise ConfigError(
                "partition and data_parallel_group belong to ZeRO; a DistributedConfig or mesh has neither"
            )
        return load_sharded(
            *(name, ds_config),
            auto_class=auto_class,
            dtype=dtype,
            progress=progress,
            verify=verify,
            **from_pretrained_kwargs,
        )
    with load_lock():
        ranks = DistributedInterface().subgroup(data_parallel_group)

        def asked() -> tuple[Request, Settings]:
            request = Request(spelled(name), auto_class, dtype, from_pretrained_kwargs)
            settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition, must_match=True)
            return request, settings

        return load_as_asked(asked, ranks, progress=progress, verify=verify)


def load_as_asked(
    asked: Callable[[], tuple[Request, Settings]],
    ranks: RankGroup,
    *,
    progress: bool | None = None,
    verify: bool = False,
) -> Any:
    """Do what `load_model` does, with the request and the settings that `asked` returns, or else fails to.

    Collective: the ranks of `ranks`.
    """
    with load_lock(), ranks.session("the load"):
        with ranks.step("checking the arguments") as step:
            request, settings = asked()
            names.check_name(request.name, request.kwargs.get("subfolder", ""))
            is_folder = os.path.isdir(request.name)
            kind = "a local folder" if is_folder else "a name on the Hub"
            step.digest = {"ds_config": settings.fingerprint, "as name": kind}
            if is_folder:
                checked = request.checked(settings)
        if not is_folder:
            checked = request.checked_once(settings, ranks)
        with intercept.intercepted(load_on(ranks, checked.settings, progress, verify)):
            return checked.from_pretrained()


def load_on(
    ranks: RankGroup,
    settings: Settings,
    progress: bool | None,
    verify: bool,
    on_load: OnLoad | None = None,
    *,
    is_lenient: bool = False,
) -> Load:
    """Return what loads on these ranks as the settings say, onto the device of each. See `Load`."""
    device = DistributedInterface().device
    make_target = target_maker(ranks.rank, device, ranks.group)
    return Load(settings, ranks, make_target, progress, verify, on_load, is_lenient)


def load_report(model: Any) -> LoadReport:
    """Return the `LoadReport` of a model that lowmem_load loaded, also when an engine or an adapter wraps it.

    Raises:
        ValueError: lowmem_load did not load this model.
    """
    report, reason = getattr(model, REPORT_ATTRIBUTE, None), why_left_to_stock(model)
    if not isinstance(report, LoadReport):
        raise ValueError(  # noqa: TRY004  the model has the right type, the wrong history
            f"{type(model).__name__} was not loaded by lowmem_load, so there is no report of its load"
            + (f": it was left to stock ZeRO-3: {reason}" if reason else "")
        )
    return report


def why_left_to_stock(model: Any) -> str:
    """Return why `install` left the load of a model to stock ZeRO-3; "" if it did not."""
    return str(getattr(model, LEFT_ATTRIBUTE, ""))
