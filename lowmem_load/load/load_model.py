"""load_model: a model by name, by a ds_config or a mesh; and plan, which says what that does on any rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from lowmem_load.config.settings import Partition, Settings, read_settings
from lowmem_load.distributed.process_group import DistributedInterface, fake_group
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.engines.mesh import forget_meshes, host_mesh, mesh_device
from lowmem_load.engines.sharded_target import Sharded, ShardedModel
from lowmem_load.engines.zero3_target import TargetMaker, target_maker, zero_init_disabled
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.mounts import read_cost
from lowmem_load.load.describe import describe
from lowmem_load.load.load import FALLBACK_ATTRIBUTE, REPORT_ATTRIBUTE, Options
from lowmem_load.load.load_into import Into, build_sharded, load_sharded
from lowmem_load.load.make_plan import make_plan
from lowmem_load.load.report import LoadReport
from lowmem_load.load.request import Request, agree_on_request, make_load, target_of, weights_folder
from lowmem_load.models.active import load_lock, on_host
from lowmem_load.models.loader import Call, is_left_alone
from lowmem_load.models.skeleton import is_distributed_config, is_kept_on_host
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.replicas import ShareReads
from lowmem_load.renamed import renamed_keywords


@renamed_keywords(stream="not download", weights="weights_from", policy="fully_shard_kwargs")
def load_model(
    name: str | os.PathLike[str],
    ds_config: Any = None,
    *,
    mesh: Any = None,
    distributed_config: Any = None,
    fully_shard_kwargs: Mapping[str, Any] | None = None,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    data_parallel_group: Any = None,
    partition: Partition | None = None,
    download: bool = True,
    share_reads: ShareReads = "auto",
    weights_from: str | os.PathLike[str] | None = None,
    local_copy: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a checkpoint straight into ZeRO-3 partitions or FSDP2 shards; return the model, in eval mode.

    Each rank reads only the bytes of its own partitions or shards. Under ZeRO stages 0 to 2 every rank needs the full
    model, which it reads or, with `share_reads`, gets from a rank that has read it. Call it on every rank, because all
    ranks load together. `model.lowmem_load_report` is the `LoadReport`.

    Args:
        name: a local folder, a Hub id, or a folder's URL (s3, gs, az, abfss, https, http): no weights touch a disk.
        ds_config: for ZeRO: a dict, the path of a JSON file, or an `HfDeepSpeedConfig`. "auto" values are resolved as
            Trainer does; the report's `ds_config` has the result.
        mesh: in place of a ds_config, the `DeviceMesh` for `fully_shard`, which is applied to the modules that
            `_no_split_modules` names and then to the model. A mesh of two dimensions means HSDP.
        distributed_config: in place of both, transformers' `DistributedConfig`.
        fully_shard_kwargs: other keywords of `fully_shard` for the mesh, such as `mp_policy`.
        auto_class: a transformers class, or its name. Default: the class that the config's `architectures` names.
        dtype: dtype of the parameters. "auto" with a ds_config: the dtype in which DeepSpeed trains (bf16, fp16, else
            fp32). "auto" without one, or None: the dtype of an ordinary `from_pretrained`. Under stage 3 it is always
            the ds_config's, and any other is an error. With `partition`, it is for the parameters that are replicated.
        partition: what to partition: module names or globs, classes, predicates on (name, module), or a sequence of
            these. The rest is replicated on every rank. Train such a model with `initialize_partial`. Default: all.
        data_parallel_group: a group of torch.distributed whose ranks share the partitions. Default: all ranks.
        download: False reads a model on the Hub as one at a URL, unless the Hub's cache has it. Default: True.
        share_reads: who reads bytes that several ranks need. "job": they are read once, and sent to the other ranks.
            "off": each rank reads them. "auto" is "job" for at least 64 MiB in host memory, from an object store or
            from a network file system that several nodes read, and otherwise "off". Default: "auto".
        weights_from: the folder or URL of a training checkpoint that has the weights, of any kind that `consolidate`
            accepts, also of DeepSpeed. `name` then only says which model it is. Each rank reads its own part, and any
            number of ranks may have saved it.
        local_copy: a folder on a disk of the node, into which ranks write what they read from a store. The next load
            on as many ranks reads it there, if the objects have the same size and ETag (or date). No other program can
            load these copies. A disk that is slower than the store slows the load down. Not with `weights_from`.
            Default: no copy.
        **from_pretrained_kwargs: as for `from_pretrained`: revision, token, cache_dir, subfolder, ...

    Memory: the partitions, and where bytes are cast or rearranged, `LoadPlan.costs.staging_bytes` for each reading
    thread.

    Raises:
        ConfigError: an argument or the ds_config cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: lowmem_load cannot load this combination.
        RankError: another rank failed; all ranks raise it.

    Example:
        ds_config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 8}
        model = load_model("Qwen/Qwen3-8B", ds_config).train()  # ZeRO-3
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        mesh = init_device_mesh("cuda", (8,))
        model = load_model("Qwen/Qwen3-8B", mesh=mesh).train()  # FSDP2
    """
    weights, copies = weights_folder(weights_from), None if local_copy is None else os.fsdecode(local_copy)
    options = Options(stream=not download, weights=weights, local_copy=copies, share_reads=share_reads)
    key, target = target_of(ds_config=ds_config, mesh=mesh, distributed_config=distributed_config)
    request = Request(name, auto_class, dtype, from_pretrained_kwargs)
    if key != "ds_config":
        if partition is not None or data_parallel_group is not None:
            raise ConfigError("partition and data_parallel_group belong to ZeRO, not to a DistributedConfig or mesh")
        return load_sharded(request, target, fully_shard_kwargs, options)
    if fully_shard_kwargs is not None:
        raise ConfigError("fully_shard_kwargs belongs to a mesh, not to a ds_config")
    with load_lock():
        ranks = DistributedInterface().subgroup(data_parallel_group)

        def make_request() -> Request:
            settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition, must_match=True)
            return request._replace(settings=settings, compared=settings.compared)

        return load_request(make_request, ranks, options)


