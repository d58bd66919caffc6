"""Loads of models that are sharded by DTensors: by their owner, a `DistributedConfig`, or FSDP2 over a device mesh.

All of them, and their plans (`load_model.py`), take one road. There is a module without values; it is sharded; its load
(`Into`) is described by a `Load`, which fills the shards, or is planned.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.environment import has_group
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.engines.mesh import POLICY, is_mesh, mesh_device, offloads, reshard, shard_fully
from lowmem_load.engines.sharded_target import Sharded, ShardedModel
from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.files.stand_ins import origin
from lowmem_load.load.lazy import allocate_shards
from lowmem_load.load.load import REPORT_ATTRIBUTE, Load, LoadedModel, Options
from lowmem_load.load.report import LoadReport
from lowmem_load.load.request import (
    Checked,
    Request,
    agree_on_request,
    asked_dtype,
    make_load,
    name_text,
    not_taken,
    refuse_placing,
    stage_3,
    weights_folder,
)
from lowmem_load.models import diffusion, loader, model_folder, skeleton
from lowmem_load.models.active import IS_LOADING, load_lock, ordinary_path, transformers_models
from lowmem_load.models.loader import Call
from lowmem_load.models.model_folder import hub_keywords, rename_loaded
from lowmem_load.models.modules import Build, BuiltModelCall, ModuleCall, Rename, as_before_if_it_fails, stand_in_for
from lowmem_load.models.quantizers import packed_format
from lowmem_load.models.wrappers import extra_states, named_modules, named_tensors, plain_class, plain_name
from lowmem_load.phases import no_callback
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.renamed import renamed_keywords
from lowmem_load.replaced import holding
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.symbolic.initialise import CPU


@renamed_keywords(leave="skip", stream="not download", weights="weights_from")
def load_into(
    model: nn.Module,
    name: str | os.PathLike[str],
    ds_config: Any = None,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    skip: Collection[str] = (),
    build: Build | None = None,
    partition: Partition | None = None,
    dtype: str | torch.dtype | None = None,
    auto_class: str | type | None = None,
    download: bool = True,
    share_reads: ShareReads = "auto",
    weights_from: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> LoadReport:
    """Fill a module from a checkpoint: each rank reads the bytes of its own shards or partitions.

    Without a ds_config, the caller has built the module on the meta device, sharded it (to DTensors of any mesh), and
    given it memory by `to_empty`. With one, it is on the meta device, and its parameters become ZeRO-3 partitions.
    The mode of the module (train or eval) stays. Call it on every rank. Memory: in addition to the model, a staging
    buffer for each reading thread. Raises the errors of `load_model`.

    **A transformers model**, alone or in another module (PEFT, torch.compile, your own) whose other tensors `skip`
    names, gets the values of an ordinary `from_pretrained`; parameters that no file has are initialized from rank 0's
    random state. **Any other module** gets the tensors that have the names of its parameters and buffers, cast to
    their dtypes. With `rename`, which may be {}, a transformers model is filled like this, too. If submodules have
    checkpoints of their own, call it for each of them. See docs/howto/own_module.md.

    Args:
        model: the module. Ties, dtypes, `requires_grad` and attributes of parameters stay.
        name: see `load_model`; by names a folder, file or index, whose code is not run.
        ds_config: see `load_model`.
        rename: turns names in files into those of the module: a function from name to name (None or "" leaves a tensor
            out), or a mapping of regular expressions to their substitutes, which are applied in order. Default: the
            names stay, except that "model.", "module.", "state_dict." or "_orig_mod." is dropped if all begin with it.
        strict: whether tensors that the module lacks are errors in a load by names. Default: True.
        skip: names, in `model` or in its transformers model, of parameters and buffers that the caller fills.
        build: function that builds the same module, to compute buffers that no file contains.
        partition: see `load_model`.
        dtype: dtype of a transformers model's ordinary load. Default: the model's own.
        auto_class: class of that load. Default: the model's class.
        download: see `load_model`.
        share_reads: see `load_model`.
        weights_from: see `load_model`.
        **from_pretrained_kwargs: of the ordinary load; by names, `subfolder` and `variant` choose files of a folder.

    Example:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("Qwen/Qwen3-8B"))
        fully_shard(model, mesh=mesh)
        model.to_empty(device=mesh.device_type)
        print(load_into(model, "Qwen/Qwen3-8B"))
    """
    options = Options(stream=not download, weights=weights_folder(weights_from), share_reads=share_reads)
    how: dict[str, Any] = {"rename": rename, "strict": strict, "skip": skip, "build": build}
    how |= {"dtype": dtype, "auto_class": auto_class, "kwargs": from_pretrained_kwargs}

    into_module = functools.partial(IntoModule, model, name, **how)
    if ds_config is None:
        return _fill_shards(model, into_module, options)
    return _fill_partitions(model, into_module, options, ds_config, partition)


# -- what fills a module -----------------------------------------------------------------------------------------------


Run: TypeAlias = Callable[[Callable[[Call], LoadedModel]], Any]
"""Has a function do a load, as a call that is described; returns a model with the values."""


class IntoModule:
    """The load of a checkpoint into a module that is built: by transformers' rules, or by names. See `load_into`.

    `model` is the one transformers model in the module, unless it is filled by names.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str | os.PathLike[str],
        *,
        kwargs: Mapping[str, Any],
        skip: Collection[str] = (),
        dtype: str | torch.dtype | None = None,
        auto_class: str | type | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        build: Build | None = None,
    ) -> None:
        self._name, self._kwargs, self._dtype, self._auto_class = name_text(name), kwargs, dtype, auto_class
        self._of_names = {"rename": rename, "strict": strict, "build": build}
        if isinstance(skip, str):
            raise ConfigError(f"skip: {skip!r} is one name; pass a collection of names, such as [{skip!r}]")
        self.model, self.left = module, set(skip)
        models = transformers_models(module)
        self._is_by_names = rename is not None or not models
        if self._is_by_names:
            if dtype is not None or auto_class is not None:
                raise ConfigError(
                    "load_into: dtype and auto_class are for transformers models; a module has its own dtypes"
                )
            return
        if named := [keyword for keyword, value in {"build": build, "strict": not strict}.items() if value]:
            raise ConfigError(
                f"load_into: {', '.join(named)}: for modules that are loaded by names; transformers models are loaded "
                "by transformers' rules. Pass rename={} to load this one by names"
            )
        if len(models) > 1:
            raise UnsupportedError(
                f"{type(module).__name__}: has {len(models)} transformers models; call load_into for each of them"
            )
        self.model = models[0]
        self.left = _left(module, self.model, skip)

    def shards(self, ranks: RankGroup, world_size: int) -> tuple[Settings, Run]:
        """Return how the values of shards are loaded. Collective: the ranks agree."""
        if not self._is_by_names:
            checked = self._checked(ranks, world_size)
            return checked.settings, checked.run
        call = self._module_call(stand_in_for(self.model), is_stand_in=True)
        return stage_3(torch.float32, world_size), lambda load: loader.run_load(load, call)[0]

    def partitions(self, ranks: RankGroup) -> Run:
        """Return how the model itself is filled. Collective: the ranks agree."""
        if self._is_by_names:
            return lambda load: loader.run_load(load, self._module_call(self.model))
        checked = self._checked(ranks, ranks.world_size)
        return lambda load: checked.run(lambda call: load(BuiltModelCall(call, self.model, self.left)))

    def _checked(self, ranks: RankGroup, world_size: int) -> Checked:
        return agree_on_request(ranks, lambda: self._ordinary_load(world_size))

    def _ordinary_load(self, world_size: int) -> Request:
        """Return the ordinary load that has the values of the model."""
        kwargs = dict(self._kwargs)
        asked = asked_dtype(self._dtype, kwargs)
        refuse_placing(kwargs, "load_into: remove {}; the model says where its parameters go")
        config: Any = copy.deepcopy(self.model.config)
        vars(config).pop("distributed_config", None)
        quantization: Any = getattr(config, "quantization_config", None)
        if hasattr(quantization, "to_dict"):
            config.quantization_config = quantization.to_dict()  # as in config.json, for another load
        quantizer: Any = getattr(self.model, "hf_quantizer", None)
        if quantizer is not None and not quantizer.pre_quantized:  # the files are not quantized
            kwargs = {"quantization_config": quantizer.quantization_config, **kwargs}
            vars(config).pop("quantization_config", None)
        tensors = self.model.parameters()
        dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1]
        # The smallest in which no parameter loses bits. Those of one byte are packed.
        own = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        settings = stage_3(asked if isinstance(asked, torch.dtype) else own, world_size)
        cls, kwargs = self._auto_class or plain_class(self.model), {"config": config, **kwargs}
        return Request(self._name, cls, "auto", kwargs, settings, {"dtype": settings.compared["precision"]})

    def _module_call(self, model: nn.Module, *, is_stand_in: bool = False) -> ModuleCall:
        how: dict[str, Any] = {**self._of_names, "skip": self.left, "is_stand_in": is_stand_in}
        return ModuleCall(self._name, model, dict(self._kwargs), **how)


