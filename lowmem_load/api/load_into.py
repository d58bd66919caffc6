"""Loads of models that are sharded by DTensors: by their owner, a `DistributedConfig`, or FSDP2 over a device mesh."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lowmem_load.api.parts import is_of_parts, module_call
from lowmem_load.api.request import (
    Checked,
    agree_on_request,
    make_load,
    name_text,
    ordinary_load,
    stage_3,
    storage_dtype,
    weights_folder,
)
from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.deprecation import without_progress
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.live_group import has_group
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.dtensor.mesh import is_mesh, mesh_device, offloads, reshard, shard_fully
from lowmem_load.dtensor.sharded_target import Sharded, ShardedModel
from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.families import diffusion
from lowmem_load.families.files import Rename
from lowmem_load.families.modules import Build, ModuleCall, snapshot, stand_in_for
from lowmem_load.families.parts import PartsCall
from lowmem_load.frameworks.wrappers import named_tensors, plain_modules, plain_name
from lowmem_load.hf import loader, model_folder, names, quantizers
from lowmem_load.hf.active import ordinary_path, transformers_models
from lowmem_load.hf.load_lock import load_lock, outermost
from lowmem_load.hf.remote_names import find_folder, rename_loaded
from lowmem_load.hf.skeleton import blocks, file_keywords, filled_by, hand_over, is_kept_on_host, refuse_parted
from lowmem_load.lazy_weights.fill import allocate_shards
from lowmem_load.pipeline.load import REPORT_ATTRIBUTE, Load, Options
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.report import LoadReport
from lowmem_load.symbolic.attributes import hand_over_attributes, hand_over_extra_states
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.initialise import CPU

SetStates = Callable[[nn.Module], None]
"""Gives a module its extra states, which are no tensors."""


class Way(NamedTuple):
    """How the values of a sharded model are loaded: what makes a loaded one, and sets its extra states if that is new.

    Without `set_extra_states` those of the loaded model are handed over.
    """

    settings: Settings
    run: Callable[[Load], nn.Module]
    set_extra_states: SetStates | None = None


@without_progress
def load_into(
    model: nn.Module,
    name: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    ds_config: Any = None,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    initialize: bool = False,
    leave: Collection[str] = (),
    build: Build | None = None,
    partition: Partition | None = None,
    dtype: str | torch.dtype | None = None,
    auto_class: str | type | None = None,
    stream: bool = False,
    share_reads: ShareReads = "auto",
    weights: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> LoadReport:
    """Fill a module from a checkpoint: each rank reads what its shards or partitions hold.

    Without a ds_config, the caller has built the module on the meta device, sharded it (to DTensors of any mesh), and
    given it memory by `to_empty`. With one, it is on the meta device, and its parameters become ZeRO-3 partitions.
    Collective: all ranks. Memory: beside the model, a staging buffer for each reading thread. Raises as `load_model`.

    **A transformers model**, or a module that holds one beside what `leave` names (PEFT, torch.compile, your own), gets
    the values of an ordinary `from_pretrained`; parameters that no file has get those of rank 0's random state.
    **Any other module**, or with `rename` (which may be {}) also such a one, gets the tensors that have the names of
    its parameters and buffers, cast to their dtypes. **Several checkpoints** are a mapping of prefixes of submodules to
    names: each is loaded as it would be alone; "" is the name for all else. See docs/howto/own_module.md.

    Args:
        model: the module. Ties, dtypes, `requires_grad` and attributes of parameters stay.
        name: see `load_model`; by names a folder, file or index, whose code is not run. Or a mapping, see above.
        ds_config: see `load_model`. With one, what is beside a transformers model may be initialised or computed.
        rename: turns names in files into those of the module: a function (None leaves a tensor out), or a mapping of
            regular expressions. None drops "model.", "module." and "state_dict." where all names begin so.
        strict: whether tensors that a module lacks, and other shapes, are errors in a load by names.
        initialize: whether `reset_parameters` or `_init_weights` initialise what no file has, equally on all ranks.
        leave: parameters and buffers that the caller fills, by their names in `model`, or in its transformers model.
        build: builds the same module, for buffers of which neither a file nor the module has the values.
        partition: see `load_model`.
        dtype: of a transformers model's ordinary load; None: its own.
        auto_class: of that load; None: the model's class.
        stream: read a model on the Hub as one at a URL. See `load_model`, as for the next two.
        share_reads: which ranks share reads.
        weights: a training checkpoint that has the weights.
        **from_pretrained_kwargs: of the ordinary load; by names, `subfolder` and `variant` choose files of a folder.
    """
    folder = weights_folder(weights)
    options = Options(stream=stream, weights=folder, share_reads=share_reads)
    if rename is None and ds_config is None and not isinstance(name, Mapping) and transformers_models(model):
        _refuse_of_modules(strict=not strict, initialize=initialize, build=build)
        return _transformers_into(model, name, options, dtype, auto_class, leave=leave, keywords=from_pretrained_kwargs)
    if is_of_parts(model, name, rename):
        refused = {} if isinstance(name, Mapping) else from_pretrained_kwargs
        _refuse_of_parts(auto_class=auto_class, weights=folder, **refused)
        options = replace(options, stream=False)
    elif dtype is not None or auto_class is not None:
        raise ConfigError("load_into: dtype and auto_class are for transformers models; a module has its own dtypes")
    else:
        options = replace(options, stream=stream and not os.path.exists(name_text(name)))
    how: dict[str, Any] = {"rename": rename, "strict": strict, "initialize": initialize, "leave": leave, "build": build}
    how |= {"kwargs": from_pretrained_kwargs, "dtype": dtype, "stream": stream}

    def make_call(ranks: RankGroup, make: Callable[[Context], nn.Module], **more: Any) -> ModuleCall | PartsCall:
        return module_call(model, name, ranks, make, **how, **more)

    if ds_config is not None:
        return _into_partitions(model, make_call, options, ds_config, partition)

    def by_names(ranks: RankGroup) -> Way:
        call = make_call(ranks, lambda _: stand_in_for(model, names.plain_class), is_stand_in=True)
        settings = stage_3(torch.float32, ranks.world_size)
        return Way(settings, lambda load: loader.run_load(load, call)[0], call.set_extra_states)

    return _into_shards(model, lambda: ShardedModel(model, leave), by_names, options)


def _refuse_of_modules(**values: Any) -> None:
    if named := [name for name, value in values.items() if value]:
        raise ConfigError(
            f"load_into: {', '.join(named)}: for modules that are loaded by names; transformers models are loaded by "
            "transformers' rules. Pass rename={} to load this one by names, or name it by its prefix: {'llm': ...}"
        )


def _refuse_of_parts(**values: Any) -> None:
    if named := [name for name, value in values.items() if value is not None]:
        raise ConfigError(
            f"load_into: {', '.join(named)}: not for a module of several checkpoints, nor a transformers model with a "
            "ds_config; load_model takes them"
        )


def _into_shards(
    model: nn.Module, open_model: Callable[[], ShardedModel], way_of: Callable[[RankGroup], Way], options: Options
) -> LoadReport:
    """Fill the DTensors of a model, and what it holds in full: check, describe, fill, hand over. Collective."""
    ranks = RankGroup(None)
    # In inference mode the local tensor of a DTensor cannot be detached.
    with load_lock(), torch.inference_mode(mode=False), ranks.session("load_into"):
        with ranks.step("checking the model"):
            reshard(model)  # what a forward has left gathered is no memory of a shard
            sharded = open_model()
        way = way_of(ranks)

        def make_target(settings: Settings, described: nn.Module) -> Sharded:
            return Sharded(sharded, described, settings.world_size)

        loaded = way.run(Load(way.settings, ranks, make_target, options))
        with ranks.step("filling buffers"), torch.no_grad():
            report = _hand_over(sharded, loaded, way.set_extra_states)
    setattr(model, REPORT_ATTRIBUTE, report)
    return report


def _by_from_pretrained(checked: Checked) -> Way:
    def run(load: Load) -> nn.Module:
        with loader.intercepted(load), diffusion.intercepted(load):
            loaded: nn.Module = checked.from_pretrained()
        return loaded

    return Way(checked.settings, run)


def _hand_over(sharded: ShardedModel, loaded: nn.Module, set_extra_states: SetStates | None) -> LoadReport:
    """Give a sharded model all that a load leaves beside parameters; return the report. Local."""
    model = sharded.model
    report: LoadReport = getattr(loaded, REPORT_ATTRIBUTE)
    of_loaded, modules, device = plain_modules(loaded), plain_modules(model), _device_of(model)
    if set_extra_states is not None:
        set_extra_states(model)
    sharded.fill_buffers(loaded)
    for one, other in zip(transformers_models(loaded), transformers_models(model), strict=True):
        hand_over(one, other)
    if quantizers.is_four_bit_model(loaded):
        from lowmem_load.frameworks import bitsandbytes

        bitsandbytes.hand_over_states(loaded, modules)
    hand_over_attributes(of_loaded, modules, device)
    if set_extra_states is None:
        hand_over_extra_states(of_loaded, modules, device, report.loading_info["missing_keys"])
    return report


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), CPU)


def _into_partitions(
    model: nn.Module,
    make_call: Callable[..., ModuleCall | PartsCall],
    options: Options,
    ds_config: Any,
    partition: Partition | None,
) -> LoadReport:
    """Make the parameters of a module ZeRO-3 partitions, by names. After a failure the module is as before."""
    with load_lock(), (ranks := DistributedInterface()).session("load_into"):
        with ranks.step("checking the arguments") as step:
            settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition, must_match=True)
            step.digest = settings.compared
        before = list(snapshot(model))
        try:
            call = make_call(ranks, lambda _: model)
            loader.run_load(make_load(ranks, settings, options), call)
            with ranks.step("setting extra states"):
                call.set_extra_states(model)
        except BaseException:
            for tensors, key, tensor in before:
                tensors[key] = tensor
            raise
        for tensors, key, tensor in before:
            for attribute, value in vars(tensor).items():  # such as marks for an optimizer
                if not hasattr(tensors[key], attribute):
                    setattr(tensors[key], attribute, value)
    report: LoadReport = getattr(model, REPORT_ATTRIBUTE)
    return report


def _transformers_into(
    model: nn.Module,
    name: str | os.PathLike[str],
    options: Options,
    dtype: str | torch.dtype | None,
    auto_class: str | type | None = None,
    *,
    keywords: Mapping[str, Any],
    leave: Collection[str] = (),
    is_skeleton: bool = False,
) -> LoadReport:
    """Do what `load_into` does, with these keywords of `from_pretrained`. For `is_skeleton`, see `ShardedModel`."""

    def sharded() -> ShardedModel:
        plain = _transformers_model(model)
        return ShardedModel(plain, _left(model, plain, leave), is_skeleton=is_skeleton)

    def by_transformers(ranks: RankGroup) -> Way:
        plain = _transformers_model(model)
        request = functools.partial(ordinary_load, plain, name, dtype, auto_class, keywords, ranks.world_size)
        return _by_from_pretrained(agree_on_request(ranks, request, has_ds_config=False))

    return _into_shards(model, sharded, by_transformers, options)


def _transformers_model(model: nn.Module) -> nn.Module:
    models = transformers_models(model)
    if len(models) > 1:
        raise UnsupportedError(
            f"{type(model).__name__}: holds {len(models)} transformers models; call load_into for each of them"
        )
    return models[0] if models else model


def _left(model: nn.Module, plain: nn.Module, leave: Collection[str]) -> set[str]:
    """Return which tensors of the transformers model the caller fills. Raise unless he fills all that is beside it."""
    prefix = next(name for name, module in plain_modules(model).items() if module is plain)
    inside = {id(named.tensor) for named in named_tensors(plain)}
    named = {named.name: id(named.tensor) in inside for named in named_tensors(model)}
    left = {plain_name(model, name) for name in leave}
    if lost := sorted(name for name, is_inside in named.items() if not is_inside and name not in left):
        raise ConfigError(
            f"{type(model).__name__}: this load fills the {type(plain).__name__} at {prefix!r}, and not {listed(lost)} "
            "beside it; fill these yourself and name them in leave, or call load_into for that model alone"
        )
    # A name may be one of either model.
    inner = {name.removeprefix(f"{prefix}.") if prefix else name for name in left if named.get(name, False)}
    return inner | (left - named.keys())


def load_sharded(
    name: str | os.PathLike[str],
    sharding: Any,
    options: Options,
    *,
    auto_class: str | type | None,
    dtype: str | torch.dtype | None,
    policy: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Do what `load_model` does with a `DistributedConfig`, or a `DeviceMesh` and the policy of `fully_shard`."""
    has_mesh, policy_of_mesh = is_mesh(sharding), policy or {}
    # Shards need no DeepSpeed, whose comm would be compiled for CPU ranks.
    ranks = RankGroup(None) if has_group() else DistributedInterface()
    with load_lock(), ranks.session("the load"):
        with ranks.step("checking the arguments") as step:
            where, kwargs = find_folder(name_text(name), kwargs)
            if (of_diffusers := diffusion.model_class(where, auto_class, kwargs)) is not None and not has_mesh:
                raise ConfigError("a DistributedConfig shards transformers models; pass a DeviceMesh")
            step.digest = {"as sharding": str(sharding), "policy": str(sorted(map(str, policy_of_mesh)))}
        if of_diffusers is not None:
            return _diffusers_over_mesh(of_diffusers, where, sharding, options, dtype, policy_of_mesh, kwargs)
        with ranks.step("reading the configuration"):
            cls, _ = names.class_and_config(where, auto_class, kwargs)
            if policy is not None and not has_mesh:
                raise ConfigError("policy: goes with a DeviceMesh; a DistributedConfig has its own")

        def shard(model: nn.Module) -> None:
            if has_mesh:
                shard_fully(model, sharding, blocks(model), policy_of_mesh)

        if not has_mesh:
            kwargs["distributed_config"] = sharding
        with shards_filled(where, kwargs, options, shard, is_offloaded=offloads(policy_of_mesh)):
            return rename_loaded(cls.from_pretrained(where, dtype=dtype, **kwargs))


