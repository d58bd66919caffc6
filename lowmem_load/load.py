"""What callers use: load_model and plan by name, streaming around their own code, load_report."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from lowmem_load.errors import ConfigError, LoadOrderWarning, RankError, UnsupportedError
from lowmem_load.hf import intercept, loader, names
from lowmem_load.hf.active import active_zero3_config, deepspeed_config, was_dropped
from lowmem_load.integrity.model import ModelDigest
from lowmem_load.integrity.sums import Keys
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.ranks.board import board
from lowmem_load.ranks.group import RankGroup
from lowmem_load.ranks.process_group import DistributedInterface
from lowmem_load.read.gds import chosen_source
from lowmem_load.read.source import LocalFile, Opener
from lowmem_load.report import LoadReport, OnLoad
from lowmem_load.settings.settings import Partition, Settings, read_settings
from lowmem_load.stages.digest import digest_only
from lowmem_load.stages.load import LEFT_ATTRIBUTE, REPORT_ATTRIBUTE, Load, plan_only
from lowmem_load.targets.make import target_maker

T = TypeVar("T")

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
    verify: bool = False,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a checkpoint straight into ZeRO-3 partitions; return an ordinary transformers model.

    Every rank must call it. Under ZeRO stage 3 every parameter of the result is partitioned; each rank has read only
    the bytes of its own partitions. Under stage 0, 1 or 2 the result is whole on every rank, read without mmap.

    Args:
        name: a local folder or a Hub id.
        ds_config: a dict, the path of a JSON file, or an `HfDeepSpeedConfig`; never changed. Its "auto" values are
            resolved as `settings.auto.resolve_auto` says; `load_report(model).ds_config` holds the result.
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

    Collective: all ranks. No weight crosses the network; small exchanges through the process group's store do, and a
        life sign of each rank per second.
    Memory: the partitions, plus a staging buffer per reading thread (`LoadPlan.staging_bytes`) where bytes are cast or
        rearranged.

    Raises:
        ConfigError: ds_config, dtype or auto_class cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that cannot be streamed.
        RankError: another rank failed; the same error is raised on every rank.
    """
    with intercept.in_turn(open_ended=False):
        ranks = DistributedInterface().subgroup(data_parallel_group)
        with ranks.together("load_model"):
            with ranks.agreed("checking the ds_config") as digest:
                name = _spelled(name)
                settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition, must_match=True)
                digest.append(f"ds_config {settings.fingerprint}")
            return load_with_settings(
                *(name, settings, ranks),
                auto_class=auto_class,
                dtype=dtype,
                progress=progress,
                verify=verify,
                kwargs=from_pretrained_kwargs,
            )


def load_with_settings(
    name: str,
    settings: Settings,
    ranks: RankGroup,
    *,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    progress: bool | None = None,
    verify: bool = False,
    kwargs: Mapping[str, Any],
) -> Any:
    """Do what `load_model` does, with settings that are read already. Collective: the ranks of `ranks`."""
    with intercept.in_turn(open_ended=False), ranks.together("the load"):
        with ranks.agreed("checking the arguments") as digest:
            names.check_name(name, kwargs.get("subfolder", ""))
            is_folder = os.path.isdir(name)
            digest.append("a local folder" if is_folder else "a name on the Hub")
            if is_folder:
                settings, cls, arguments = _checked(name, settings, auto_class, dtype, kwargs)
        if not is_folder:
            settings, cls, arguments = _checked_once(name, settings, ranks, auto_class, dtype, kwargs)
        with intercept.intercepted(_load(settings, ranks, progress, verify), any_thread=False):
            return cls.from_pretrained(name, **arguments)