class IntoDiffusers(NamedTuple):
    """The load of a checkpoint into a model of diffusers. The caller fills none of its tensors."""

    model: nn.Module
    shards: Callable[[RankGroup, int], tuple[Settings, Run]]
    left: frozenset[str] = frozenset()


Into: TypeAlias = IntoModule | IntoDiffusers
"""The load of a checkpoint into a `model` that is sharded, of which the caller fills the tensors `left`."""

End: TypeAlias = Callable[[Into], Mapping[str, Any]]
"""The end of a load into a skeleton that is sharded; returns the loading info."""


def _left(model: nn.Module, plain: nn.Module, skip: Collection[str]) -> set[str]:
    """Return which parts of the transformers model the caller fills. Raise unless he fills all that is next to it."""
    prefix = next(name for name, module in named_modules(model) if module is plain)
    inner, outer = _parts(plain), _parts(model)
    known = {**inner, **outer}  # a name may be one of either model
    left = {plain_name(model, name) for name in skip}
    if unknown := sorted(left - known.keys()):
        raise ConfigError(f"skip: the module has no parameter or buffer {listed(unknown)}")
    inside = {id(part) for part in inner.values()}
    tensors = {name: part for name, part in outer.items() if isinstance(part, torch.Tensor)}
    if lost := sorted(name for name, tensor in tensors.items() if id(tensor) not in inside and name not in left):
        raise ConfigError(
            f"{type(model).__name__}: this load fills the {type(plain).__name__} at {prefix!r}, and not {listed(lost)} "
            "next to it; fill these yourself and name them in skip, or call load_into for that model alone"
        )
    parts_left = {id(known[name]) for name in left}
    return {name for name, part in inner.items() if id(part) in parts_left}


