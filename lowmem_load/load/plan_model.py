"""Plans of loads, and described models, in a plain process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.process_group import fake_group
from lowmem_load.distributed.steps import Alone
from lowmem_load.engines.mesh import forget_meshes, host_mesh, mesh_device
from lowmem_load.engines.sharded_target import ShardedModel
from lowmem_load.engines.zero3_target import TargetMaker, target_maker, zero_init_disabled
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.mounts import read_cost
from lowmem_load.load.describe import describe
from lowmem_load.load.load_into import Into, Run, build_sharded
from lowmem_load.load.make_plan import make_plan
from lowmem_load.load.request import Request, agree_on_request, target_of
from lowmem_load.models.active import load_lock, on_host
from lowmem_load.models.loader import Call, is_left_alone
from lowmem_load.models.skeleton import is_distributed_config, is_kept_on_host
from lowmem_load.planning.load_plan import LoadPlan


def plan(
    name: str | os.PathLike[str],
    ds_config: Any = None,
    *,
    rank: int,
    world_size: int,
    distributed_config: Any = None,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    partition: Partition | None = None,
    **from_pretrained_kwargs: Any,
) -> LoadPlan:
    """Return the plan that `load_model` executes on one rank, without loading.

    Runs in a plain process, for any rank of any world: no process group, no launcher, no DeepSpeed engine, no
    accelerator. It plans for the accelerator that DeepSpeed would choose here; `DS_ACCELERATOR` ("cuda") names another
    machine's. It reads headers, and the few values by which transformers decides (whether two tensors are one tied
    weight); `LoadPlan.read_to_describe` names these. No weights of a model on the Hub are downloaded.

    `rank` is one of the `world_size` ranks among which parameters are partitioned. Other arguments are those of
    `load_model`, without a mesh, which needs the processes of its ranks.

    Memory: the description of the model; no parameter is allocated, except where its value decides.

    Raises:
        ConfigError: an argument cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that lowmem_load cannot load.

    Example:
        found = plan("Qwen/Qwen3-8B", ds_config, rank=1023, world_size=1024)
        print(found.partition_bytes, "bytes of partitions")
        print(found.costs.read_bytes, "bytes read by", found.costs.num_reads, "reads")
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: asked for {rank}, expected 0 <= rank < world_size = {world_size}")
    key, target = target_of(ds_config=ds_config, distributed_config=distributed_config)
    how: dict[str, Any] = {"auto_class": auto_class, "dtype": dtype, **from_pretrained_kwargs}
    if key == "ds_config":
        return plan_rank(name, target, rank=rank, world_size=world_size, partition=partition, **how)
    if not is_distributed_config(target):
        raise ConfigError(f"plan: {target!r} is not a DistributedConfig")
    if partition is not None:
        raise ConfigError("partition belongs to ZeRO, not to a DistributedConfig")
    return plan_rank(name, sharding=target, rank=rank, world_size=world_size, **how)


def plan_rank(
    name: str | os.PathLike[str],
    ds_config: Any = None,
    *,
    sharding: Any = None,
    rank: int,
    world_size: int,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    partition: Partition | None = None,
    device: torch.device | None = None,
    **from_pretrained_kwargs: Any,
) -> LoadPlan:
    """Return the plan of one rank under a ds_config; of a model with a `sharding`, as one of a fake process group.

    That is a `DistributedConfig`, or the shape of FSDP2's mesh: (shards,) or (replicas, shards). `device` is that of
    ZeRO's partitions. Default: the one that DeepSpeed would choose.
    """

    def make_request() -> Request:
        settings = None
        if sharding is None:
            settings = read_settings(ds_config, world_size=world_size, partition=partition, must_match=True)
        return Request(name, auto_class, dtype, from_pretrained_kwargs, settings)

    def end(into: Into) -> NoReturn:
        device = "cpu" if is_kept_on_host(into.model) else mesh_device(into.model).type
        sharded = ShardedModel(into.model, into.left, device, is_skeleton=True)
        raise _Done(_planned(*into.shards(Alone(), world_size), sharded.make_target, rank))

    checked = agree_on_request(Alone(), make_request, stream=True)
    if sharding is None:
        return _planned(checked.settings, checked.run, target_maker(rank, device or _accelerator()), rank)
    forget_meshes()
    with load_lock(), fake_group(rank, world_size):
        mesh = sharding if is_distributed_config(sharding) else host_mesh(sharding)
        plan: LoadPlan = _result(lambda: build_sharded(checked, mesh, end))
    return plan


def _planned(settings: Settings, run: Run, make_target: TargetMaker, rank: int) -> LoadPlan:
    """Return the plan of what a load describes on the host. torch's random state stays as it was."""

    def handler(call: Call) -> NoReturn:
        if is_left_alone(call, settings):
            raise UnsupportedError(
                f"{call.name}: transformers places this model by itself, so there is nothing to plan"
            )
        random_state = torch.random.fork_rng(devices=[])
        with random_state, zero_init_disabled(), on_host(), Executor() as executor:
            described = describe(call, settings, make_target, executor, holds_values=False)
            plan = make_plan(described, rank, read_cost([file.path for file in described.files])).plan
        raise _Done(plan)

    with load_lock():
        plan: LoadPlan = _result(lambda: run(handler))
    return plan


def _result(from_pretrained: Callable[[], object]) -> Any:
    """Return what a `_Done` carries out of a call of `from_pretrained`."""
    try:
        from_pretrained()
    except _Done as done:
        return done.result
    raise AssertionError("a load that nothing takes is an error by itself")


class _Done(BaseException):
    """Carries a result out of a `from_pretrained`, past overrides that would go on to use the model."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _accelerator() -> torch.device:
    """Return the device that DeepSpeed would choose, without importing DeepSpeed."""
    # Source: deepspeed 0.19.8 accelerator/real_accelerator.py, get_accelerator.
    if chosen := os.environ.get("DS_ACCELERATOR"):
        try:
            return torch.device(chosen)
        except RuntimeError as error:
            raise ConfigError(
                f"DS_ACCELERATOR {chosen!r}: this torch knows no such device; correct it, or import the package that "
                "adds it (torch_npu, say) first"
            ) from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
