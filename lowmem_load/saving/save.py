"""save_model: describe, plan, agree, write, agree, rename. What each stage does: docs/saving.md."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.distributed.processes import Progress
from lowmem_load.errors import PlanError, UnsupportedError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.hf import merging, saver
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.merging import Merge
from lowmem_load.phases import progress_bar
from lowmem_load.planning.expression import Expression, Source
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.quantities import share
from lowmem_load.saving import folder as folders
from lowmem_load.saving.file_layout import FileLayout, digest_of, lay_out, lay_out_zip
from lowmem_load.saving.local_shards import Holding, groups_of, holdings_of
from lowmem_load.saving.merge_lora import digest_of_values, merged_pieces, merged_whole, whole_adapters
from lowmem_load.saving.model_digest import unwrapped
from lowmem_load.saving.save_plan import Write, held_writes, plan_writes, total_bytes
from lowmem_load.saving.save_report import SaveReport
from lowmem_load.saving.writer import Writer

Describe: TypeAlias = Callable[[Path, Mapping[int, Source]], tuple[list[saver.SavedFile], list[Merge]]]
"""See `save_described`."""


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
    processors: Sequence[Any] = (),
    progress: bool | None = None,
    **save_pretrained_kwargs: Any,
) -> SaveReport:
    """Write a model as `save_pretrained` of the whole model would, each rank the bytes that it holds.

    Every rank must call it, between steps: not inside `GatheredParameters`, whose changes reach the partitions at its
    end. The files are ordinary Hugging Face ones: the same names, keys, shards and bytes, with transformers'
    conversions turned back, tied and ignored weights left out. Of a PEFT model the adapters are written, or the base
    model with the adapters merged into it. Works under ZeRO-3 whatever holds the partitions (offload to cpu or nvme,
    hpZ, MiCS, partial ZeRO-3, frozen parts), under stages 0 to 2, and without DeepSpeed.

    The folder appears all at once when all ranks are done; until then, and after any failure, what was there before is
    there still. Files in it that a save does not write stay.

    Args:
        model: of transformers or PEFT, or what holds it: an engine of DeepSpeed's, DDP.
        folder: on a file system that all ranks share. Made if it is not there.
        max_shard_size: bytes, or text such as "5GB", as for `save_pretrained`.
        dtype: of floating-point tensors in the files: fp64, fp32, fp16 or bf16; cast on the way. None: as the model
            has them. With torch.float32, of parameters that an engine of ZeRO-3 trains in 16 bits, the optimizer's fp32
            values are written; `SaveReport.num_masters` counts them. (Under stages 0 to 2 it is the 16-bit values,
            cast.)
        merge_adapters: of a PEFT model, write what its `merge_and_unload().save_pretrained` writes; the model itself
            stays as it is. PEFT's own code merges, row by row, a LoRA of linear layers and embeddings; for that every
            rank gathers the adapters (`SaveReport.adapter_bytes`). Anything else (DoRA, LoHa, IA3, experts, biases) is
            gathered with its weight, one at a time (`SaveReport.gathered`). With a dtype, what was merged is cast.
        processors: tokenizers, processors and the like, whose `save_pretrained` writes into the folder too.
        progress: True shows a progress bar on rank 0, False none, None one on long saves when stderr is a terminal.
        **save_pretrained_kwargs: as the model's `save_pretrained` takes them: variant, save_original_format, ...

    Returns:
        What was done on this rank.

    Collective: all ranks that hold partitions of the model, or all ranks. No weight crosses the network, but for
        adapters that are merged.
    Memory: a buffer of 8 MiB where elements are cast, rearranged or on a device; a few times that to merge rows.

    Raises:
        ConfigError: the folder cannot be used, is not shared by all ranks, or too small; or an argument; or a parameter
            is gathered by an open `GatheredParameters`.
        UnsupportedError: names what cannot be saved without gathering it, and why.
        CheckpointError: the system refuses a write: the disk is full.
        RankError: another rank failed; the same error is raised on every rank.
    """
    model = unwrapped(model)
    given: Any = {"dtype": dtype, "max_shard_size": max_shard_size, "kwargs": save_pretrained_kwargs}
    describe = functools.partial(_described, model, merge_adapters, given)
    arguments = f"{max_shard_size!r} {dtype} {merge_adapters} {sorted(save_pretrained_kwargs.items())}"
    uses_masters = dtype == torch.float32 and not merge_adapters
    return save_described(model, folder, describe, arguments, masters=uses_masters, also=processors, progress=progress)


def _described(
    model: nn.Module, merges_adapters: bool, given: Any, scratch: Path, sources: Mapping[int, Source]
) -> tuple[list[saver.SavedFile], list[Merge]]:
    """Return what `save_pretrained` would write of a model, with its adapters merged or not. See `Describe`."""
    with contextlib.ExitStack() as stack:
        whole, merges = stack.enter_context(merging.unloaded(model)) if merges_adapters else (model, [])
        return saver.describe_save(whole, scratch, sources, **given), merges


def save_described(
    model: nn.Module,
    folder: str | os.PathLike[str],
    describe: Describe,
    arguments: str,
    *,
    masters: bool = False,
    also: Sequence[Any] = (),
    progress: bool | None = None,
) -> SaveReport:
    """Write the files that are described. See `save_model`. Collective.

    `describe` gets an empty folder of this rank's own, to which it writes all that is no file of weights, and what
    stands for each parameter and buffer, by `id`. It returns the files of weights, and what is merged. `arguments` says
    all that the files depend on besides; it is the same on all ranks. For the others see `save_model` and
    `holdings_of`.
    """
    with load_lock():
        ranks = ranks_of(model)
        report = SaveReport(os.fspath(folder), rank=ranks.rank, world_size=ranks.world_size)
        with ranks.session("save_model"):
            return _Save(ranks, os.fspath(folder), report, progress)(model, describe, arguments, masters, also)


def ranks_of(model: nn.Module) -> RankGroup:
    """Return the ranks that save a model together. Makes a group of one where there is none."""
    groups = groups_of(model)
    if len(groups) > 1:
        raise UnsupportedError(f"the model's parameters are partitioned among {len(groups)} different groups of ranks")
    return RankGroup(groups[0]) if groups else DistributedInterface()


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is written, and by this rank."""

    files: list[FileLayout]
    holdings: dict[str, Holding]
    writes: list[Write]
    all_bytes: int
    merges: list[Merge]

    def holdings_of(self, merge: Merge) -> list[Holding]:
        """Return those of the weights that are merged together."""
        found = {id(holding.tensor): holding for holding in self.holdings.values()}
        return [found[id(parameter)] for parameter in merge.parameters]


