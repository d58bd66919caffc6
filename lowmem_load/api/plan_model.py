"""Plans of loads, and described models, in a plain process."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from lowmem_load.api.parts import is_of_parts, module_call
from lowmem_load.api.request import Checked, Request, name_text, ordinary_load, stage_3
from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.live_group import fake_group
from lowmem_load.ds.zero3_target import TargetMaker, target_maker, zero_init_disabled
from lowmem_load.dtensor.mesh import forget_meshes, host_mesh, mesh_device, shard_fully
from lowmem_load.dtensor.sharded_target import Sharded, ShardedModel
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.families import diffusion
from lowmem_load.families.call import Call
from lowmem_load.families.files import Rename
from lowmem_load.families.modules import Build, stand_in_for
from lowmem_load.hf import loader, model_folder, names
from lowmem_load.hf.active import on_host, ordinary_path
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.quantizers import is_four_bit_model
from lowmem_load.hf.remote_names import find_folder
from lowmem_load.hf.skeleton import blocks, file_keywords, filled_by, is_distributed_config, is_kept_on_host
from lowmem_load.io.executor import Executor
from lowmem_load.io.mounts import read_cost
from lowmem_load.phases import host_memory
from lowmem_load.pipeline.checks import check_described, is_left_alone, refuse_device_map
from lowmem_load.pipeline.describe import Described, describe
from lowmem_load.pipeline.make_plan import make_plan
from lowmem_load.planning.load_plan import HeldValue, LoadPlan
from lowmem_load.symbolic.constructor import Constructor
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.initialise import INITIALISED

T = TypeVar("T")


def plan(
    name: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    ds_config: Any,
    *,
    rank: int,
    world_size: int,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    partition: Partition | None = None,
    build: Build | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    initialize: bool = False,
    **from_pretrained_kwargs: Any,
) -> LoadPlan:
    """Return the plan that `load_model` executes on one rank, without loading.

    Runs in a plain process, for any rank of any world: no process group, no launcher, no DeepSpeed engine, no
    accelerator. It plans for the accelerator that DeepSpeed would choose here; `DS_ACCELERATOR` ("cuda") names another
    machine's. It reads headers, and the few values by which transformers decides (whether two tensors are one tied
    weight); `LoadPlan.read_to_describe` names these.

    `rank` is one of the `world_size` ranks among which parameters are partitioned. Other arguments are those of
    `load_model`, except a `DeviceMesh`, which needs the processes of its ranks. With `build`, a function that builds a
    module, it is the plan of `load_into`; see there for `rename`, `strict`, `initialize`, and for a mapping as `name`.
    Without a ds_config (None), `build` also shards it, over a mesh of CPUs, as `rank` of a group that does nothing.

    Memory: the description of the model; no parameter is allocated, except where its value decides.

    Raises:
        ConfigError: an argument cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that cannot be streamed.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: asked for {rank}, expected 0 <= rank < world_size = {world_size}")
    if build is not None:
        how = {"rename": rename, "strict": strict, "initialize": initialize, "kwargs": from_pretrained_kwargs}
        if ds_config is None:
            return _plan_shards(name, build, how, rank, world_size)
        settings = read_settings(ds_config, world_size=world_size, partition=partition, must_match=True)
        maker = functools.partial(target_maker, device=_accelerator())
        with load_lock():
            return plan_only(_partitions_call(name, build, how), settings, maker, [rank])[0]
    if isinstance(name, Mapping):
        raise ConfigError("name: several checkpoints are those of a module; pass build=, a function that builds it")
    if is_distributed_config(ds_config):
        if partition is not None:
            raise ConfigError("partition belongs to ZeRO, not to a DistributedConfig")
        options: Any = {"rank": rank, "world_size": world_size, "auto_class": auto_class, "dtype": dtype}
        return plan_sharded(name, ds_config, **options, **from_pretrained_kwargs)
    options = {"device": _accelerator(), "auto_class": auto_class, "dtype": dtype, "partition": partition}
    return plan_ranks(name, ds_config, ranks=[rank], world_size=world_size, **options, **from_pretrained_kwargs)[0]


