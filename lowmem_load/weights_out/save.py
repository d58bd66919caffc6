"""save_model, and what else is put into a folder: all ranks plan, agree, write, agree and rename.

[Note: the plan read backwards] A load asks which bytes of files fill a rank's partition. A save asks which bytes of
files a rank's partition fills. `plan_copies` answers the first half for both: it describes every tensor of a file as
copies from parameters. They are equal on all ranks, and are proved to cover each tensor once. A rank takes the part of
each copy whose elements it owns. Ranks own disjoint regions that together are the parameter, so exactly one rank
writes each byte. The ranks add up their bytes to check that.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_load.distributed.nodes import node_name
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import PlanError, UnsupportedError, listed
from lowmem_load.files.mounts import has_caches_apart
from lowmem_load.models.active import load_lock
from lowmem_load.phases import Phases, Progress, progress_bar
from lowmem_load.planning.regions import FlatRange
from lowmem_load.text import fingerprint, plain_url, share, size
from lowmem_load.weights_out import folder as folders
from lowmem_load.weights_out.rank_shards import rank_shards, ranks_of, unwrapped
from lowmem_load.weights_out.send import delivery, name_tensor_pairs
from lowmem_load.weights_out.store import write_to_store
from lowmem_load.weights_out.weight_files import FileLayout, Write, Writer, lay_out, plan_writes
from lowmem_load.weights_out.weights import Weights, sender, weights_of_model, with_merging


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    **save_pretrained_kwargs: Any,
) -> SaveReport:
    """Write the folder that `save_pretrained` of the full model would write. Each rank writes the bytes that it owns.

    Call on every rank that has partitions of the model, between steps and outside of `GatheredParameters`. The files
    are ordinary Hugging Face files, with the same names, keys, shards and bytes. Works under ZeRO-3 in every mode
    (offload, hpZ, partial ZeRO-3, frozen parts), under FSDP2, under stages 0 to 2, and without DeepSpeed. A new folder
    appears all at once when all ranks are done. In an existing one, files are replaced at that moment, and what a save
    does not write stays; until then, and after a failure, all of it is as before. A folder in a store does not load if
    a save fails while it replaces files there; see docs/reference/guarantees.md.

    Args:
        model: a model of transformers, diffusers or PEFT (whose adapters are written), or an engine, DDP or a compiled
            module around one. These are known by their classes. A module without a `save_pretrained` is written under
            the names of its tensors.
        folder: a folder, new or not, on a file system that all ranks share; nodes may have it under different paths.
            Or one in S3, GCS or Azure, as text: "s3://bucket/run". One rank uploads each file.
        max_shard_size: most bytes of a file, as a number or as text such as "5GB".
        dtype: dtype of the floating-point tensors in the files: fp64, fp32, fp16 or bf16. With torch.float32, the
            optimizer's fp32 values are written where a ZeRO-3 engine trains in 16 bits (`SaveReport.num_masters`
            counts them); under stages 0 to 2 the 16-bit values are cast. Default: that of the model.
        merge_adapters: write what `merge_and_unload().save_pretrained` of a PEFT model writes; the model does not
            change. All ranks gather the weights that adapters change, one layer at a time; only these cross the
            network. With a dtype, the merged values are cast.
        **save_pretrained_kwargs: for the model's `save_pretrained`: variant, save_original_format, ... A module without
            a `save_pretrained` takes `rename`, which turns its names into those in the files; see `load_into`.

    Memory: a buffer of 8 MiB where elements are cast, rearranged or on a device; to merge, a few times the largest
    layer. To a store: 256 MiB, of which 128 are on the accelerator where its collectives run.

    Raises:
        ConfigError: the folder or an argument cannot be used, or `GatheredParameters` is open.
        UnsupportedError: names a tensor that cannot be saved without gathering it, and why.
        CheckpointError: the system or the store refuses a write: the disk is full, credentials have expired.
        RankError: another rank failed; the same error is raised on every rank.

    Example:
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        report = save_model(engine, "out", dtype=torch.bfloat16)  # on every rank
        print(report.written_bytes)
    """
    model = unwrapped(model)
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "merge_adapters": merge_adapters}
    return save_by(ranks_of(model, may_be_alone=True), model, folder, options, save_pretrained_kwargs)


def save_when_all_call(what: str, model: nn.Module, folder: str | os.PathLike[str], **keywords: Any) -> None:
    """Do what `save_model` does in place of `what`, which scripts may call on one rank only: then raise soon."""
    title = f"{what}, to be called on all ranks and not by the main one alone"
    with ranks_of(model).step(title, is_prompt=True):
        pass  # wait for all ranks
    save_model(model, folder, **keywords)


def save_by(
    ranks: RankGroup,
    model: nn.Module,
    folder: str | os.PathLike[str],
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> SaveReport:
    """Do what `save_model` does with a model that nothing wraps, by its options and keywords. Collective: the ranks."""

    def weights(scratch: Path) -> Weights:
        masters = options["dtype"] == torch.float32 and not options.get("merge_adapters")
        shards = rank_shards(model, ranks.rank, masters=masters)
        described = weights_of_model(model, shards, scratch, kwargs=kwargs, **options)
        return with_merging(replace(described, deliver=sender(model, shards, ranks)), model, shards, ranks)

    compared = {**options, **{key: value for key, value in kwargs.items() if key != "rename"}}  # a function
    with load_lock():
        return write(ranks, folder, weights, compared, title="save_model")


@dataclass(slots=True)
class SaveReport(Phases):
    """What one save did on one rank.

    Attributes:
        folder: where the files are.
        files: bytes of each file of weights, by its name.
        rank, world_size: of the ranks that saved together.
        written_bytes: bytes of weights that this rank wrote. All ranks together wrote the data of the files.
        staged_bytes: those of `written_bytes` that went through a buffer of 8 MiB, because they were cast, rearranged
            or on a device, or to a store. The others were written straight from the partitions.
        num_masters: parameters of which the optimizer's fp32 values were written.
        num_merged: layers whose adapters were merged; see `save_model`.
        source: what it was made of, for `consolidate`.
        left_out: names of tensors of the model or training checkpoint that were not written, such as an optimizer's,
            the base model's where only adapters are saved, and those that `rename` leaves out.
        seconds, peak_memory: see `Phases`; the phases are plan, merge, write, sync, rename.
    """

    folder: str
    files: dict[str, int] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    written_bytes: int = 0
    staged_bytes: int = 0
    num_masters: int = 0
    num_merged: int = 0
    source: str = ""
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {len(self.files)} files of weights, {size(sum(self.files.values()))}; rank "
            f"{self.rank} of {self.world_size}",
            f"made of {self.source}" if self.source else "",
            f"wrote {size(self.written_bytes)}, {size(self.staged_bytes)} through a buffer",
            f"peak {size(self.peak_memory.total_bytes)} above the start",
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()),
            f"left out {len(self.left_out)} tensors: {listed(self.left_out, 3)}" if self.left_out else "",
            f"{self.num_masters} parameters as the optimizer's fp32 values" if self.num_masters else "",
            f"{self.num_merged} layers merged with their adapters" if self.num_merged else "",
        ]
        return "\n  ".join(filter(None, lines))


def write(
    ranks: RankGroup,
    folder: str | os.PathLike[str],
    describe: Callable[[Path], Weights],
    arguments: Mapping[str, Any],
    *,
    title: str,
) -> SaveReport:
    """Write weights into a folder; see [Note: all at once] in `folder.py`. Collective.

    `describe` gets an empty folder of this rank's own, to which it writes all files that have no weights. `arguments`
    have to be equal on all ranks. `title` says what is done, in errors.
    """
    is_in_store = folders.is_in_store(folder)
    with ranks.session(title), tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        name = plain_url(os.fspath(folder)).rstrip("/") if is_in_store else os.fspath(folder)
        scratch, report = Path(made), SaveReport(name, rank=ranks.rank, world_size=ranks.world_size)
        with ranks.step("planning the save", name=report.folder) as step, report.phase("plan"):
            target = folders.find_target(folder)
            weights = describe(scratch)
            if is_in_store and weights.merging is not None:
                raise UnsupportedError(
                    f"{name}: merged adapters cannot be saved to a store; save to a folder, and copy"
                )
            files = [lay_out(file) for file in weights.files]
            writes = plan_writes(files)
            own_bytes = sum(
                part.nbytes
                for name, of_one in writes.items()
                for each in of_one
                for part in each.within(weights.elements[name].region)
            )
            all_bytes = sum(each.nbytes for of_one in writes.values() for each in of_one)
            step.digest = {key: repr(value) for key, value in arguments.items()}
            step.digest["the store"] = name if is_in_store else "none"
            step.digest["files"] = listed([f"{file.name} ({file.nbytes} bytes)" for file in files])
            step.digest["headers of the files"] = fingerprint(map(str, files))
            if weights.merging is not None:
                step.digest["the layout of the tensors"] = weights.merging.plan.rules
            step.payload = own_bytes, target, node_name(ranks.rank)
        nbytes, targets, nodes = zip(*step.payloads, strict=True)
        if sum(nbytes) != all_bytes:  # see [Note: the plan read backwards]
            raise PlanError(
                f"{report.folder}: the ranks own {sum(nbytes)} bytes of {all_bytes} that are to be written "
                f"(by rank: {', '.join(map(str, nbytes))}); were all ranks of the model called?"
            )
        report.files = {file.name: file.nbytes for file in files}
        report.left_out, report.num_masters = list(weights.left_out), weights.num_masters
        report.num_merged, report.source = sum(len(merge.layers) for merge in weights.merges), weights.source
        if is_in_store:
            _write_to_store(ranks, report, weights, files, scratch)
            return report
        with _shared_staging(ranks, report, files, targets) as staging:
            past_cache = len(set(nodes)) > 1 and has_caches_apart(target)
            paths = [staging.path / file.name for file in files]
            _write_files(ranks, report, weights, writes, own_bytes, paths, past_cache=past_cache)
            with ranks.step("renaming", name=report.folder), report.phase("rename"):
                if ranks.rank == 0:
                    folders.add_files(staging, scratch)
                    folders.commit(staging)
    return report


def _write_to_store(
    ranks: RankGroup, report: SaveReport, weights: Weights, files: Sequence[FileLayout], scratch: Path
) -> None:
    def on_bytes(num_bytes: int) -> None:
        update(num_bytes)
        report.written_bytes += num_bytes
        report.sample_memory()

    assert weights.deliver is not None  # nothing is merged
    with progress_bar(sum(report.files.values()) // ranks.world_size, "Saving", ranks.rank) as update:
        write_to_store(ranks, report, files, weights.deliver, scratch, report.folder, on_bytes)
    report.staged_bytes = report.written_bytes


@contextlib.contextmanager
def _shared_staging(
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


def _write_files(
    ranks: RankGroup,
    report: SaveReport,
    weights: Weights,
    writes: Mapping[str, list[Write]],
    own_bytes: int,
    paths: Sequence[Path],
    *,
    past_cache: bool,
) -> None:
    """Write what is this rank's of the writes of each tensor. Collective."""

    def progress() -> Progress:
        written = f"{share(writer.written_bytes, own_bytes)} written"
        return Progress(writer.written_bytes + writer.num_synced, f"{written}, {writer.num_synced} files synced")

    def on_bytes(num_bytes: int) -> None:
        update(num_bytes)
        ranks.check()

    # Each rank begins with another file: file systems let one rank write at a time.
    first = ranks.rank * len(paths) // ranks.world_size
    todo = dict(sorted(writes.items(), key=lambda item: item[1][0].file < first))
    bar = progress_bar(own_bytes, "Saving", ranks.rank)
    with bar as update, Writer(paths, on_bytes, past_cache=past_cache) as writer:
        if weights.merging is not None:
            with report.phase("merge"), delivery(weights.merging) as buckets:
                for name, merged in name_tensor_pairs(buckets):
                    own_share = weights.elements[name].region
                    assert isinstance(own_share, FlatRange)  # by `with_merging`
                    flat = merged.reshape(-1)[own_share.start : own_share.end]
                    writer.write_parts(todo.pop(name, ()), flat, own_share)
                    report.sample_memory()
                    del merged, flat  # before the next ones are made
        with ranks.step("writing", name=report.folder, progress=progress):
            with report.phase("write"):
                for name, of_one in todo.items():
                    own = weights.elements[name]
                    with own.memory() if own.region.numel else contextlib.nullcontext([]) as pieces:
                        for memory, region in pieces:
                            writer.write_parts(of_one, memory, region)
                            report.sample_memory()
                if writer.written_bytes != own_bytes:
                    raise PlanError(f"{report.folder}: wrote {writer.written_bytes} bytes, expected {own_bytes}")
            with report.phase("sync"):
                writer.sync()
        report.written_bytes, report.staged_bytes = writer.written_bytes, writer.staged_bytes
