"""save_model: what a live model has to write, and under which names. See docs/howto/saving.md."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.steps import Alone, RankGroup, has_group
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.families import diffusion
from lowmem_load.families.files import renamed
from lowmem_load.frameworks import peft
from lowmem_load.frameworks.peft import Merge
from lowmem_load.frameworks.wrappers import NamedTensor, named_tensors
from lowmem_load.hf import saver
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.saver import SavedFile
from lowmem_load.phases import without_progress
from lowmem_load.planning.expression import Source
from lowmem_load.planning.proof import prove_names
from lowmem_load.saving.local_shards import LocalShard, group_of, local_shards, unwrapped
from lowmem_load.saving.write_folder import Contents, write_folder
from lowmem_load.saving.writer import SaveReport, used_sources

Describe: TypeAlias = Callable[[Path, Mapping[int, Source]], tuple[list[SavedFile], list[Merge]]]
"""Gets an empty folder of this rank's own, to which it writes all other files, and the source of each parameter and
buffer, by `id`. Returns the files of weights, and the merges of adapters."""


@without_progress
def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    **save_pretrained_kwargs: Any,
) -> SaveReport:
    """Write the folder that `save_pretrained` of the whole model would write. Each rank writes the bytes that it holds.

    Every rank must call it, between steps and outside of `GatheredParameters`. The files are ordinary Hugging Face
    files, with the same names, keys, shards and bytes. Works under ZeRO-3 in every mode (offload, hpZ, partial
    ZeRO-3, frozen parts), under stages 0 to 2, and without DeepSpeed. A new folder appears all at once when all ranks
    are done. In an existing one, files are replaced at that moment, and what a save does not write stays; until then,
    and after a failure, all of it is as before.

    Args:
        model: of transformers, diffusers or PEFT (whose adapters are written), or an engine, DDP or what torch.compile
            returned that holds one. These are known by their classes. A module without a `save_pretrained` is written
            under the names of its tensors, or what `rename=` (see `load_into`) makes of them.
        folder: on a file system that all ranks share; nodes may have it under different paths. Made if it is not there.
        max_shard_size: bytes, or text such as "5GB", as for `save_pretrained`.
        dtype: of floating-point tensors in the files: fp64, fp32, fp16 or bf16. None: that of the model. With
            torch.float32, the optimizer's fp32 values are written of parameters that a ZeRO-3 engine trains in 16
            bits; `SaveReport.num_masters` counts them. Under stages 0 to 2 the 16-bit values are cast.
        merge_adapters: of a PEFT model, write what its `merge_and_unload().save_pretrained` writes; the model does not
            change. All ranks gather the weights that adapters change, one layer at a time. With a dtype, the merged
            values are cast.
        **save_pretrained_kwargs: for the model's `save_pretrained`: variant, save_original_format, ...

    Collective: all ranks that hold partitions of the model, or all ranks. Weights cross the network only to be merged.
    Memory: a buffer of 8 MiB where elements are cast, rearranged or on a device; to merge, a few times the largest
    layer.

    Raises:
        ConfigError: the folder or an argument cannot be used, or `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be saved without gathering it, and why.
        CheckpointError: the system refuses a write: the disk is full.
        RankError: another rank failed; the same error is raised on every rank.
    """
    model, uses_masters = unwrapped(model), dtype == torch.float32 and not merge_adapters
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "merge_adapters": merge_adapters}
    describe = functools.partial(describe_files, model, kwargs=save_pretrained_kwargs, **options)
    options |= {key: value for key, value in save_pretrained_kwargs.items() if key != "rename"}  # a function
    return save_described(model, folder, describe, options, masters=uses_masters)


def describe_files(
    model: nn.Module,
    scratch: Path,
    sources: Mapping[int, Source],
    *,
    merge_adapters: bool = False,
    has_configs: bool = True,
    **options: Any,
) -> tuple[list[SavedFile], list[Merge]]:
    """Return the files that a save has, and the merges of adapters; see `hf.saver.describe_save_pretrained`."""
    whole, merges = peft.unloaded(model) if merge_adapters else (model, [])
    if diffusion.is_model(whole):
        files = diffusion.describe_save_of_diffusers(whole, scratch, sources, **options)
    elif not hasattr(whole, "save_pretrained"):
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


def save_described(
    model: nn.Module,
    folder: str | os.PathLike[str],
    describe: Describe,
    arguments: Mapping[str, Any],
    *,
    masters: bool = False,
) -> SaveReport:
    """Write the files that `describe` returns, of which ranks must have equal `arguments`. Collective.

    `masters`: see `local_shards`.
    """
    with load_lock():
        ranks = ranks_of(model, may_be_alone=True)
        report = SaveReport(os.fspath(folder), rank=ranks.rank, world_size=ranks.world_size)

        def contents(scratch: Path) -> Contents:
            shards = local_shards(model, ranks.rank, masters=masters)
            files, merges = describe(scratch, {id(shard.tensor): shard.source for shard in shards})
            used = used_sources(files)
            report.left_out = _left_out(model, shards, used, merges)
            report.num_masters = sum(shard.is_master for shard in shards if shard.source.name in used)
            by_tensor = {id(shard.tensor): shard for shard in shards}
            merged = [(merge, [by_tensor[id(parameter)] for parameter in merge.parameters]) for merge in merges]
            return Contents(files, {shard.source.name: shard for shard in shards}, merged)

        with ranks.session("save_model"):
            write_folder(ranks, report, contents, arguments)
    return report


def save_state_dict(model: nn.Module, folder: str | os.PathLike[str], name: str, *, without_frozen: bool) -> None:
    """Write what `state_dict` of the whole model returns into one file of torch, as engines save it. Collective."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def describe(scratch: Path, sources: Mapping[int, Source]) -> tuple[list[SavedFile], list[Merge]]:
        state = saver.symbolic_state(model, sources, None)
        kept = {key: value for key, value in state.items() if not (without_frozen and key in frozen)}
        return [saver.recorded(scratch, kept, scratch / name, {}, is_zip=True)], []

    save_described(model, folder, describe, {"save_filename": name, "exclude_frozen": without_frozen})


def ranks_of(model: nn.Module, *, may_be_alone: bool = False) -> RankGroup:
    """Return the ranks that save a model together. Without a group they make one, unless they `may_be_alone`."""
    groups = list(dict.fromkeys(group for p in model.parameters() if (group := group_of(p)) is not None))
    if len(groups) > 1:
        raise UnsupportedError(f"the model's parameters are partitioned among {len(groups)} different groups of ranks")
    if groups or has_group():
        return RankGroup(groups[0] if groups else None)
    return Alone() if may_be_alone else DistributedInterface()


def _left_out(
    model: nn.Module, shards: Sequence[LocalShard], written: Collection[str], merges: Sequence[Merge]
) -> list[str]:
    """Return the names of parameters, and of buffers of the state dict, that are in no file and merged into nothing."""
    others = {id(adapter) for merge in merges for adapter in merge.adapters()}
    for module in model.modules():
        own = vars(module)
        others |= {id(own["_buffers"].get(key)) for key in own["_non_persistent_buffers_set"]}
    names = (shard.source.name for shard in shards if id(shard.tensor) not in others)
    return [name for name in names if name not in written]