def _diffusers_over_mesh(
    cls: Any,
    name: str,
    mesh: Any,
    options: Options,
    dtype: str | torch.dtype | None,
    policy: Mapping[str, Any],
    kwargs: dict[str, Any],
) -> Any:
    """Return a model of diffusers that `fully_shard` has sharded, in fp32 unless there is a dtype."""
    older = kwargs.pop("torch_dtype", None)
    dtype = older if dtype in (None, "auto") else dtype
    ranks, constructor = RankGroup(None), Constructor()
    with ranks.step("building the model", name=name):
        if dtype not in (None, "auto"):
            kwargs["torch_dtype"] = storage_dtype(dtype, torch.float32)
        model = diffusion.skeleton(cls, name, kwargs, constructor.building())
        shard_fully(model, mesh, blocks(model), policy)
        device = torch.device("cpu") if offloads(policy) else mesh_device(model)
        allocate_shards(model, device)
        constructor.finish(model, device)
        checked = Checked(name, stage_3(torch.float32, ranks.world_size), cls, kwargs)
    _into_shards(model, lambda: ShardedModel(model), lambda _: _by_from_pretrained(checked), options)
    return model


@contextmanager
def shards_filled(
    name: str,
    kwargs: Mapping[str, Any],
    options: Options,
    shard: Callable[[nn.Module], None] = lambda _: None,
    *,
    is_offloaded: bool = False,
) -> Iterator[None]:
    """Inside, a `from_pretrained` of these keywords reads what each rank's shards hold."""
    plain_options = replace(options, is_lenient=False, on_load=None)

    def fill(model: nn.Module, dtype: torch.dtype, keywords: dict[str, Any]) -> Mapping[str, Any]:
        refuse_parted(model)
        if quantizers.is_four_bit_model(model):
            from lowmem_load.frameworks import bitsandbytes

            bitsandbytes.pack_skeleton(model)
        shard(model)
        device = torch.device("cpu") if is_offloaded or is_kept_on_host(model) else mesh_device(model)
        allocate_shards(model, device)
        Constructor().finish(model, device)  # `to_empty` moves no attributes
        with outermost():
            keywords |= file_keywords(kwargs)
            report = _transformers_into(model, name, plain_options, dtype, keywords=keywords, is_skeleton=True)
        if options.on_load is not None:
            options.on_load(report)
        return report.loading_info

    with ordinary_path(), filled_by(fill), model_folder.files_explained(str(name), kwargs.get("subfolder") or ""):
        yield
