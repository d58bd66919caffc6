"""iter_weights: the tensors that save_model writes, put together on the ranks, a bucket at a time: what is sent.

A save asks which bytes of files a rank's elements fill; here they fill tensors in memory. See docs/situations/
rlhf_weights.md.
"""

from __future__ import annotations

import math
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
from lowmem_load.frameworks import peft
from lowmem_load.frameworks.peft import Merge
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.saver import SavedFile, read_adapter_config
from lowmem_load.planning.expression import Expression, Source
from lowmem_load.planning.nest import Axis, Copy, Nest
from lowmem_load.planning.proof import prove_names
from lowmem_load.saving.local_shards import (
    LocalShard,
    digest_of_rules,
    layouts_by_rule,
    local_shards,
    rules_of,
    unwrapped,
)
from lowmem_load.saving.save import describe_files, ranks_of
from lowmem_load.saving.writer import proved_copies
from lowmem_load.text import fingerprint
from lowmem_load.weights_out.buckets import PlannedTensor, Sharing, Unit, plan_buckets
from lowmem_load.weights_out.send_weights import SendPlan, Tensors, Weights

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
    yield from plan_weights(engine_or_model, arguments).buckets()


def adapter_config(engine_or_model: nn.Module, adapters: str = "default") -> dict[str, Any]:
    """Return what PEFT's `save_pretrained` writes into `adapter_config.json` of an adapter. Local.

    Raises:
        ConfigError: no model of PEFT, or it has no adapter of this name.
    """
    model = unwrapped(engine_or_model)
    with load_lock():
        shards = local_shards(model, 0, masters=False)
        config: dict[str, Any] = _describe_sent(model, Arguments(adapters=adapters), shards)[2]
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


_KEPT = "_lowmem_load_weights"
"""Attribute of a model: its last plan."""


def plan_weights(engine: nn.Module, arguments: Arguments) -> Weights:
    """Return the weights of a model, planned but not sent. Collective.

    See [Note: rules] in `planning/regions.py`.
    """
    model = unwrapped(engine)
    with load_lock():
        ranks = ranks_of(model)
        with ranks.step("planning the weights") as step:
            arguments.check(ranks.world_size)
            masters = arguments.dtype == torch.float32 and not arguments.merge_adapters
            shards = local_shards(model, ranks.rank, masters=masters)
            plan = _plan(model, arguments, shards, ranks)
            step.digest = {
                "bucket_bytes, to, dtype": f"{arguments.bucket_bytes}, {arguments.to}, {arguments.dtype}",
                "tensors": plan.tensors,
                "the layout of the tensors": plan.rules,
            }
        return Weights(
            engine=engine,
            ranks=ranks,
            to=None if arguments.to == "all" else arguments.to,
            shards={shard.source.name: shard for shard in shards},
            plan=plan,
            bucket_bytes=arguments.bucket_bytes,
        )


def _plan(model: nn.Module, arguments: Arguments, shards: Sequence[LocalShard], ranks: RankGroup) -> SendPlan:
    """Return the plan that the model has, or make one and leave it there."""
    state, objects = _state_of(model, arguments, shards, ranks), _objects_of(model, shards)
    plan: SendPlan | None = vars(model).pop(_KEPT, None)
    if not isinstance(plan, SendPlan) or plan.state != state or not _are_same(plan.objects, objects):
        units, merges, config = _plan_tensors(model, arguments, shards)
        rules = rules_of(shards)
        plan = SendPlan(
            state=state,
            objects=[*map(weakref.ref, objects)],
            buckets=plan_buckets(units, arguments.bucket_bytes),
            merges=merges,
            config=config,
            tensors=fingerprint(map(_unit_text, units)),
            rules=digest_of_rules(rules),
            sharing=Sharing(layouts_by_rule(shards, rules, ranks.rank, ranks.world_size), ranks.world_size),
        )
    if not callable(arguments.names):  # it may choose others the next time
        vars(model)[_KEPT] = plan
    return plan


