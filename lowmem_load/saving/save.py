"""save_model: describe, plan, agree, write, agree, rename. See docs/howto/saving.md."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from lowmem_load.deprecation import without_progress
from lowmem_load.distributed.group import Alone, RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.distributed.live_group import has_group
from lowmem_load.distributed.nodes import node_name
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, PlanError, UnsupportedError, listed
from lowmem_load.families import diffusion
from lowmem_load.families.files import renamed
from lowmem_load.frameworks import peft
from lowmem_load.frameworks.peft import Merge
from lowmem_load.frameworks.wrappers import NamedTensor, named_tensors
from lowmem_load.hf import saver
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.saver import SavedFile
from lowmem_load.io.memory import trim_heap
from lowmem_load.io.mounts import has_caches_apart
from lowmem_load.phases import progress_bar
from lowmem_load.planning.expression import Source, leaves
from lowmem_load.planning.proof import prove_names
from lowmem_load.saving import folder as folders
from lowmem_load.saving.local_shards import LocalShard, group_of, is_dtensor, local_shards, unwrapped
from lowmem_load.saving.writer import (
    FileLayout,
    SaveReport,
    Write,
    Writer,
    digest_of,
    lay_out_saved,
    own_writes,
    plan_writes,
    total_bytes,
)
from lowmem_load.text import share

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
    options = {"dtype": dtype, "max_shard_size": max_shard_size, "kwargs": save_pretrained_kwargs}
    describe = functools.partial(_describe, model, merge_adapters, options)
    arguments = {"max_shard_size": max_shard_size, "dtype": dtype, "merge_adapters": merge_adapters}
    arguments |= {key: value for key, value in save_pretrained_kwargs.items() if key != "rename"}  # a function
    return save_described(model, folder, describe, arguments, masters=uses_masters)


def _describe(
    model: nn.Module, merge_adapters: bool, options: Mapping[str, Any], scratch: Path, sources: Mapping[int, Source]
) -> tuple[list[SavedFile], list[Merge]]:
    whole, merges = peft.unloaded(model) if merge_adapters else (model, [])
    return describe_save(whole, scratch, sources, **options), merges


def describe_save(
    model: nn.Module, scratch: Path, sources: Mapping[int, Source], *, has_configs: bool = True, **options: Any
) -> list[SavedFile]:
    """Do what `hf.saver.describe_save` does, by the family of the model."""
    if diffusion.is_model(model):
        return diffusion.describe_save(model, scratch, sources, **options)
    if not hasattr(model, "save_pretrained"):
        return _describe_by_names(model, scratch, sources, **options)
    return saver.describe_save(model, scratch, sources, has_configs=has_configs, **options)


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
        save = _Save(ranks, os.fspath(folder), report)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ranks.session("save_model"))
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowmem_load-")))
            with ranks.step("planning the save", name=save.folder) as step, report.phase("plan"):
                target = folders.find_target(folder)
                planned = save.plan(model, describe, scratch, masters)
                step.digest = {key: repr(value) for key, value in arguments.items()}
                step.digest["files"] = listed([f"{file.name} ({file.nbytes} bytes)" for file in planned.files])
                step.digest["headers of the files"] = digest_of(planned.files)
                step.payload = planned.own_bytes, target, node_name(ranks.rank)
            nbytes, targets, nodes = zip(*step.payloads, strict=True)
            if sum(nbytes) != planned.all_bytes:  # see [Note: the plan read backwards]
                raise PlanError(
                    f"{save.folder}: the ranks hold {sum(nbytes)} bytes of {planned.all_bytes} that are to be written "
                    f"(by rank: {', '.join(map(str, nbytes))}); were all ranks of the model called?"
                )
            with shared_staging(ranks, report, planned.files, targets) as staging:
                past_cache = len(set(nodes)) > 1 and has_caches_apart(target)
                save.write(planned, staging, past_cache=past_cache)
                with ranks.step("renaming", name=save.folder), report.phase("rename"):
                    if ranks.rank == 0:
                        folders.put_beside(staging, scratch)
                        folders.commit(staging)
    return report


def ranks_of(model: nn.Module, *, may_be_alone: bool = False) -> RankGroup:
    """Return the ranks that save a model together. Without a group they make one, unless they `may_be_alone`."""
    groups = list(dict.fromkeys(group for p in model.parameters() if (group := group_of(p)) is not None))
    if len(groups) > 1:
        raise UnsupportedError(f"the model's parameters are partitioned among {len(groups)} different groups of ranks")
    if groups or has_group():
        return RankGroup(groups[0] if groups else None)
    return Alone() if may_be_alone else DistributedInterface()


@contextlib.contextmanager
def shared_staging(
    ranks: RankGroup, report: SaveReport, files: Sequence[FileLayout], targets: Sequence[str]
) -> Iterator[folders.Staging]:
    """Have rank 0 make the staging folder for the block; it is removed if the block fails on any rank. Collective.

    `targets` are the folder as each rank knows it.
    """
    made: folders.Staging | None = None
    try:
        with ranks.step("making the folder", name=report.folder) as step:
            if ranks.rank == 0:
                made = folders.make_staging(targets[0], files)
                step.payload = str(made.path), made.token, made.is_inside
        path, token, is_inside = step.payloads[0]
        staging = folders.Staging(Path(targets[ranks.rank]), token, is_inside)
        with ranks.step("reaching the folder", name=report.folder):
            folders.check_seen(staging, path)
        yield staging
    except BaseException:  # on any rank: by now all have stopped writing
        if made is not None:
            folders.discard(made)
        raise


@dataclass(frozen=True, slots=True)
class _Planned:
    """A planned save: what this rank holds and writes, by parameter, and what all ranks write together."""

    files: list[FileLayout]
    shards: dict[str, LocalShard]
    writes: dict[str, list[Write]]
    own_bytes: int
    all_bytes: int
    merges: list[Merge]


@dataclass(frozen=True, slots=True)
class _Save:
    ranks: RankGroup
    folder: str
    report: SaveReport

    def plan(self, model: nn.Module, describe: Describe, scratch: Path, masters: bool) -> _Planned:
        shards = local_shards(model, self.ranks.rank, masters=masters)
        saved, merges = describe(scratch, {id(shard.tensor): shard.source for shard in shards})
        files = [lay_out_saved(file, scratch) for file in saved]
        writes = plan_writes(files)
        mine = own_writes(writes, {shard.source.name: shard.mine for shard in shards})
        self.report.files = {file.name: file.nbytes for file in files}
        self.report.left_out = _left_out(model, shards, saved, merges)
        used = {write.parameter for write in writes}
        self.report.num_masters = sum(shard.is_master for shard in shards if shard.source.name in used)
        own_bytes = total_bytes(itertools.chain.from_iterable(mine.values()))
        named = {shard.source.name: shard for shard in shards}
        return _Planned(files, named, mine, own_bytes, total_bytes(writes), merges)

    def write(self, planned: _Planned, staging: folders.Staging, *, past_cache: bool) -> None:
        report, total = self.report, planned.own_bytes
        paths = [staging.path / file.name for file in planned.files]

        def progress() -> Progress:
            written = f"{share(writer.written_bytes, total)} written"
            return Progress(writer.written_bytes + writer.num_synced, f"{written}, {writer.num_synced} files synced")

        def on_bytes(num_bytes: int) -> None:
            update(num_bytes)
            self.ranks.check()

        bar = progress_bar(total, "Saving partitions", self.ranks.rank)
        with bar as update, Writer(paths, on_bytes, past_cache=past_cache) as writer:
            todo = _in_turn(planned.writes, len(planned.files), self.ranks)
            shards = {id(shard.tensor): shard for shard in planned.shards.values()}
            for merge in planned.merges:
                self._write_merged(merge, [shards[id(parameter)] for parameter in merge.parameters], writer, todo)
            with self.ranks.step("writing", name=self.folder):
                with report.phase("write"):
                    for name, writes in todo.items():
                        with planned.shards[name].memory() as pieces:
                            for memory, first in pieces:
                                writer.write_parts(writes, memory, first)
                        report.sample_memory()
                with report.phase("sync"):
                    writer.sync()
        report.written_bytes, report.staged_bytes = writer.written_bytes, writer.staged_bytes

    def _write_merged(
        self, merge: Merge, shards: Sequence[LocalShard], writer: Writer, todo: dict[str, list[Write]]
    ) -> None:
        """Write the parameters that adapters are merged into, and remove them from `todo`."""
        name = shards[0].source.name
        with self.ranks.step(f"merging {name}", name=self.folder) as step, self.report.phase("merge"):
            merged, digest = gathered_and_merged(merge, shards)
            step.digest = {"adapters with values": digest}  # else ranks would write a mixture of models
            for shard, memory in zip(shards, merged, strict=False):
                for write in todo.pop(shard.source.name, ()):
                    writer.write(write, memory, 0)
                self.report.sample_memory()
        self.report.num_merged += len(merge.layers)


def _left_out(
    model: nn.Module, shards: Sequence[LocalShard], files: Sequence[SavedFile], merges: Sequence[Merge]
) -> list[str]:
    """Return the names of parameters, and of buffers of the state dict, that are in no file and merged into nothing."""
    expressions = (part for file in files for part in file.tensors.values())
    written = {leaf.name for part in expressions for leaf in leaves(part) if isinstance(leaf, Source)}
    others = {id(adapter) for merge in merges for adapter in merge.adapters()}
    for module in model.modules():
        own = vars(module)
        others |= {id(own["_buffers"].get(key)) for key in own["_non_persistent_buffers_set"]}
    names = (shard.source.name for shard in shards if id(shard.tensor) not in others)
    return [name for name in names if name not in written]


def _in_turn(writes: Mapping[str, list[Write]], num_files: int, ranks: RankGroup) -> dict[str, list[Write]]:
    """Return the writes by parameter. Each rank begins with another file: file systems let one rank write at a time."""
    own = ranks.rank * num_files // ranks.world_size
    later = {name: mine for name, mine in writes.items() if mine[0].file < own}
    return {name: mine for name, mine in writes.items() if name not in later} | later


def gathered_and_merged(merge: Merge, shards: Sequence[LocalShard]) -> tuple[list[torch.Tensor], str]:
    """Return the merged parameters, flat, on ranks that write any of them, and a digest of the adapters. Collective."""
    adapters = merge.adapters()
    if any(map(is_dtensor, (*merge.parameters, *adapters))):
        raise UnsupportedError(
            f"{shards[0].source.name}: is a DTensor, whose adapters cannot be merged while it is saved; save the "
            "adapter, and merge it into an ordinary load"
        )
    trim_heap()  # of the layer before
    digest = hashlib.sha256()
    with _gathered([*merge.parameters, *adapters]):
        for adapter in adapters:
            digest.update(adapter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        merged = merge.run() if any(shard.mine for shard in shards) else []
    return [tensor.reshape(-1) for tensor in merged], digest.hexdigest()[:16]


def _gathered(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    if "deepspeed" not in sys.modules:
        return contextlib.nullcontext()
    from lowmem_load.ds.parameters import gathered

    return gathered(parameters)