def _parts(model: nn.Module) -> dict[str, torch.Tensor | nn.Module]:
    """Return the parameters and buffers, and the modules that take an extra state, by the names of these in files."""
    return {**{named.name: named.tensor for named in named_tensors(model)}, **extra_states(model)}


# -- loads -------------------------------------------------------------------------------------------------------------


def _fill_shards(
    model: nn.Module, make_into: Callable[[], Into], options: Options, *, is_skeleton: bool = False
) -> LoadReport:
    """Fill the DTensors of a model, and what it has in full. Collective. For `is_skeleton`, see `ShardedModel`."""
    ranks = RankGroup(None)
    # In inference mode the local tensor of a DTensor cannot be detached.
    with load_lock(), torch.inference_mode(mode=False), ranks.session("load_into"):
        with ranks.step("checking the model"):
            reshard(model)  # what a forward has left gathered is not memory of a shard
            into = make_into()
            sharded = ShardedModel(into.model, into.left, is_skeleton=is_skeleton)
        settings, run = into.shards(ranks, ranks.world_size)
        loaded = run(Load(settings, ranks, functools.partial(Sharded, sharded), options))
        with ranks.step("filling buffers"), torch.no_grad():
            report: LoadReport = getattr(loaded, REPORT_ATTRIBUTE)
            sharded.fill_buffers(loaded)
            device = next((tensor.device for tensor in (*into.model.parameters(), *into.model.buffers())), CPU)
            skeleton.hand_over(loaded, into.model, device, {*report.loading_info["missing_keys"], *sharded.left})
    setattr(model, REPORT_ATTRIBUTE, report)
    return report


def _fill_partitions(
    outer: nn.Module, make_into: Callable[[], IntoModule], options: Options, ds_config: Any, partition: Partition | None
) -> LoadReport:
    """Make the parameters of a module ZeRO-3 partitions. After a failure the module is as before. Collective."""
    with load_lock(), (ranks := DistributedInterface()).session("load_into"):
        with ranks.step("checking the arguments") as step:
            settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition, must_match=True)
            step.digest = settings.compared
            into = make_into()
        model, before = into.model, named_tensors(into.model)
        with as_before_if_it_fails(model):
            into.partitions(ranks)(make_load(ranks, settings, options))
        for named in before:
            made = named.tensors[named.key]
            for attribute, value in vars(named.tensor).items():  # such as marks for an optimizer
                if not hasattr(made, attribute):
                    setattr(made, attribute, value)
    report: LoadReport = getattr(model, REPORT_ATTRIBUTE)
    setattr(outer, REPORT_ATTRIBUTE, report)
    return report


# -- models by name, over a mesh ---------------------------------------------------------------------------------------