def load_request(make_request: Callable[[], Request], ranks: RankGroup, options: Options) -> Any:
    """Do what `load_model` does with a ds_config and what `make_request` returns. Collective, under `load_lock`."""
    with ranks.session("the load"):
        checked = agree_on_request(ranks, make_request, stream=options.stream)
        return checked.run(make_load(ranks, checked.settings, options))


def get_load_report(model: Any) -> LoadReport:
    """Return the `LoadReport` of a model that lowmem_load loaded, also when an engine or an adapter wraps it.

    Raises:
        ValueError: lowmem_load did not load this model.

    Example:
        report = get_load_report(model)
        if report.rank == 0:
            print(report)
    """
    report, reason = getattr(model, REPORT_ATTRIBUTE, None), fallback_of(model)
    if not isinstance(report, LoadReport):
        raise ValueError(  # noqa: TRY004  the model has the right type, the wrong history
            f"{type(model).__name__} was not loaded by lowmem_load, so there is no report of its load"
            + (f": {reason}" if reason else "")
        )
    return report


def fallback_of(model: Any) -> str:
    """Return which loader has loaded a model in place of lowmem_load, and why; "" if none has."""
    return str(getattr(model, FALLBACK_ATTRIBUTE, ""))


# -- plans -------------------------------------------------------------------------------------------------------------


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

    Memory: the description of the model; no parameter is allocated, except where its value decides. Raises the errors
    of `load_model`.

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

    def end(into: Into) -> Any:
        device = "cpu" if is_kept_on_host(into.model) else mesh_device(into.model).type
        sharded = ShardedModel(into.model, into.left, device, is_skeleton=True)
        settings, run = into.shards(Alone(), world_size)
        return run(_planning(settings, functools.partial(Sharded, sharded), rank))

    checked = agree_on_request(Alone(), make_request, stream=True)
    try:
        with load_lock():
            if sharding is None:
                make_target = target_maker(rank, device or _accelerator())
                checked.run(_planning(checked.settings, make_target, rank))
            else:
                forget_meshes()
                with fake_group(rank, world_size):
                    build_sharded(checked, sharding if is_distributed_config(sharding) else host_mesh(sharding), end)
    except _Planned as planned:
        return planned.plan
    raise AssertionError("a load that nothing takes is an error by itself")


class _Planned(BaseException):
    """Carries a plan out of a `from_pretrained`, past overrides that would go on to use the model."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__()
        self.plan = plan


def _planning(settings: Settings, make_target: TargetMaker, rank: int) -> Callable[[Call], NoReturn]:
    """Return what plans a load that is described on the host. torch's random state stays as it was."""

    def plan_call(call: Call) -> NoReturn:
        if is_left_alone(call, settings):
            raise UnsupportedError(
                f"{call.name}: transformers places this model by itself, so there is nothing to plan"
            )
        random_state = torch.random.fork_rng(devices=[])
        with random_state, zero_init_disabled(), on_host(), Executor() as executor:
            described = describe(call, settings, make_target, executor, holds_values=False)
            planned = make_plan(described, rank, read_cost([file.path for file in described.files]))
        raise _Planned(planned.plan)

    return plan_call


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
