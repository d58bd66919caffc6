"""Weights: tensors as expressions of what the ranks hold, and the owner of each part. They go into files or messages.

A live model and a training checkpoint give weights. `write` puts them into files, and `Sending` into messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.models import peft, saver
from lowmem_load.models.modules import renamed
from lowmem_load.models.peft import Merge
from lowmem_load.models.saver import SavedFile
from lowmem_load.models.wrappers import NamedTensor, named_tensors
from lowmem_load.planning.expression import Computed, Elementwise, Expression, Held, Leaf, Source, leaves, numel
from lowmem_load.planning.nest import Copy, plan_copies
from lowmem_load.planning.proof import prove_coverage, prove_names
from lowmem_load.planning.regions import FlatRange
from lowmem_load.weights_out.buckets import merge_unit, whole_tensor
from lowmem_load.weights_out.rank_shards import MemoryPiece, RankShard, rank_shards
from lowmem_load.weights_out.send import Sending, plan_sending


class OwnElements(Protocol):
    """The elements of one tensor that this rank writes. All ranks together have each element once."""

    @property
    def mine(self) -> Sequence[FlatRange]:
        """Which elements of the tensor these are."""

    def memory(self) -> contextlib.AbstractContextManager[Iterable[MemoryPiece]]:
        """Yield memory that holds them. A piece may end when the next one is asked for."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What is written.

    Attributes:
        files: of weights. Their expressions have `Source`s with the names of `elements`.
        elements: of each tensor what this rank writes, by name.
        merging: sends the parameters that adapters are merged into to all ranks, merge by merge.
        left_out, num_masters, num_merged, source: see `SaveReport`.
    """

    files: Sequence[SavedFile]
    elements: Mapping[str, OwnElements]
    merging: Sending | None = None
    left_out: Sequence[str] = ()
    num_masters: int = 0
    num_merged: int = 0
    source: str = ""


def weights_of_model(model: nn.Module, ranks: RankGroup, scratch: Path, **options: Any) -> Weights:
    """Return the weights of a live model, in the files that `describe_files` returns by these options."""
    masters = options["dtype"] == torch.float32 and not options.get("merge_adapters")
    shards = rank_shards(model, ranks.rank, masters=masters)
    sources = {id(shard.tensor): shard.source for shard in shards}
    files, merges = describe_files(model, scratch, sources, **options)
    used, merging = used_sources(files), None
    if merges:  # merged parameters are put together on all ranks, one merge at a time
        wholes = [[whole_tensor(sources[id(parameter)]) for parameter in merge.parameters] for merge in merges]
        units = [merge_unit(merge, made, sources) for merge, made in zip(merges, wholes, strict=True)]
        merging = Sending(model, plan_sending(units, shards, ranks, bucket_bytes=1), shards, ranks, to=None)
    return Weights(
        files,
        {shard.source.name: shard for shard in shards},
        merging,
        left_out=_left_out(model, shards, used, merges),
        num_masters=sum(shard.is_master for shard in shards if shard.source.name in used),
        num_merged=sum(len(merge.layers) for merge in merges),
    )


def describe_files(
    model: nn.Module,
    scratch: Path,
    sources: Mapping[int, Source],
    *,
    merge_adapters: bool = False,
    has_configs: bool = True,
    **options: Any,
) -> tuple[list[SavedFile], list[Merge]]:
    """Return the files that a save has, and the merges of adapters; see `models.saver.describe_save_pretrained`."""
    whole, merges = peft.unloaded(model) if merge_adapters else (model, [])
    if not hasattr(whole, "save_pretrained"):
        files = _describe_by_names(whole, scratch, sources, **options)
    else:
        files = saver.describe_save_pretrained(whole, scratch, sources, has_configs=has_configs, **options)
    return files, merges


def _describe_by_names(
    model: nn.Module,
    scratch: Path,
    sources: Mapping[int, Source],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    kwargs: Mapping[str, Any],
) -> list[SavedFile]:
    """Return the files of a module that has no way to save of its own: a tied weight once, by its first name."""
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
    places: dict[int, list[NamedTensor]] = {}
    for named in named_tensors(model):
        places.setdefault(id(named.tensor), []).append(named)
    # Hooks may give a state dict any names.
    names = {
        name: next((place.name for place in places.get(key, ()) if place.may_be(name)), name)
        for key, name in first.items()
    }
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


def proved_copies(what: str, expression: Expression) -> list[Copy]:
    """Return the copies, from parameters and values in memory, that fill a tensor once. `what` names it in errors."""
    copies = list(plan_copies(expression, FlatRange(0, numel(expression))))
    for copy in copies:
        if not isinstance(copy.leaf, Source | Held):
            raise needs_gathering(what, copy.leaf)
    prove_coverage(what, [copy.nest for copy in copies], numel(expression))
    return copies


def needs_gathering(what: str, leaf: Leaf) -> UnsupportedError:
    """Return the error of a tensor that cannot be made piece by piece."""
    made_by = leaf.operation if isinstance(leaf, Computed | Elementwise) else getattr(leaf, "origin", leaf)
    return UnsupportedError(
        f"{what}: is made by {made_by}, which needs gathered parameters; save it with save_original_format=False, or "
        "with stage3_gather_16bit_weights_on_model_save"
    )