def load_sharded(request: Request, sharding: Any, policy: Mapping[str, Any] | None, options: Options) -> Any:
    """Do what `load_model` does with a `DistributedConfig`, or with a `DeviceMesh` and keywords of `fully_shard`."""

    def make_request() -> Request:
        if not (is_mesh(sharding) or skeleton.is_distributed_config(sharding)):
            raise ConfigError(f"load_model: {sharding!r} is neither a DeviceMesh nor a DistributedConfig")
        if policy is not None and not is_mesh(sharding):
            raise ConfigError("fully_shard_kwargs: goes with a mesh; a DistributedConfig has its own settings")
        if misplaced := sorted(request.kwargs.keys() & POLICY):
            raise ConfigError(f"{', '.join(misplaced)}: is for fully_shard; pass it in fully_shard_kwargs, with a mesh")
        # Without the addresses of objects, texts are the same on ranks which pass the same.
        texts = {key: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for key, value in (policy or {}).items()}
        compared = {f"fully_shard_kwargs {key}": text for key, text in texts.items()}
        return request._replace(compared={"as sharding": str(sharding), **compared})

    # Shards need no DeepSpeed, whose comm would be compiled for CPU ranks.
    ranks = RankGroup(None) if has_group() else DistributedInterface()
    with load_lock(), ranks.session("the load"):
        checked = agree_on_request(ranks, make_request, stream=options.stream)
        end = filling(options, is_offloaded=offloads(policy or {}))
        return build_sharded(checked, sharding, end, policy, options.weights)


def build_sharded(
    checked: Checked, sharding: Any, end: End, policy: Mapping[str, Any] | None = None, weights: str | None = None
) -> Any:
    """Build a model without values, shard it by a `DistributedConfig` or a mesh, and have `end` go on; return it.

    `weights`: see `filled_by`.
    """
    is_config, kwargs = skeleton.is_distributed_config(sharding), dict(checked.kwargs)
    if checked.config is None and is_config:
        raise ConfigError("a DistributedConfig shards transformers models; pass mesh=")

    def shard(model: nn.Module) -> None:
        if not is_config:
            shard_fully(model, sharding, skeleton.blocks(model), policy or {})

    if checked.config is None:
        model: nn.Module = diffusion.skeleton(checked.cls, checked.name, checked.kwargs)
        shard(model)
        end(IntoDiffusers(model, lambda _, world_size: (stage_3(torch.float32, world_size), checked.run)))
        return model
    if is_config:
        kwargs["distributed_config"] = sharding
    with skeletons_sharded(checked.name, kwargs, end, shard, weights):
        return rename_loaded(checked.cls.from_pretrained(checked.name, **kwargs))


def filling(options: Options, *, is_offloaded: bool = False) -> End:
    """Return what makes the memory of a skeleton, and reads the shards of each rank."""

    def fill(into: Into) -> Mapping[str, Any]:
        model = into.model
        device = CPU if is_offloaded or skeleton.is_kept_on_host(model) else mesh_device(model)
        allocate_shards(model, device)
        Constructor().finish(model, device)  # `to_empty` moves no attributes
        plain_options = replace(options, is_lenient=False, on_load=None)
        report = _fill_shards(model, lambda: into, plain_options, is_skeleton=True)
        if options.on_load is not None:
            options.on_load(report)
        return report.loading_info

    return fill


@contextmanager
def skeletons_sharded(
    name: str,
    kwargs: Mapping[str, Any],
    end: End,
    shard: Callable[[nn.Module], object] = no_callback,
    weights: str | None = None,
) -> Iterator[None]:
    """Inside, a `from_pretrained` of these keywords builds a model without values, which `shard` shards.

    `weights`: see `filled_by`. Raises UnsupportedError for an adapter, and for a call that loads in another way.
    """
    filled: list[nn.Module] = []

    def fill(model: nn.Module, dtype: torch.dtype, keywords: dict[str, Any]) -> Mapping[str, Any]:
        skeleton.refuse_parted(model)
        packed_format(model).pack_skeleton(model)
        shard(model)
        filled.append(model)
        keywords |= hub_keywords(kwargs, skeleton.READ_KEYWORDS)
        with holding(IS_LOADING, False):  # a handler gets what `end` loads
            return end(IntoModule(model, name, dtype=dtype, kwargs=keywords))

    subfolder = kwargs.get("subfolder") or ""
    with ordinary_path(), skeleton.filled_by(fill, weights), model_folder.files_explained(name, subfolder):
        if model_folder.distributed_folder(name, subfolder) is not None:
            raise UnsupportedError(
                f"{origin(name)}: is a distributed checkpoint, which transformers reads in full on each rank; name a "
                "folder that has only its config.json, and pass this one as weights_from="
            )
        if model_folder.adapter_config_file(name, kwargs) is not None:
            raise UnsupportedError(
                f"{origin(name)}: is an adapter; load the base model that its adapter_config.json names, and add it to "
                "that"
            )
        yield
        if not filled:
            raise not_taken(origin(name))
