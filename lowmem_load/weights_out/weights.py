"""Weights: tensors as expressions of what the ranks own, and the owner of each part. They go into files or messages.

A live model and a training checkpoint give weights. `write` puts them into files, and `Sending` into messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.models import peft, saver
from lowmem_load.models.modules import renamed
from lowmem_load.models.peft import Merge
from lowmem_load.models.saver import SavedFile
from lowmem_load.models.wrappers import named_tensors, plain_name
from lowmem_load.planning.expression import Computed, Elementwise, Expression, Held, Leaf, Source, leaves, numel
from lowmem_load.planning.nest import plan_copies
from lowmem_load.planning.proof import prove_coverage, prove_names
from lowmem_load.planning.regions import FlatRange, Region, partition_range
from lowmem_load.weights_out.buckets import PlannedTensor, Unit, full_tensor, merge_unit
from lowmem_load.weights_out.rank_shards import MemoryPiece, RankShard
from lowmem_load.weights_out.send import Sending, SendPlan, Tensors, delivery


class OwnElements(Protocol):
    """The elements of one tensor that this rank writes. All ranks together have each element once."""

    @property
    def region(self) -> Region:
        """Which elements of the tensor these are."""

    def memory(self) -> contextlib.AbstractContextManager[Iterable[MemoryPiece]]:
        """Yield memory that has them. A piece may end when the next one is asked for."""


Deliver: TypeAlias = "Callable[[Sequence[Unit], Sequence[int]], contextlib.AbstractContextManager[Iterator[Tensors]]]"
"""Yields the tensors of each unit on its rank, and nothing on the others. Collective; all raise if one rank does."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What leaves a model or a training checkpoint. For `left_out`, `num_masters` and `source`, see `SaveReport`."""

    files: Sequence[SavedFile]  # their expressions have `Source`s with the names of `elements`
    elements: Mapping[str, OwnElements]  # what this rank writes of each tensor, by name
    merges: Sequence[Merge] = ()  # of adapters into parameters, before these leave
    merging: Sending | None = None  # puts merged parameters together; see `with_merging`
    deliver: Deliver | None = None  # puts pieces of files together; None if `merging` has to come before
    left_out: Sequence[str] = ()
    num_masters: int = 0
    source: str = ""


def weights_of_model(
    model: nn.Module,
    shards: Sequence[RankShard],
    scratch: Path,
    *,
    merge_adapters: bool = False,
    has_configs: bool = True,
    **options: Any,
) -> Weights:
    """Return the weights of a live model. For the options, see `models.saver.describe_save_pretrained`."""
    sources = {id(shard.tensor): shard.source for shard in shards}
    full, merges = peft.unloaded(model) if merge_adapters else (model, [])
    if hasattr(full, "save_pretrained"):
        files = saver.describe_save_pretrained(full, scratch, sources, has_configs=has_configs, **options)
    else:
        files = _describe_by_names(full, scratch, sources, **options)
    used = used_sources(files)
    return Weights(
        files,
        {shard.source.name: shard for shard in shards},
        merges,
        left_out=_left_out(model, shards, used, merges),
        num_masters=sum(shard.is_master for shard in shards if shard.source.name in used),
    )


def sender(model: nn.Module, shards: Sequence[RankShard], ranks: RankGroup) -> Deliver:
    """Return what puts pieces of the files of a live model together."""

    @contextlib.contextmanager
    def deliver(units: Sequence[Unit], to: Sequence[int]) -> Iterator[Iterator[Tensors]]:
        with ranks.step("planning the messages") as step:
            plan = SendPlan(units, shards, ranks, bucket_bytes=1)
            step.digest = {"tensors": plan.tensors, "the layout of the tensors": plan.rules}
        with delivery(Sending(model, plan, shards, ranks, to=to)) as buckets:
            yield buckets

    return deliver