def plan(
    name: str | os.PathLike[str],
    ds_config: Any,
    *,
    rank: int,
    world_size: int,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    partition: Partition | None = None,
    **from_pretrained_kwargs: Any,
) -> LoadPlan:
    """Return the plan of what `load_model` does on one rank, without loading: the very plan that such a rank executes.

    Runs in a plain process, for any rank of any world: no process group, no launcher, no DeepSpeed engine, no
    accelerator. It plans for the accelerator that DeepSpeed would choose here; `DS_ACCELERATOR` ("cuda") names another
    machine's, whose reads are staged. Only headers are read; where transformers itself decides by value (whether two
    tensors of a checkpoint are one tied weight) these values are read, or computed, too, and
    `LoadPlan.read_to_describe` names them.

    Args:
        name: as for `load_model`.
        ds_config: as for `load_model`.
        rank: of the partition group, `0 <= rank < world_size`.
        world_size: ranks among which parameters are cut up.
        auto_class: as for `load_model`.
        dtype: as for `load_model`.
        partition: as for `load_model`.
        **from_pretrained_kwargs: as for `load_model`.

    Memory: the description of the model; no parameter is allocated, except where its value decides.

    Raises:
        ConfigError: an argument cannot be used.
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: a combination that cannot be streamed.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: asked for {rank}, expected 0 <= rank < world_size = {world_size}")
    return plan_ranks(
        *(name, ds_config),
        ranks=[rank],
        world_size=world_size,
        device=_accelerator(),
        auto_class=auto_class,
        dtype=dtype,
        partition=partition,
        **from_pretrained_kwargs,
    )[0]


def plan_ranks(
    name: str | os.PathLike[str],
    ds_config: Any,
    *,
    ranks: Sequence[int],
    world_size: int,
    device: torch.device,
    open_source: Opener = LocalFile,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    partition: Partition | None = None,
    **from_pretrained_kwargs: Any,
) -> list[LoadPlan]:
    """Return the plans of several ranks, in less time than `plan` takes for each.

    Args:
        name: as for `plan`, like all that is not named here.
        ds_config: as for `plan`.
        ranks: to plan for.
        world_size: as for `plan`.
        device: the accelerator of the job; its type is enough.
        open_source: opens files of the checkpoint.
        auto_class: as for `plan`.
        dtype: as for `plan`.
        partition: as for `plan`.
        **from_pretrained_kwargs: as for `plan`.
    """
    name = _spelled(name)
    settings = read_settings(ds_config, world_size=world_size, partition=partition, must_match=True)
    settings, cls, arguments = _checked(name, settings, auto_class, dtype, from_pretrained_kwargs)

    def planned(call: loader.Call) -> list[LoadPlan]:
        return plan_only(call, settings, lambda rank: target_maker(rank, device), ranks, open_source)

    return _instead_of_loading(cls, name, arguments, planned)


def digest_checkpoint(
    name: str | os.PathLike[str],
    *,
    auto_class: str | type | None = None,
    dtype: str | torch.dtype | None = "auto",
    key: str = "",
    **from_pretrained_kwargs: Any,
) -> ModelDigest:
    """Return the `model_digest` of what an ordinary `from_pretrained` gives, without holding all of it at a time.

    Local: a plain process, without ranks.
    Memory: the two largest parameters, whole.

    Args:
        name: as for `load_model`.
        auto_class: as for `load_model`.
        dtype: of floating-point parameters; "auto" for that of the checkpoint's config. Digests of loads in another
            dtype differ.
        key: as for `model_digest`.
        **from_pretrained_kwargs: as for `load_model`.

    Raises:
        CheckpointError: the folder or its files cannot be used.
        UnsupportedError: of packed, quantized weights.
    """
    name = _spelled(name)
    settings = read_settings({"zero_optimization": {"stage": 0}}, world_size=1)
    if dtype in (None, "auto"):
        config = names.model_config(name, from_pretrained_kwargs)
        dtype = getattr(config, names.DTYPE_KEYWORD, None) or torch.float32
    settings, cls, arguments = _checked(name, settings, auto_class, dtype, from_pretrained_kwargs)
    return _instead_of_loading(cls, name, arguments, lambda call: digest_only(call, settings, Keys(key)))


def _instead_of_loading(cls: Any, name: str, arguments: Mapping[str, Any], act: Callable[[loader.Call], T]) -> T:
    """Return what `act` makes of the call of `from_pretrained` that would load."""

    def handler(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        raise _Done(act(call))

    with intercept.in_turn(open_ended=False), intercept.intercepted(handler, any_thread=False):
        try:
            cls.from_pretrained(name, **arguments)
        except _Done as done:
            result: T = done.result
            return result
    raise UnsupportedError(f"{cls.__name__} does not load through transformers' from_pretrained")


class _Done(BaseException):
    """Carries a result out of a `from_pretrained`, past overrides that would go on to use the model."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _spelled(name: Any) -> str:
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ConfigError(f"name: expected a local folder or a Hub id, got {name!r}")
    return os.fsdecode(name)


def _accelerator() -> torch.device:
    """Return the device for which DeepSpeed would choose its accelerator, without importing it.

    Source: deepspeed 0.19.8 `accelerator/real_accelerator.py`, `get_accelerator`.

    Raises:
        ConfigError: DS_ACCELERATOR names no device that this torch knows.
    """
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen:
        try:
            return torch.device(chosen)
        except RuntimeError as error:
            raise ConfigError(
                f"DS_ACCELERATOR is {chosen!r}, of which this torch knows no device: import the package that adds it "
                "(torch_npu, say) before, or correct the variable"
            ) from error
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def _checked(
    name: str,
    settings: Settings,
    auto_class: str | type | None,
    dtype: str | torch.dtype | None,
    from_pretrained_kwargs: Mapping[str, Any],
) -> tuple[Settings, Any, dict[str, Any]]:
    """Return the settings for the named model, its class, and the keywords of its `from_pretrained`; all checked."""
    kwargs = dict(from_pretrained_kwargs)
    if "torch_dtype" in kwargs:  # the older name of the same keyword
        dtype = kwargs.pop("torch_dtype") if dtype == "auto" else dtype
    is_partitioned = settings.stage == 3
    storage = _storage_dtype(dtype, settings.dtype, must_agree=is_partitioned and settings.partition is None)
    kwargs[names.DTYPE_KEYWORD] = storage
    names.check_name(name, kwargs.get("subfolder", ""))
    config = names.model_config(name, kwargs)
    cls = names.model_class(auto_class, config, bool(kwargs.get("trust_remote_code")))
    if is_partitioned:
        if kwargs.get("device_map") is not None:
            raise ConfigError("device_map and ZeRO-3 both place parameters; remove device_map")
        names.refuse_quantized(config, kwargs)
        names.check_weights(name, kwargs.get("subfolder", ""), kwargs.get("use_safetensors"))
    return settings.for_model(config), cls, kwargs


