"""iter_weights: the tensors that `save_model` writes, put together on the ranks, a bucket at a time: what is sent.

A save asks which bytes of files a rank's elements fill; here they fill tensors in memory. See docs/howto/rlhf.md.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import ConfigError
from lowmem_load.models import peft
from lowmem_load.models.active import load_lock
from lowmem_load.models.peft import Merge
from lowmem_load.models.saver import SavedFile, read_adapter_config
from lowmem_load.planning.expression import Expression, Source
from lowmem_load.planning.proof import prove_names
from lowmem_load.weights_out.buckets import PlannedTensor, Unit, merge_unit
from lowmem_load.weights_out.rank_shards import RankShard, rank_shards, ranks_of, unwrapped
from lowmem_load.weights_out.send import Sending, SendPlan, Tensors, plan_sending
from lowmem_load.weights_out.weights import describe_files, proved_copies

Names: TypeAlias = "Collection[str] | Callable[[str], bool]"

_ONE_FILE = 1 << 60
"""Bytes of a shard, so that there is one."""


def iter_weights(
    engine_or_model: nn.Module,
    *,
    bucket_bytes: int = 1 << 30,
    to: int | Literal["all"] = "all",
    dtype: torch.dtype | None = None,
    names: Names | None = None,
    merge_adapters: bool = False,
    adapters: str | None = None,
) -> Generator[Tensors, None, None]:
    """Yield all weights in buckets, `[(name, tensor), ...]`, put together from what the ranks hold.

    Names, shapes, dtypes and values are those of the files that `save_model` would write. Partitions are read where
    they lie, also on the host or nvme; DeepSpeed's parameters stay as they are. While the consumer has one bucket, the
    next one is on its way. The tensors have memory of their own, on the accelerator where its collectives run, and stay
    right as long as they are kept. The list is emptied when the next one is asked for.

    Args:
        engine_or_model: an engine (so that its steps are noticed under each stage) or a model, as for `save_model`.
        bucket_bytes: a bucket ends before it would exceed them. A tensor at least as large has a bucket of its own.
        to: "all", or the rank (in the group of the ranks that hold the model) that gets the tensors; the buckets of
            other ranks are empty lists.
        dtype: as for `save_model`. With torch.float32 the optimizer's fp32 values are yielded where a ZeRO-3 engine has
            some.
        names: names to yield, or a function that says of a name whether to yield it; equal on all ranks.
        merge_adapters: of a PEFT model, yield what `merge_and_unload` would make, and not the adapters. The layers of
            a bucket are merged when they are put together; the engine does not change.
        adapters: of a PEFT model, yield what its `save_pretrained` writes of the adapter of this name, such as
            "default". `adapter_config` returns its configuration.

    Collective: all ranks that hold the model. All ranks have to take all buckets, or stop after the same one. There are
        at most `2 * total bytes / bucket_bytes + 1`, each with one collective (on gloo, and for experts on hundreds of
        ranks, with one of each rank).
    Memory: on ranks that get tensors two times `bucket_bytes`, or two times the largest tensor if that is larger: the
        messages of a bucket, and its tensors. On accelerators messages that are padded may take as much again. A merge
        takes a few times its layer.

    Raises:
        ConfigError: an argument cannot be used, an optimizer stepped or a weight changed between two buckets, or
            `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be put together, and why.
        RankError: another rank failed, stopped early, or did not come for the next bucket.
    """
    arguments = Arguments(
        bucket_bytes=bucket_bytes, to=to, dtype=dtype, names=names, merge_adapters=merge_adapters, adapters=adapters
    )
    yield from plan_weights(engine_or_model, arguments)[0].buckets()


def adapter_config(engine_or_model: nn.Module, adapters: str = "default") -> dict[str, Any]:
    """Return what PEFT's `save_pretrained` writes into `adapter_config.json` of an adapter. Local.

    Raises:
        ConfigError: no model of PEFT, or it has no adapter of this name.
    """
    model = unwrapped(engine_or_model)
    with load_lock():
        sources = {id(shard.tensor): shard.source for shard in rank_shards(model, 0, masters=False)}
        config: dict[str, Any] = _describe_sent(model, Arguments(adapters=adapters), sources)[2]
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Those of `iter_weights`."""

    bucket_bytes: int = 1 << 30
    to: int | Literal["all"] = "all"
    dtype: torch.dtype | None = None
    names: Names | None = None
    merge_adapters: bool = False
    adapters: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.names, Iterable) and not callable(self.names):  # the caller may change his own in place
            names = {self.names} if isinstance(self.names, str) else self.names
            object.__setattr__(self, "names", frozenset(names))

    def check(self, world_size: int) -> None:
        """Raise ConfigError if one cannot be used."""
        if self.bucket_bytes < 1:
            raise ConfigError(f"iter_weights: bucket_bytes: {self.bucket_bytes!r} is no positive number of bytes")
        if self.to != "all" and self.to not in range(world_size):
            raise ConfigError(f"iter_weights: to: {self.to!r} is neither 'all' nor a rank below {world_size}")
        if self.adapters is not None and self.merge_adapters:
            raise ConfigError("iter_weights: adapters: are sent alone, or merged with merge_adapters, not both")

    def choose(self, tensors: Mapping[str, Expression]) -> dict[str, Expression]:
        """Return the tensors to yield."""
        names = self.names
        if names is None:
            return dict(tensors)
        if callable(names):
            return {name: part for name, part in tensors.items() if names(name)}
        if unknown := sorted(set(names) - tensors.keys()):
            raise ConfigError(f"iter_weights: names: {', '.join(unknown)}: not in the checkpoint of this model")
        return {name: part for name, part in tensors.items() if name in names}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan that stays on its model, and is used as long as nothing has changed that decides it on this rank.

    Attributes:
        state, objects: what decides it: values, and what it knows by identity. Parameters may be replaced, and go.
        config: of an adapter that is sent alone.
    """

    state: list[Any]
    objects: list[weakref.ref[Any]]
    plan: SendPlan
    config: Any

    def is_of(self, state: Sequence[Any], objects: Sequence[Any]) -> bool:
        """Return whether these are still the same."""
        alike = len(self.objects) == len(objects) and self.state == state
        return alike and all(one() is other for one, other in zip(self.objects, objects, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ()  # a copy of the model has other parameters


_KEPT = "_lowmem_load_weights"
"""Attribute of a model: its last plan."""


def plan_weights(engine: nn.Module, arguments: Arguments) -> tuple[Sending, Any]:
    """Return the weights of a model, planned but not sent, and the configuration of an adapter alone. Collective."""
    model = unwrapped(engine)
    with load_lock():
        ranks = ranks_of(model)
        with ranks.step("planning the weights") as step:
            arguments.check(ranks.world_size)
            masters = arguments.dtype == torch.float32 and not arguments.merge_adapters
            shards = rank_shards(model, ranks.rank, masters=masters)
            kept = _kept_plan(model, arguments, shards, ranks)
            step.digest = {
                "bucket_bytes, to, dtype": f"{arguments.bucket_bytes}, {arguments.to}, {arguments.dtype}",
                "tensors": kept.plan.tensors,
                "the layout of the tensors": kept.plan.rules,
            }
        to = None if arguments.to == "all" else arguments.to
        return Sending(engine, kept.plan, shards, ranks, to=to), kept.config


def _kept_plan(model: nn.Module, arguments: Arguments, shards: Sequence[RankShard], ranks: RankGroup) -> _Kept:
    """Return the plan that the model has, or make one and leave it there."""
    state: list[Any] = [arguments, ranks.group, ranks.rank, ranks.world_size]
    state += [repr(getattr(model, name, None)) for name in ("config", "peft_config")]
    state += [(shard.source, shard.local_region, shard.is_master) for shard in shards]
    for module in model.modules():
        adapter = repr(getattr(module, "_active_adapter", None))  # PEFT may save or merge another part by it
        state.append((type(module), adapter, {*module._non_persistent_buffers_set}))  # noqa: SLF001
    objects = [*model.modules(), *(shard.tensor for shard in shards)]
    kept = vars(model).pop(_KEPT, None)
    if not isinstance(kept, _Kept) or not kept.is_of(state, objects):
        units, config = _plan_units(model, arguments, shards)
        plan = plan_sending(units, shards, ranks, arguments.bucket_bytes)
        kept = _Kept(state, [*map(weakref.ref, objects)], plan, config)
    if not callable(arguments.names):  # it may choose others the next time
        vars(model)[_KEPT] = kept
    return kept


def _plan_units(model: nn.Module, arguments: Arguments, shards: Sequence[RankShard]) -> tuple[list[Unit], Any]:
    """Return what is sent together: a tensor, or the parameters of a merge, of which all its tensors are made.

    And the configuration of an adapter that is sent alone.
    """
    sources = {id(shard.tensor): shard.source for shard in shards}
    files, merges, config = _describe_sent(model, arguments, sources)
    names = {(file.name, name): name for file in files for name in file.tensors}
    prove_names("iter_weights: the files of a save", names, names)  # a file for each adapter, and alike in names
    tensors = arguments.choose({name: part for file in files for name, part in file.tensors.items()})
    merge_of = {sources[id(parameter)].name: merge for merge in merges for parameter in merge.parameters}
    made: dict[Merge, list[PlannedTensor]] = {}
    units: list[Unit] = []
    for name, part in tensors.items():
        tensor = PlannedTensor(name, part.shape, part.dtype, tuple(proved_copies(name, part)))
        found = {merge_of[source.name] for source in tensor.sources if source.name in merge_of}
        if len(found) > 1:
            raise ConfigError(f"{name}: is made of parameters that are merged apart; save the model instead")
        if found:
            made.setdefault(found.pop(), []).append(tensor)
        else:
            units.append(Unit((tensor,)))
    return [*units, *(merge_unit(merge, tensors, sources) for merge, tensors in made.items())], config


def _describe_sent(
    model: nn.Module, arguments: Arguments, sources: Mapping[int, Source]
) -> tuple[list[SavedFile], list[Merge], Any]:
    """Return the files that a save would write, the merges, and the configuration of an adapter that is sent alone."""
    kwargs: dict[str, Any] = {}
    if arguments.adapters is not None:
        peft.check_adapter(model, arguments.adapters)
        kwargs["selected_adapters"] = [arguments.adapters]
    options: dict[str, Any] = {"dtype": arguments.dtype, "merge_adapters": arguments.merge_adapters, "kwargs": kwargs}
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        scratch = Path(made)
        files, merges = describe_files(model, scratch, sources, max_shard_size=_ONE_FILE, has_configs=False, **options)
        return files, merges, None if arguments.adapters is None else read_adapter_config(scratch)