def with_merging(weights: Weights, model: nn.Module, shards: Sequence[RankShard], ranks: RankGroup) -> Weights:
    """Have merged parameters put together on all ranks, one merge at a time. Each rank writes a share of each."""
    if not weights.merges:
        return weights
    shard_of = {id(shard.tensor): shard for shard in shards}
    sources = {key: shard.source for key, shard in shard_of.items()}
    units, elements = [], dict(weights.elements)
    for merge in weights.merges:
        merged = [shard_of[id(parameter)] for parameter in merge.parameters]
        units.append(merge_unit(merge, [full_tensor(shard.source) for shard in merged], sources))
        for shard in merged:
            share = partition_range(numel(shard.source), ranks.rank, ranks.world_size)
            elements[shard.source.name] = replace(shard, region=share)
    plan = SendPlan(units, shards, ranks, bucket_bytes=1)
    return replace(weights, deliver=None, elements=elements, merging=Sending(model, plan, shards, ranks, to=None))


def _describe_by_names(
    model: nn.Module,
    scratch: Path,
    sources: Mapping[int, Source],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    kwargs: Mapping[str, Any],
) -> list[SavedFile]:
    """Return the files of a module that has no `save_pretrained`: a tied weight once, by its first name."""
    kwargs = dict(kwargs)
    rename = kwargs.pop("rename", None)
    saver.refuse_arguments(dtype, kwargs)
    if kwargs:
        raise ConfigError(f"save_model: {', '.join(sorted(kwargs))}: this module has no save_pretrained to take it")
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in sources:
            raise UnsupportedError(f"{name}: is neither a parameter nor a buffer, so it cannot be saved in safetensors")
        first.setdefault(id(tensor), name)
    places: dict[int, set[str]] = {}
    for named in named_tensors(model):
        places.setdefault(id(named.tensor), set()).add(named.name)
    plain = {name: plain_name(model, name) for name in first.values()}
    # Hooks may give a state dict any names.
    names = {name: plain[name] if plain[name] in places.get(key, ()) else name for key, name in first.items()}
    prove_names(type(model).__name__, names, names)
    tensors, _ = renamed({names[name]: sources[key] for key, name in first.items()}, rename or {}, ())
    return saver.describe_plain(tensors, scratch, dtype=dtype, max_shard_size=max_shard_size)


def _left_out(
    model: nn.Module, shards: Sequence[RankShard], written: Collection[str], merges: Sequence[Merge]
) -> list[str]:
    """Return the names of parameters, and of buffers of the state dict, that are in no file and merged into nothing."""
    others = {id(adapter) for merge in merges for adapter in merge.adapters()}
    for module in model.modules():
        own = vars(module)
        others |= {id(own["_buffers"].get(key)) for key in own["_non_persistent_buffers_set"]}
    names = (shard.source.name for shard in shards if id(shard.tensor) not in others)
    return [name for name in names if name not in written]


def used_sources(files: Iterable[SavedFile]) -> set[str]:
    """Return the names of the tensors of which files are made."""
    expressions = (part for file in files for part in file.tensors.values())
    return {leaf.name for part in expressions for leaf in leaves(part) if isinstance(leaf, Source)}


def plan_tensor(name: str, expression: Expression, file: str = "") -> PlannedTensor:
    """Return a tensor with the copies, from parameters and values in memory, that are proved to fill it once."""
    what = f"{file}: {name}" if file else name
    copies = tuple(plan_copies(expression, FlatRange(0, numel(expression))))
    for copy in copies:
        if not isinstance(copy.leaf, Source | Held):
            raise needs_gathering(what, copy.leaf)
    prove_coverage(what, [copy.nest for copy in copies], numel(expression))
    return PlannedTensor(name, expression.shape, expression.dtype, copies)


def needs_gathering(what: str, leaf: Leaf) -> UnsupportedError:
    """Return the error of a tensor that cannot be made piece by piece."""
    made_by = leaf.operation if isinstance(leaf, Computed | Elementwise) else getattr(leaf, "origin", leaf)
    return UnsupportedError(
        f"{what}: is made by {made_by}, which needs gathered parameters; save it with save_original_format=False, or "
        "with stage3_gather_16bit_weights_on_model_save"
    )