def _partitions_call(name: Any, build: Build, how: Mapping[str, Any]) -> Call:
    """Return the load that `load_into` does by a ds_config with the module that `build` builds."""

    def make(context: Context) -> nn.Module:
        with context.constructor.building():
            return build()

    with Constructor().building():
        model = build()
    return module_call(model, name, None, make, **how)


def _plan_shards(name: Any, build: Build, how: Mapping[str, Any], rank: int, world_size: int) -> LoadPlan:
    """Return the plan of `load_into` with the module that `build` builds and shards."""
    forget_meshes()
    with load_lock(), fake_group(rank, world_size):
        model, left = build(), set[str]()

        def make(_: Context) -> nn.Module:
            return stand_in_for(model, names.plain_class)

        if not is_of_parts(model, name, how["rename"]):  # what the module computes is no part of a plan
            left = {buffer for buffer, _ in model.named_buffers()} - model.state_dict().keys()
        call = module_call(model, name, None, make, is_stand_in=True, leave=left, **how)
        return plan_only(call, stage_3(torch.float32, world_size), _shards_of(model, world_size, left), [rank])[0]


def _shards_of(
    model: nn.Module, world_size: int, left: Collection[str] = (), *, is_skeleton: bool = False
) -> Callable[[int], TargetMaker]:
    """Return what makes the target of the shards of a model without memory."""
    device = "cpu" if is_skeleton and is_kept_on_host(model) else mesh_device(model).type
    sharded = ShardedModel(model, left, device, is_skeleton=is_skeleton)
    return lambda _: lambda _, described: Sharded(sharded, described, world_size)


def plan_sharded(
    name: str | os.PathLike[str],
    sharding: Any,
    *,
    rank: int,
    world_size: int,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    **kwargs: Any,
) -> LoadPlan:
    """Return the plan of a model that is sharded, as one rank of a fake process group.

    `sharding` is a `DistributedConfig`, or the shape of FSDP2's mesh: (shards,) or (replicas, shards).
    """
    where, kwargs = find_folder(name_text(name), kwargs)
    of_diffusers = diffusion.model_class(where, auto_class, kwargs)
    forget_meshes()
    explained = model_folder.files_explained(where, kwargs.get("subfolder") or "")
    with load_lock(), fake_group(rank, world_size), ordinary_path(), explained:
        if of_diffusers is not None:
            kwargs |= {"torch_dtype": dtype} if isinstance(dtype, torch.dtype) else {}
            skeleton = diffusion.skeleton(of_diffusers, where, kwargs, torch.device("meta"))
            checked = Checked(where, stage_3(torch.float32, world_size), of_diffusers, kwargs)
        else:
            kwargs |= {"dtype": dtype, **({"distributed_config": sharding} if is_distributed_config(sharding) else {})}
            skeleton, checked = _skeleton(where, auto_class, kwargs, world_size)
        if not is_distributed_config(sharding):
            shard_fully(skeleton, host_mesh(sharding), blocks(skeleton), {})
        shards = _shards_of(skeleton, world_size, is_skeleton=of_diffusers is None)
        return _plans(checked, shards, [rank])[0]


def _skeleton(where: str, auto_class: Any, kwargs: Mapping[str, Any], world_size: int) -> tuple[nn.Module, Checked]:
    """Return a transformers model without values, and the load that has them."""
    cls, _ = names.class_and_config(where, auto_class, kwargs)
    with filled_by(_carry_out):
        skeleton, dtype, keywords = _result(cls, functools.partial(cls.from_pretrained, where, **kwargs))
    if is_four_bit_model(skeleton):
        from lowmem_load.frameworks import bitsandbytes

        bitsandbytes.pack_skeleton(skeleton)
    keywords |= file_keywords(kwargs)
    request, settings = ordinary_load(skeleton, where, dtype, auto_class, keywords, world_size)
    return skeleton, request.checked(settings)


def plan_ranks(
    name: str | os.PathLike[str],
    ds_config: Any,
    *,
    ranks: Sequence[int],
    world_size: int,
    device: torch.device,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    partition: Partition | None = None,
    **from_pretrained_kwargs: Any,
) -> list[LoadPlan]:
    """Return the plans of several ranks, in less time than `plan` takes for each."""
    request = Request(name_text(name), auto_class, dtype, from_pretrained_kwargs).with_folder()
    settings = read_settings(ds_config, world_size=world_size, partition=partition, must_match=True)
    return _plans(request.checked(settings), functools.partial(target_maker, device=device), ranks)


