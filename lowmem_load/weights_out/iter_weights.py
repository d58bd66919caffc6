"""iter_weights: the tensors that `save_model` writes, put together on the ranks, a bucket at a time: what is sent.

A save asks which bytes of files a rank's elements fill; here they fill tensors in memory. See docs/howto/rlhf.md.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import ConfigError
from lowmem_load.models.active import load_lock
from lowmem_load.models.peft import Merge
from lowmem_load.planning.expression import Expression
from lowmem_load.planning.proof import prove_names
from lowmem_load.renamed import renamed_keywords
from lowmem_load.weights_out.buckets import PlannedTensor, Unit, merge_unit
from lowmem_load.weights_out.rank_shards import RankShard, rank_shards, ranks_of, unwrapped
from lowmem_load.weights_out.send import Sending, SendPlan, Tensors
from lowmem_load.weights_out.weights import plan_tensor, weights_of_model

Names: TypeAlias = "Collection[str] | Callable[[str], bool]"


@renamed_keywords(engine_or_model="model", to="dst")
def iter_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 1 << 30,
    dst: int | Literal["all"] = "all",
    dtype: torch.dtype | None = None,
    names: Names | None = None,
    merge_adapters: bool = False,
) -> Generator[Tensors, None, None]:
    """Yield all weights in buckets, `[(name, tensor), ...]`, put together from the parts of the ranks.

    Names, shapes, dtypes and values are those of the files that `save_model` would write. Partitions are read where
    they lie, also on the host or nvme; DeepSpeed's parameters stay as they are. While the consumer has one bucket, the
    next one is on its way. The tensors have memory of their own, on the accelerator where its collectives run, and stay
    right as long as they are kept. The list is emptied when the next one is asked for.

    Args:
        model: an engine (so that its steps are noticed under each stage) or a model, as for `save_model`.
        bucket_bytes: a bucket ends before it would exceed them. A tensor at least as large has a bucket of its own.
        dst: "all", or the rank (in the group of the ranks that have the model) that gets the tensors; other ranks get
            empty lists.
        dtype: as for `save_model`. With torch.float32 the optimizer's fp32 values are yielded where a ZeRO-3 engine has
            some.
        names: names to yield, or a function that says for a name whether to yield it; equal on all ranks.
        merge_adapters: yield what `merge_and_unload` of a PEFT model would make, and not the adapters. The layers of a
            bucket are merged when they are put together; the engine does not change.

    Call on every rank that has the model. All ranks have to take all buckets, or stop after the same one. There are at
    most `2 * total bytes / bucket_bytes + 1`, each with one collective (on gloo, and for experts on hundreds of ranks,
    with one of each rank).
    Memory: on ranks that get tensors two times `bucket_bytes`, or two times the largest tensor if that is larger: the
    messages of a bucket, and its tensors. On accelerators messages that are padded may take as much again. A merge
    takes a few times its layer.

    Raises:
        ConfigError: an argument cannot be used, an optimizer stepped or a weight changed between two buckets, or
            `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be put together, and why.
        RankError: another rank failed, stopped early, or did not come for the next bucket.

    Example:
        for bucket in iter_weights(engine, dst=0):  # on every rank
            for name, tensor in bucket:  # on rank 0
                send_to_inference(name, tensor)
    """
    arguments = Arguments(bucket_bytes=bucket_bytes, dst=dst, dtype=dtype, names=names, merge_adapters=merge_adapters)
    yield from plan_weights(model, arguments).buckets()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Those of `iter_weights`."""

    bucket_bytes: int = 1 << 30
    dst: int | Literal["all"] = "all"
    dtype: torch.dtype | None = None
    names: Names | None = None
    merge_adapters: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.names, Iterable) and not callable(self.names):  # the caller may change the given ones later
            names = {self.names} if isinstance(self.names, str) else self.names
            object.__setattr__(self, "names", frozenset(names))

    def check(self, world_size: int) -> None:
        """Raise ConfigError if one cannot be used."""
        if self.bucket_bytes < 1:
            raise ConfigError(f"iter_weights: bucket_bytes: {self.bucket_bytes!r} is not a positive number of bytes")
        if self.dst != "all" and self.dst not in range(world_size):
            raise ConfigError(f"iter_weights: dst: {self.dst!r} is neither 'all' nor a rank below {world_size}")

    def choose(self, tensors: Mapping[str, Expression]) -> dict[str, Expression]:
        """Return the tensors to yield."""
        names = tensors.keys() if self.names is None else self.names
        if not callable(names) and (unknown := sorted(set(names) - tensors.keys())):
            raise ConfigError(f"iter_weights: names: {', '.join(unknown)}: not in the checkpoint of this model")
        is_chosen = names if callable(names) else names.__contains__
        return {name: part for name, part in tensors.items() if is_chosen(name)}


_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], SendPlan]] = weakref.WeakKeyDictionary()
"""What decided the last plan of a model, and the plan: to plan thousands of experts may take longer than to send them."""


def plan_weights(engine: nn.Module, arguments: Arguments) -> Sending:
    """Return the weights of a model, planned but not sent. Collective."""
    model = unwrapped(engine)
    with load_lock():
        ranks = ranks_of(model)
        with ranks.step("planning the weights") as step:
            arguments.check(ranks.world_size)
            masters = arguments.dtype == torch.float32 and not arguments.merge_adapters
            shards = rank_shards(model, ranks.rank, masters=masters)
            plan = _plan(model, arguments, shards, ranks)
            step.digest = {
                "bucket_bytes, dst, dtype": f"{arguments.bucket_bytes}, {arguments.dst}, {arguments.dtype}",
                "tensors": plan.tensors,
                "the layout of the tensors": plan.rules,
            }
        return Sending(engine, plan, shards, ranks, to=None if arguments.dst == "all" else arguments.dst)


def _plan(model: nn.Module, arguments: Arguments, shards: Sequence[RankShard], ranks: RankGroup) -> SendPlan:
    """Return the last plan of the model, or a new one if anything has changed that decides it on this rank."""
    state = [arguments, ranks.group, ranks.rank, ranks.world_size, *_state_of(model)]
    state += [(shard.source, shard.local_region, shard.is_master) for shard in shards]
    before, plan = _KEPT.pop(model, (None, None))
    if plan is None or before != state:
        units = _units_of(model, arguments, shards)
        plan = SendPlan(units, shards, ranks, arguments.bucket_bytes)
    if not callable(arguments.names):  # it may choose others the next time
        _KEPT[model] = state, plan
    return plan


def _state_of(model: nn.Module) -> Iterator[Any]:
    """Yield what decides which tensors `save_pretrained` writes: the modules, which names are tied, configurations.

    A new object may have the `id` of one that is gone. Then all that is compared is equal, and the plan is right.
    """
    yield from (repr(getattr(model, name, None)) for name in ("config", "peft_config"))
    for module in model.modules():
        adapter = repr(getattr(module, "_active_adapter", None))  # PEFT may save or merge another part by it
        yield id(module), type(module), adapter, {*module._non_persistent_buffers_set}  # noqa: SLF001
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        yield [(name, id(tensor)) for name, tensor in named(model, remove_duplicate=False)]


def _units_of(model: nn.Module, arguments: Arguments, shards: Sequence[RankShard]) -> list[Unit]:
    """Return what is sent together: a tensor, or the parameters of a merge, of which all its tensors are made."""
    sources = {id(shard.tensor): shard.source for shard in shards}
    options: dict[str, Any] = {"dtype": arguments.dtype, "merge_adapters": arguments.merge_adapters, "kwargs": {}}
    options |= {"max_shard_size": 1 << 60, "has_configs": False}  # one file
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        weights = weights_of_model(model, shards, Path(made), **options)
    files = weights.files
    names = {(file.name, name): name for file in files for name in file.tensors}
    prove_names("iter_weights: the files of a save", names, names)  # each adapter has a file, with the same names
    merge_of = {sources[id(parameter)].name: merge for merge in weights.merges for parameter in merge.parameters}
    merged: dict[Merge, list[PlannedTensor]] = {}
    units: list[Unit] = []
    for name, part in arguments.choose({name: part for file in files for name, part in file.tensors.items()}).items():
        tensor = plan_tensor(name, part)
        found = {merge_of[source.name] for source in tensor.sources if source.name in merge_of}
        if len(found) > 1:
            raise ConfigError(f"{name}: is made of parameters that are merged apart; save the model instead")
        if found:
            merged.setdefault(found.pop(), []).append(tensor)
        else:
            units.append(Unit((tensor,)))
    return [*units, *(merge_unit(merge, tensors, sources) for merge, tensors in merged.items())]