@dataclass(frozen=True, slots=True)
class _Save:
    """One save: see `save_model`."""

    ranks: RankGroup
    folder: str
    report: SaveReport
    progress: bool | None

    def __call__(
        self,
        model: nn.Module,
        describe: Describe,
        arguments: str,
        masters: bool,
        also: Sequence[Any],
    ) -> SaveReport:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowmem_load-")))
            stack.enter_context(saver.logged_as(scratch, self.folder))
            with self.ranks.step("planning the save", name=self.folder) as step, self.report.phase("plan"):
                planned = self._plan(model, describe, scratch, masters)
                told = fingerprint([os.path.realpath(self.folder), arguments])
                step.digest = f"{told}, files {digest_of(planned.files)}"
                step.payload = total_bytes(planned.writes)
            self._prove(planned, step.payloads)
            with self._staging(planned) as staging:
                self._write(planned, staging)
                with self.ranks.step("renaming", name=self.folder), self.report.phase("rename"):
                    if self.ranks.rank == 0:
                        for processor in also:
                            processor.save_pretrained(scratch)
                        folders.put_beside(staging, scratch)
                        folders.commit(staging, [file.name for file in planned.files])
        return self.report

    def _plan(self, model: nn.Module, describe: Describe, scratch: Path, masters: bool) -> _Planned:
        holdings = holdings_of(model, self.ranks.rank, master=masters)
        saved, merges = describe(scratch, {id(holding.tensor): holding.source for holding in holdings})
        files = [_laid_out(file, scratch) for file in saved]
        writes = plan_writes([(layout, _once(file)) for layout, file in zip(files, saved, strict=True)])
        mine = held_writes(writes, {holding.source.name: holding.mine for holding in holdings})
        self.report.files = {file.name: file.nbytes for file in files}
        used = {write.parameter for write in writes}
        self.report.num_masters = sum(one.is_master for one in holdings if one.source.name in used)
        return _Planned(files, {one.source.name: one for one in holdings}, mine, total_bytes(writes), merges)

    def _prove(self, planned: _Planned, each: Sequence[int]) -> None:
        """Raise unless the ranks together write as many bytes as there are. See [Note: the plan read backwards].

        Args:
            planned: says how many there are.
            each: bytes that each rank writes, by rank.
        """
        if sum(each) != planned.all_bytes:
            raise PlanError(
                f"{self.folder}: the ranks hold {sum(each)} bytes of {planned.all_bytes} that are to be written "
                f"(by rank: {', '.join(map(str, each))}); were all ranks of the model called?"
            )

    @contextlib.contextmanager
    def _staging(self, planned: _Planned) -> Iterator[folders.Staging]:
        """Yield the folder that the files go to first: made by rank 0, seen by all; removed after a failure."""
        made: folders.Staging | None = None
        try:
            with self.ranks.step("making the folder", name=self.folder) as step:
                if self.ranks.rank == 0:
                    made = folders.make_staging(self.folder, sum(file.nbytes for file in planned.files))
                    for file in planned.files:
                        folders.make_file(made, file.name, file.header, file.nbytes, file.others)
                    step.payload = str(made.path), str(made.target), made.token
            path, target, token = step.payloads[0]
            staging = folders.Staging(Path(path), Path(target), token)
            with self.ranks.step("reaching the folder", name=self.folder):
                folders.check_seen(staging)
            yield staging
        except BaseException:  # of any rank: all have stopped writing
            if made is not None:
                folders.discard(made)
            raise

    def _write(self, planned: _Planned, staging: folders.Staging) -> None:
        report, total = self.report, total_bytes(planned.writes)
        paths = [staging.path / file.name for file in planned.files]

        def progress() -> Progress:
            written = f"{share(writer.written_bytes, total)} written"
            return Progress(writer.written_bytes + writer.num_synced, f"{written}, {writer.num_synced} files synced")

        def on_bytes(num_bytes: int) -> None:
            update(num_bytes)
            self.ranks.check()

        bar = progress_bar(total, "Saving partitions", self.progress, self.ranks.rank)
        with bar as update, Writer(paths, on_bytes) as writer:
            todo = _in_turn(dict(_by_parameter(planned.writes)), len(planned.files), self.ranks)
            self._write_gathered(planned, writer, todo)
            pieces_of = self._pieces_of(planned)
            with self.ranks.step("writing", name=self.folder, progress=progress):
                with report.phase("write"):
                    for name, writes in todo.items():
                        for memory, first in pieces_of(planned.holdings[name]):
                            for write in _within(writes, memory, first):
                                writer.write(write, memory, first)
                        report.sample_memory()
                with report.phase("sync"):
                    writer.sync()
        report.written_bytes, report.num_writes = writer.written_bytes, writer.num_writes
        report.staged_bytes = writer.staged_bytes

    def _write_gathered(self, planned: _Planned, writer: Writer, todo: dict[str, list[Write]]) -> None:
        """Write the weights that can only be merged whole, one after the other, and take them out of what is to do."""
        for merge in planned.merges:
            if merge.by_rows:
                continue
            holdings = planned.holdings_of(merge)
            name = holdings[0].source.name
            with self.ranks.step(f"merging {name}", name=self.folder), self.report.phase("merge"):
                merged = merged_whole(merge, holdings)
                for holding, memory in zip(holdings, merged, strict=False):
                    for write in todo.pop(holding.source.name, ()):
                        writer.write(write, memory, 0)
                    self.report.gathered[holding.source.name] = memory.nbytes
                    self.report.sample_memory()
            self.report.num_merged += len(holdings)

    def _pieces_of(self, planned: _Planned) -> Callable[[Holding], Iterator[tuple[torch.Tensor, int]]]:
        """Return what yields what this rank writes of a weight: flat memory, and which element its first one is."""
        merges = {id(merge.parameters[0]): merge for merge in planned.merges if merge.by_rows}
        adapters: dict[int, torch.Tensor] = {}
        if merges:
            with self.ranks.step("gathering the adapters", name=self.folder) as step, self.report.phase("merge"):
                adapters = whole_adapters(merges.values())
                step.digest = f"of the adapters {digest_of_values(adapters.values())}"
            self.report.adapter_bytes = sum(tensor.nbytes for tensor in adapters.values())
            self.report.num_merged += len(merges)

        def pieces(holding: Holding) -> Iterator[tuple[torch.Tensor, int]]:
            merge = merges.get(id(holding.tensor))
            if merge is not None:
                yield from merged_pieces(merge, holding, adapters)
                return
            with holding.memory() as memory_and_first:
                yield memory_and_first

        return pieces