def describe_checkpoint(
    name: str,
    dtype: torch.dtype,
    *,
    auto_class: str | None = None,
    **from_pretrained_kwargs: Any,
) -> Described:
    """Return the model of a checkpoint as a load by one rank on the host describes it."""
    checked = Request(name, auto_class, "auto", from_pretrained_kwargs).checked(stage_3(dtype, world_size=1))
    make_target = target_maker(0, torch.device("cpu"))

    def described(call: Call) -> Described:
        with _describing(call, checked.settings) as executor:
            model = describe(call, checked.settings, make_target, executor, holds_values=False)
            check_described(model)
            return model

    return _instead_of_loading(checked, described)


def _plans(checked: Checked, target_maker_of: Callable[[int], TargetMaker], ranks: Sequence[int]) -> list[LoadPlan]:
    return _instead_of_loading(checked, lambda call: plan_only(call, checked.settings, target_maker_of, ranks))


def _instead_of_loading(checked: Checked, act: Callable[[Call], T]) -> T:
    """Return what `act` makes of the call of `from_pretrained` that would load."""

    def handler(call: Call) -> NoReturn:
        raise _Done(act(call))

    with load_lock(), loader.intercepted(handler), diffusion.intercepted(handler):
        result: T = _result(checked.cls, checked.from_pretrained)
    return result


def _result(cls: type, from_pretrained: Callable[[], object]) -> Any:
    """Return what a `_Done` carries out of a call of `from_pretrained`."""
    try:
        from_pretrained()
    except _Done as done:
        return done.result
    raise UnsupportedError(f"{cls.__name__} does not load through transformers' from_pretrained")


def plan_only(
    call: Call,
    settings: Settings,
    target_maker_of: Callable[[int], TargetMaker],
    ranks: Sequence[int],
) -> list[LoadPlan]:
    """Return the plan of a load for each of some ranks, without loading. Local."""
    before, plans = host_memory().anonymous_bytes, list[LoadPlan]()
    with _describing(call, settings) as executor:
        described: Described | None = None  # once, unless it keeps initial values, of which each rank has its own part
        for rank in ranks:
            make_target = target_maker_of(rank)
            if described is None:
                described = describe(call, settings, make_target, executor, holds_values=False)
            else:
                described = replace(described, target=make_target(described.settings, described.model))
            check_described(described)
            plan = make_plan(described, rank, read_cost([file.path for file in described.files])).plan
            if not plans:
                grown_bytes = max(0, host_memory().anonymous_bytes - before)
            plans.append(replace(plan, planning_bytes=grown_bytes))
            if any(isinstance(value, HeldValue) and value.origin == INITIALISED for value in plan.values):
                described = None
    return plans


@contextlib.contextmanager
def _describing(call: Call, settings: Settings) -> Iterator[Executor]:
    """Yield an executor with which models are described on the host. torch's random state stays as it was."""
    refuse_device_map(call, settings)
    if is_left_alone(call, settings):
        raise UnsupportedError(f"{call.name}: transformers places this model by itself, so there is nothing to plan")
    random_state = torch.random.fork_rng(devices=[])
    with random_state, zero_init_disabled(), on_host(), Executor() as executor:
        yield executor


def _carry_out(skeleton: nn.Module, dtype: torch.dtype, keywords: dict[str, Any]) -> NoReturn:
    raise _Done((skeleton, dtype, keywords))


class _Done(BaseException):
    """Carries a result out of a `from_pretrained`, past overrides that would go on to use the model."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def device_named(accelerator: str) -> torch.device:
    """Return a device that DS_ACCELERATOR or an option names."""
    try:
        return torch.device(accelerator)
    except RuntimeError as error:
        raise ConfigError(
            f"accelerator {accelerator!r} (DS_ACCELERATOR): this torch knows no such device; correct it, or import "
            "the package that adds it (torch_npu, say) first"
        ) from error


def _accelerator() -> torch.device:
    """Return the device that DeepSpeed would choose, without importing DeepSpeed."""
    # Source: deepspeed 0.19.8 accelerator/real_accelerator.py, get_accelerator.
    if chosen := os.environ.get("DS_ACCELERATOR"):
        return device_named(chosen)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