def _state_of(model: nn.Module, arguments: Arguments, shards: Sequence[LocalShard], ranks: RankGroup) -> list[Any]:
    state: list[Any] = [arguments, ranks.group, ranks.rank, ranks.world_size]
    state += [repr(getattr(model, name, None)) for name in ("config", "peft_config")]
    state += [(shard.source, shard.local_region, shard.is_master) for shard in shards]
    for module in model.modules():
        adapter = repr(getattr(module, "_active_adapter", None))  # PEFT may save or merge another part by it
        state.append((type(module), adapter, {*module._non_persistent_buffers_set}))  # noqa: SLF001
    return state


def _objects_of(model: nn.Module, shards: Sequence[LocalShard]) -> list[Any]:
    """Return what a plan knows by its identity. The plan has weak references: parameters may be replaced, and go."""
    return [*model.modules(), *(shard.tensor for shard in shards)]


def _are_same(before: Sequence[weakref.ref[Any]], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(one() is other for one, other in zip(before, now, strict=True))


def _plan_tensors(
    model: nn.Module, arguments: Arguments, shards: Sequence[LocalShard]
) -> tuple[list[Unit], list[Merge], Any]:
    files, merges, config = _describe_sent(model, arguments, shards)
    names = {(file.name, name): name for file in files for name in file.tensors}
    prove_names("iter_weights: the files of a save", names, names)  # a file for each adapter, and alike in names
    tensors = arguments.choose({name: part for file in files for name, part in file.tensors.items()})
    planned = [
        PlannedTensor(name, part.shape, part.dtype, tuple(proved_copies(name, part))) for name, part in tensors.items()
    ]
    sources = {id(shard.tensor): shard.source for shard in shards}
    return list(_plan_units(planned, merges, sources)), merges, config


def _describe_sent(
    model: nn.Module, arguments: Arguments, shards: Sequence[LocalShard]
) -> tuple[list[SavedFile], list[Merge], Any]:
    """Return the files that a save would write, the merges, and the configuration of an adapter that is sent alone."""
    kwargs: dict[str, Any] = {}
    if arguments.adapters is not None:
        peft.check_adapter(model, arguments.adapters)
        kwargs["selected_adapters"] = [arguments.adapters]
    sources = {id(shard.tensor): shard.source for shard in shards}
    options: dict[str, Any] = {
        "max_shard_size": _ONE_FILE,
        "merge_adapters": arguments.merge_adapters,
        "has_configs": False,
    }
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        scratch = Path(made)
        files, merges = describe_files(model, scratch, sources, dtype=arguments.dtype, kwargs=kwargs, **options)
        return files, merges, None if arguments.adapters is None else read_adapter_config(scratch)


def _plan_units(
    planned: Sequence[PlannedTensor], merges: Sequence[Merge], sources: Mapping[int, Source]
) -> Iterator[Unit]:
    """Yield what is sent together: a tensor, or the parameters of a merge, of which all its tensors are made."""
    merge_of = {sources[id(p)].name: number for number, merge in enumerate(merges) for p in merge.parameters}
    made: dict[int, list[PlannedTensor]] = {}
    for tensor in planned:
        numbers = {merge_of[source.name] for source in tensor.sources if source.name in merge_of}
        if not numbers:
            yield Unit((tensor,))
        elif len(numbers) == 1:
            made.setdefault(numbers.pop(), []).append(tensor)
        else:
            raise ConfigError(f"{tensor.name}: is made of parameters that are merged apart; save the model instead")
    for number, tensors in made.items():
        merge = merges[number]
        needed = {sources[id(p)]: None for p in (*merge.parameters, *merge.adapters())}
        needed |= {source: None for tensor in tensors for source in tensor.sources}
        yield Unit(tuple(map(_whole, needed)), tuple(tensors), number)


def _unit_text(unit: Unit) -> str:
    """Return all that decides what is sent where."""
    copies = [(tensor.name, [(getattr(c.leaf, "name", ""), c.nest) for c in tensor.copies]) for tensor in unit.sent]
    return f"{copies} {[(tensor.name, tensor.shape, tensor.dtype) for tensor in (*unit.sent, *unit.made)]}"


def _whole(source: Source) -> PlannedTensor:
    copy = Copy(source, Nest(0, 0, (Axis(math.prod(source.shape), 1, 1),)))
    return PlannedTensor(source.name, source.shape, source.dtype, (copy,))