def _laid_out(file: saver.SavedFile, scratch: Path) -> FileLayout:
    if file.is_zip:
        return lay_out_zip(file.name, file.tensors, scratch)
    return lay_out(file.name, {key: (part.dtype, part.shape) for key, part in file.tensors.items()}, file.metadata)


def _once(file: saver.SavedFile) -> Mapping[str, Expression]:
    """Return the tensors of a file without further names of the same one, which only a zip has."""
    if not file.is_zip:
        return file.tensors
    return dict({id(part): (key, part) for key, part in file.tensors.items()}.values())


def _within(writes: Iterable[Write], memory: torch.Tensor, first: int) -> Iterator[Write]:
    """Yield the writes as far as their elements are in memory."""
    held = FlatRange(first, first + memory.numel())
    for write in writes:
        yield from write.within(held)


def _in_turn(todo: dict[str, list[Write]], num_files: int, ranks: RankGroup) -> dict[str, list[Write]]:
    """Return what is to do beginning with another file on each rank: file systems let one write to a file at a time."""
    own = ranks.rank * num_files // ranks.world_size
    later = {name: writes for name, writes in todo.items() if writes[0].file < own}
    return {name: writes for name, writes in todo.items() if name not in later} | later


def _by_parameter(writes: Sequence[Write]) -> Iterator[tuple[str, list[Write]]]:
    """Yield each parameter with its writes, which lie beside each other."""
    together: list[Write] = []
    for write in writes:
        if together and together[0].parameter != write.parameter:
            yield together[0].parameter, together
            together = []
        together.append(write)
    if together:
        yield together[0].parameter, together
