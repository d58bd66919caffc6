"""Files: all ranks write one folder together. They plan, agree, write, agree and rename.

[Note: the plan read backwards] A load asks which bytes of files fill a rank's partition. A save asks which bytes of
files a rank's partition fills. `plan_copies` answers the first half for both: it describes every tensor of a file as
copies from parameters. They are equal on all ranks, and are proved to cover each tensor once. A rank takes the part of
each copy whose elements it owns. Ranks own disjoint regions that together are the parameter, so exactly one rank
writes each byte. The ranks add up their bytes to check that.

[Note: pages of two nodes] Ranges of two nodes meet within a page. Where a client of NFS has the page, because somebody
has read the file there, it sends all of it when a part is written, and undoes what another node wrote to the rest. With
O_DIRECT it sends the bytes that are written; NFS and FUSE need no alignment for that. Source: Linux 6.1
`fs/nfs/write.c`, `nfs_can_extend_write`. Two clients of NFS 3 and 4.2 lost bytes without O_DIRECT, none with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lowmem_load.distributed.nodes import node_name
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, PlanError, listed
from lowmem_load.files.mounts import has_caches_apart
from lowmem_load.phases import Phases, Progress, progress_bar
from lowmem_load.planning.expression import Shape, Source
from lowmem_load.planning.nest import Nest, nests_within, offsets
from lowmem_load.planning.regions import FlatRange, Region
from lowmem_load.text import share, size
from lowmem_load.weights_out import folder as folders
from lowmem_load.weights_out.file_layout import FileLayout, digest_of_files, lay_out
from lowmem_load.weights_out.send import delivery, gather_elements, name_tensor_pairs
from lowmem_load.weights_out.weights import Weights

STAGING_BYTES = 8 << 20
"""Bytes of the one buffer for elements that are cast, rearranged or on a device."""

DIRECT_BYTES = 64 << 20
"""Most bytes of one write straight from a partition, so that the progress bar moves."""


@dataclass(slots=True)
class SaveReport(Phases):
    """What one save did on one rank.

    Attributes:
        folder: where the files are.
        files: bytes of each file of weights, by its name.
        rank, world_size: of the ranks that saved together.
        written_bytes: bytes of weights that this rank wrote. All ranks together wrote the data of the files.
        staged_bytes: those of `written_bytes` that went through a buffer of 8 MiB, because they were cast, rearranged
            or on a device. The others were written straight from the partitions.
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
            *([f"made of {self.source}"] if self.source else []),
            f"wrote {size(self.written_bytes)}, {size(self.staged_bytes)} through a buffer",
            f"peak {size(self.peak_memory.total_bytes)} above the start",
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()),
        ]
        if self.left_out:
            lines.append(f"left out {len(self.left_out)} tensors: {listed(self.left_out, 3)}")
        if self.num_masters:
            lines.append(f"{self.num_masters} parameters as the optimizer's fp32 values")
        if self.num_merged:
            lines.append(f"{self.num_merged} layers merged with their adapters, put together one at a time")
        return "\n  ".join(lines)


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
    with ranks.session(title), tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        scratch, report = Path(made), SaveReport(os.fspath(folder), rank=ranks.rank, world_size=ranks.world_size)
        with ranks.step("planning the save", name=report.folder) as step, report.phase("plan"):
            target = folders.find_target(report.folder)
            weights = describe(scratch)
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
            step.digest["files"] = listed([f"{file.name} ({file.nbytes} bytes)" for file in files])
            step.digest["headers of the files"] = digest_of_files(files)
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
        with _shared_staging(ranks, report, files, targets) as staging:
            paths = [staging.path / file.name for file in files]
            past_cache = len(set(nodes)) > 1 and has_caches_apart(target)
            # Each rank begins with another file: file systems let one rank write at a time.
            first = ranks.rank * len(files) // ranks.world_size
            todo = dict(sorted(writes.items(), key=lambda item: item[1][0].file < first))
            _write_files(ranks, report, weights, todo, own_bytes, paths, past_cache=past_cache)
            with ranks.step("renaming", name=report.folder), report.phase("rename"):
                if ranks.rank == 0:
                    folders.add_files(staging, scratch)
                    folders.commit(staging)
    return report


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
    todo: dict[str, list[Write]],
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


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of one parameter (or buffer) that go to a tensor of a file."""

    file: int  # its number
    start: int  # first byte of the tensor in the file
    dtype: torch.dtype  # that of the tensor
    shape: Shape  # that of the parameter
    nest: Nest  # from the full parameter to the tensor; from the memory of a region for the parts `within` that

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.nest.numel * self.dtype.itemsize

    def within(self, region: Region) -> Iterator[Write]:
        """Yield the parts of this write whose elements of the parameter lie in a region."""
        for nest in nests_within(self.nest, region, self.shape):
            yield replace(self, nest=nest)


def plan_writes(files: Sequence[FileLayout]) -> dict[str, list[Write]]:
    """Return what all ranks write together, by parameter.

    It is in the order of the files: file systems are fastest if offsets ascend.
    """
    writes: dict[str, list[Write]] = {}
    for number, layout in enumerate(files):
        for start, tensor in layout.tensors:
            for copy in tensor.copies:
                if isinstance(copy.leaf, Source):
                    one = Write(number, start, tensor.dtype, copy.leaf.shape, copy.nest)
                    writes.setdefault(copy.leaf.name, []).append(one)
    return writes


class Writer(contextlib.AbstractContextManager["Writer"]):
    """Writes into files that have their full length already, one open at a time. Raises CheckpointError.

    `on_bytes` is called after each write with the number of bytes. The counts are those of `SaveReport`; `num_synced`
    files have reached the disk. With `past_cache`, other nodes may write into the same pages; see [Note: pages of two
    nodes].
    """

    def __init__(self, paths: Sequence[Path], on_bytes: Callable[[int], object], *, past_cache: bool = False) -> None:
        self._paths, self._on_bytes = paths, on_bytes
        self._past_cache = past_cache
        self._opened: tuple[int, int] | None = None  # number and descriptor of a file
        self._written: set[int] = set()
        self._staging: torch.Tensor | None = None
        self.written_bytes = self.staged_bytes = self.num_synced = 0

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):  # `sync` has raised if anything was lost
                os.close(self._opened[1])

    def write_parts(self, writes: Iterable[Write], memory: torch.Tensor, region: Region) -> None:
        """Write the parts of some writes that lie in a region of their parameter, which `memory` has, flat."""
        for write in writes:
            for part in write.within(region):
                self._write(part, memory)

    def _write(self, write: Write, memory: torch.Tensor) -> None:
        nest, itemsize = write.nest, write.dtype.itemsize
        is_in_order = nest.gathered().axes == nest.axes
        if is_in_order and {memory.dtype, *nest.casts} == {write.dtype} and memory.device.type == "cpu":
            self._put_runs(write, nest, memory[nest.source : nest.source + nest.numel])
            return
        if self._staging is None:
            on_device = memory.device.type != "cpu" and torch.accelerator.is_available()
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=on_device)
        for part in nest.split(max(1, STAGING_BYTES // itemsize)):
            staged = self._staging[: part.numel * itemsize].view(write.dtype)
            gather_elements(part, memory, staged)
            self.staged_bytes += part.numel * itemsize
            self._put_runs(write, part, staged)

    def _put_runs(self, write: Write, part: Nest, elements: torch.Tensor) -> None:
        """Write the elements of a part of a write, in the order of its axes."""
        run, inner = 1, len(part.axes)  # the length of a run, and how many axes are outside of it
        while inner and part.axes[inner - 1].destination == run:
            run *= part.axes[inner - 1].size
            inner -= 1
        for number, (_, shift) in enumerate(offsets(part.axes[:inner])):
            offset = write.start + (part.destination + shift) * write.dtype.itemsize
            self._put(write.file, elements[number * run : (number + 1) * run], offset)

    def sync(self) -> None:
        """Have all that was written reach the disk."""
        for number in sorted(self._written):
            with self._named(number):
                os.fsync(self._descriptor(number))
            self.num_synced += 1

    def _put(self, number: int, elements: torch.Tensor, offset: int) -> None:
        """Write a flat, contiguous host tensor from a byte of file `number` on."""
        data = memoryview(elements.view(torch.uint8).numpy().data)
        while data:
            with self._named(number):
                count = os.pwrite(self._descriptor(number), data[:DIRECT_BYTES], offset)
            self.written_bytes += count
            self._on_bytes(count)
            data, offset = data[count:], offset + count

    def _descriptor(self, number: int) -> int:
        if self._opened is None or self._opened[0] != number:
            if self._opened is not None:
                (previous, descriptor), self._opened = self._opened, None
                with self._named(previous):
                    os.close(descriptor)
            direct = os.O_DIRECT if self._past_cache else 0
            self._opened = number, os.open(self._paths[number], os.O_WRONLY | os.O_CLOEXEC | direct)
            self._written.add(number)
        return self._opened[1]

    @contextlib.contextmanager
    def _named(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = ""
            if self._past_cache and error.errno == errno.EINVAL:
                advice = (
                    ". Its file system refuses O_DIRECT, without which nodes may undo each other's writes; save to "
                    "Lustre, GPFS, CephFS or NFS, or from one node"
                )
            raise CheckpointError(f"{self._paths[number]}: cannot be written: {error}{advice}") from error