def _checked_once(
    name: str,
    settings: Settings,
    ranks: RankGroup,
    auto_class: str | type | None,
    dtype: str | torch.dtype | None,
    kwargs: Mapping[str, Any],
) -> tuple[Settings, Any, dict[str, Any]]:
    """Do what `_checked` does with a name on the Hub, which one rank of each node asks for all of it.

    The load is of the commit that the name stands for now, and of no later one. Collective: an exchange, and an
    agreement.
    """

    def check(commit: str, **changed: Any) -> tuple[str, tuple[Settings, Any, dict[str, Any]]]:
        pinned = {**kwargs, **changed, "revision": commit} if commit else kwargs
        return commit, _checked(name, settings, auto_class, dtype, pinned)

    def pack(found: tuple[str, Any]) -> bytes:
        return found[0].encode()

    def look(content: bytes) -> tuple[str, tuple[Settings, Any, dict[str, Any]]]:
        return check(content.decode(), force_download=False)  # it was, a moment ago

    with board(ranks, None) as (shared, *_), ranks.agreed("asking the Hub", name=name) as digest, shared.stage():
        commit, checked = shared.once("commit", lambda: check(names.commit_of(name, kwargs)), pack, look)
        digest.append(f"commit {commit}")
    return checked


@contextlib.contextmanager
def streaming(
    ds_config: Any = None,
    *,
    progress: bool | None = None,
    partition: Partition | None = None,
    data_parallel_group: Any = None,
    verify: bool = False,
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
        verify: as for `load_model`.

    Raises:
        ConfigError: ds_config cannot be used.

    A load inside that cannot be streamed raises, as `load_model` does; `install` can leave it to stock ZeRO-3.
    """
    if ds_config is None:
        if partition is not None or data_parallel_group is not None:
            raise ConfigError("streaming() without a ds_config takes neither partition nor data_parallel_group")
        with following(progress=progress, verify=verify):
            yield
        return
    with intercept.in_turn(open_ended=True):
        ranks = DistributedInterface().subgroup(data_parallel_group)
        with ranks.agreed("checking the ds_config") as digest:
            settings = read_settings(ds_config, world_size=ranks.world_size, partition=partition)
            digest.append(f"ds_config {settings.fingerprint}")
        with (
            deepspeed_config(settings.ds_config),  # for code that asks for it: generate, resize_token_embeddings
            intercept.intercepted(_load(settings, ranks, progress, verify)),
        ):
            try:
                yield
            except BaseException as error:
                if not isinstance(error, RankError):
                    ranks.leave("streaming()", error)
                raise


def following(
    *, progress: bool | None, verify: bool, on_load: OnLoad | None = None, is_lenient: bool = False
) -> AbstractContextManager[None]:
    """Return `streaming()` without a ds_config.

    Args:
        progress: see `load_model`.
        verify: see `load_model`.
        on_load: called with the report of each streamed load, on every rank.
        is_lenient: whether what cannot be streamed is left to transformers.
    """

    def load(call: loader.Call) -> tuple[nn.Module, dict[str, Any]]:
        ds_config = active_zero3_config()
        assert ds_config is not None  # asked a moment ago, by _zero3_is_active
        ranks = DistributedInterface()
        with ranks.agreed("checking the active ds_config") as digest:
            settings = read_settings(ds_config, world_size=ranks.world_size, is_active=True)
            digest.append(f"ds_config {settings.fingerprint}")
        return _load(settings, ranks, progress, verify, on_load, is_lenient=is_lenient)(call)

    return intercept.intercepted(load, _zero3_is_active)


def _load(
    settings: Settings,
    ranks: RankGroup,
    progress: bool | None,
    verify: bool,
    on_load: OnLoad | None = None,
    *,
    is_lenient: bool = False,
) -> Load:
    device = DistributedInterface().device
    make_target = target_maker(ranks.rank, device, ranks.group)
    return Load(settings, ranks, make_target, progress, verify, on_load, is_lenient, chosen_source())


def _zero3_is_active() -> bool:
    if active_zero3_config() is not None:
        return True
    if was_dropped():
        warnings.warn(DROPPED, LoadOrderWarning, stacklevel=4)  # the caller of from_pretrained
    return False


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


def _storage_dtype(dtype: str | torch.dtype | None, engine: torch.dtype, *, must_agree: bool) -> torch.dtype:
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
