"""What lies where in the files of a save, which rank writes which bytes, and the only code that writes weights.

A safetensors file is laid out as safetensors itself does it (0.8.0, `safetensors/src/tensor.rs`, `prepare`): tensors of
the widest dtypes come first, those of one dtype by name, so that all are aligned. The header is padded with spaces to 8
bytes.

For a file of `torch.save`, torch writes one without data (`torch.serialization.skip_data`): a sparse file of a few KiB
on the disk. Everything in it that is not a tensor's data is taken over. That includes the zip's checksum of each
storage, which is wrong. torch does not check it, but other tools that unpack such a file do.

[Note: the plan read backwards] A load asks which bytes of files fill a rank's partition. A save asks which bytes of
files a rank's partition fills. `plan_copies` answers the first half for both: it describes every tensor of a file as
copies from parameters. They are equal on all ranks, and are proved to cover each tensor once. A rank takes the part of
each copy whose elements it holds. Ranks hold disjoint ranges that together are the parameter, so exactly one rank
writes each byte. The ranks add up their bytes to check that.

[Note: pages of two nodes] Ranges of two nodes meet within a page. Where a client of NFS has the page, because somebody
has read the file there, it sends all of it when a part is written, and undoes what another node wrote to the rest. With
O_DIRECT it sends the bytes that are written; NFS and FUSE need no alignment for that. Source: Linux 6.1
`fs/nfs/write.c`, `nfs_can_extend_write`. Two clients of NFS 3 and 4.2 lost bytes without O_DIRECT, none with it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_load.errors import CheckpointError, UnsupportedError, listed
from lowmem_load.formats.safetensors import BITS, DTYPES, METADATA, PACKED
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.hf.saver import SavedFile
from lowmem_load.io.memory import source_elements
from lowmem_load.io.source import LocalFile, read_bytes
from lowmem_load.phases import Phases
from lowmem_load.planning.expression import (
    Computed,
    Elementwise,
    Expression,
    Held,
    Leaf,
    Shape,
    Source,
    leaves,
    numel,
)
from lowmem_load.planning.nest import Copy, Nest, offsets, plan_copies
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.regions import FlatRange
from lowmem_load.text import fingerprint, size

_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
_ORDER = {code: number for number, code in enumerate(BITS)}
_ALIGNMENT = 8

STAGING_BYTES = 8 << 20
"""Bytes of the one buffer for elements that are cast, rearranged or on a device."""

DIRECT_BYTES = 64 << 20
"""Most bytes of one write straight from a partition, so that the progress bar moves."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one file of weights.

    Attributes:
        name: its path in the folder, with "/". torch puts the stem into its files.
        header, others: all bytes that are not a tensor's data: the first ones, and the others by offset.
        nbytes: of the whole file.
        starts: first byte of each tensor's data, absolute in the file, by name.
        tensors: what each tensor is made of, by name. Of several names of one tensor in a zip, one is here.
    """

    name: str
    header: bytes
    nbytes: int
    starts: Mapping[str, int]
    others: Mapping[int, bytes] = field(default_factory=dict)
    tensors: Mapping[str, Expression] = field(default_factory=dict)


def lay_out_saved(file: SavedFile, scratch: Path) -> FileLayout:
    """Return the layout of a file of a save. `scratch` is a folder for temporary files."""
    if file.is_zip:
        once = {id(part): (key, part) for key, part in file.tensors.items()}
        return replace(lay_out_zip(file.name, file.tensors, scratch), tensors=dict(once.values()))
    layout = lay_out(file.name, {key: (part.dtype, part.shape) for key, part in file.tensors.items()}, file.metadata)
    return replace(layout, others=dict(_in_memory(file.tensors, layout)), tensors=file.tensors)


def _in_memory(tensors: Mapping[str, Expression], layout: FileLayout) -> Iterator[tuple[int, bytes]]:
    """Yield the values that are no parameter's, such as padding, with their offset in the file."""
    for name, expression in tensors.items():
        if any(isinstance(leaf, Held) for leaf in leaves(expression)):
            for copy in plan_copies(expression, FlatRange(0, numel(expression))):
                leaf, nest = copy.leaf, copy.nest
                if isinstance(leaf, Held) and nest.is_run and not nest.casts:
                    values = leaf.flat[nest.source - leaf.first :][: nest.numel]
                    yield _offset(layout, name, copy), values.view(torch.uint8).numpy().tobytes()


def _offset(layout: FileLayout, name: str, copy: Copy) -> int:
    return layout.starts[name] + copy.nest.destination * copy.leaf.dtype.itemsize


def lay_out(name: str, tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file; raise UnsupportedError if it cannot hold the dtype of a tensor."""
    for key, (dtype, shape) in tensors.items():
        if dtype not in _CODES or (_CODES[dtype] in PACKED and not shape):
            raise UnsupportedError(f"{name}: {key} is {shape} of {dtype}, which a safetensors file cannot hold")

    if wrong := [key for key in tensors if key == METADATA or key != key.encode(errors="ignore").decode()]:
        raise UnsupportedError(f"{name}: {wrong[0]!a} cannot be a name in a safetensors file; rename that tensor")

    def place(key: str) -> tuple[int, bytes]:
        return -_ORDER[_CODES[tensors[key][0]]], key.encode()

    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=place):
        dtype, shape = tensors[key]
        offsets[key], end = end, end + math.prod(shape) * dtype.itemsize
        code = _CODES[dtype]
        in_file = [*shape[:-1], shape[-1] * PACKED[code]] if code in PACKED else list(shape)
        entries[key] = {"dtype": code, "shape": in_file, "data_offsets": [offsets[key], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return FileLayout(name, header, len(header) + end, {key: len(header) + start for key, start in offsets.items()})


def lay_out_zip(name: str, tensors: Mapping[str, Expression], scratch: Path) -> FileLayout:
    """Return the layout of what `torch.save` writes of an `OrderedDict`. Two names of one expression are one tensor.

    Source: torch 2.6 to 2.13 `serialization.py`, `_save`.
    """
    path = scratch / Path(name).name
    with FakeTensorMode():
        made = {id(part): torch.empty(part.shape, dtype=part.dtype, device="cpu") for part in tensors.values()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(OrderedDict((key, made[id(part)]) for key, part in tensors.items()), path)
    file = LocalFile(str(path))
    try:
        described = TorchZip().describe(file)
        starts, spans = {}, {(file.nbytes, file.nbytes)}
        for key, part in tensors.items():
            data = described.expression(key)
            assert isinstance(data, Source)  # of a contiguous tensor
            starts[key] = data.start
            spans.add((data.start, data.start + math.prod(part.shape) * part.dtype.itemsize))
        others, at = {}, 0
        for start, end in sorted(spans):
            if start > at:
                others[at] = read_bytes(file, at, start - at)
            at = end
        return FileLayout(name, others.pop(0), file.nbytes, starts, others)
    finally:
        file.close()
        path.unlink()


def used_sources(files: Iterable[SavedFile]) -> set[str]:
    """Return the names of the tensors of which files are made."""
    expressions = (part for file in files for part in file.tensors.values())
    return {leaf.name for part in expressions for leaf in leaves(part) if isinstance(leaf, Source)}


def digest_of_files(files: Iterable[FileLayout]) -> str:
    """Return a fingerprint of everything that decides what lies where: names, sizes, headers."""
    return fingerprint(f"{file.name} {file.nbytes} {file.header!r} {sorted(file.others.items())}" for file in files)


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of one parameter that go to a tensor of a file: its number, and byte and dtype of the tensor in it.

    `copy` is from the whole parameter (or buffer) of the name `parameter` to the tensor.
    """

    file: int
    parameter: str
    start: int
    dtype: torch.dtype
    copy: Copy

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.copy.nest.numel * self.dtype.itemsize

    def within(self, span: FlatRange) -> Iterator[Write]:
        """Yield the parts of this write whose elements of the parameter lie in `span`."""
        for nest in self.copy.nest.clipped(span.start, span.end, "source"):
            yield replace(self, copy=replace(self.copy, nest=nest))


def plan_writes(files: Sequence[FileLayout]) -> list[Write]:
    """Return what all ranks write together, in the order of the files: file systems are fastest if offsets ascend."""
    writes: list[Write] = []
    for number, layout in enumerate(files):
        for name, expression in sorted(layout.tensors.items(), key=lambda item: layout.starts[item[0]]):
            for copy in proved_copies(f"{layout.name}: {name}", expression):
                leaf = copy.leaf
                if isinstance(leaf, Source):
                    writes.append(Write(number, leaf.name, layout.starts[name], expression.dtype, copy))
                elif _offset(layout, name, copy) not in layout.others:
                    raise _needs_gathering(f"{layout.name}: {name}", leaf)
    return writes


def proved_copies(what: str, expression: Expression) -> list[Copy]:
    """Return the copies, from parameters and values in memory, that fill a tensor once. `what` names it in errors."""
    copies = list(plan_copies(expression, FlatRange(0, numel(expression))))
    for copy in copies:
        if not isinstance(copy.leaf, Source | Held):
            raise _needs_gathering(what, copy.leaf)
    prove_coverage(what, [copy.nest for copy in copies], numel(expression))
    return copies


def _needs_gathering(what: str, leaf: Leaf) -> UnsupportedError:
    made_by = leaf.operation if isinstance(leaf, Computed | Elementwise) else getattr(leaf, "origin", leaf)
    return UnsupportedError(
        f"{what}: is made by {made_by}, which needs gathered parameters; save it with save_original_format=False, or "
        "with stage3_gather_16bit_weights_on_model_save"
    )


def own_writes(writes: Iterable[Write], owned: Mapping[str, Sequence[FlatRange]]) -> dict[str, list[Write]]:
    """Return the parts of the writes that a rank does, by parameter, given the elements that it writes of each."""
    mine: dict[str, list[Write]] = {}
    for write in writes:
        parts = [part for span in owned[write.parameter] for part in write.within(span)]
        if parts:
            mine.setdefault(write.parameter, []).extend(parts)
    return mine


def total_bytes(writes: Iterable[Write]) -> int:
    """Return how many bytes are written."""
    return sum(write.nbytes for write in writes)


class Writer:
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

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):  # `sync` has raised if anything was lost
                os.close(self._opened[1])

    def write_parts(self, writes: Iterable[Write], memory: torch.Tensor, first: int) -> None:
        """Write the parts of some writes that lie in `memory`. See `write`."""
        span = FlatRange(first, first + memory.numel())
        for write in writes:
            for part in write.within(span):
                self.write(part, memory, first)

    def write(self, write: Write, memory: torch.Tensor, first: int) -> None:
        """Write elements of a parameter. `memory` is flat; its first element is element `first` of the parameter."""
        nest, itemsize = write.copy.nest.shifted(source=-first), write.dtype.itemsize
        is_same = {memory.dtype, *nest.casts} == {write.dtype}
        if nest.is_run and is_same and memory.device.type == "cpu":
            at = write.start + nest.destination * itemsize
            self.put(write.file, memory[nest.source : nest.source + nest.numel], at)
            return
        for part in nest.split(max(1, STAGING_BYTES // itemsize)):
            staged = self._stage(part, memory, write.dtype)
            self.staged_bytes += staged.numel() * itemsize
            for first_staged, destination, run in _runs(part):
                self.put(write.file, staged[first_staged : first_staged + run], write.start + destination * itemsize)

    def sync(self) -> None:
        """Have all that was written reach the disk."""
        for number in sorted(self._written):
            with self._named(number):
                os.fsync(self._descriptor(number))
            self.num_synced += 1

    def _stage(self, part: Nest, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._staging is None:
            on_device = memory.device.type != "cpu" and torch.accelerator.is_available()
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=on_device)
        values = source_elements(part, memory)
        for cast in part.casts[:-1]:
            values = values.to(cast)
        staged = self._staging[: values.numel() * dtype.itemsize].view(dtype)
        staged.view(values.shape).copy_(values)
        return staged

    def put(self, number: int, elements: torch.Tensor, offset: int) -> None:
        """Write a flat, contiguous host tensor from a byte of file `number` on."""
        data = memoryview(elements.view(torch.uint8).numpy().data)
        while data:
            size = min(len(data), DIRECT_BYTES)
            with self._named(number):
                count = os.pwrite(self._descriptor(number), data[:size], offset)
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


def _runs(part: Nest) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a part in its file: first staged element, first element in the tensor, number of elements."""
    run, inner = 1, len(part.axes)
    while inner and part.axes[inner - 1].destination == run:
        run *= part.axes[inner - 1].size
        inner -= 1
    for number, (_, shift) in enumerate(offsets(part.axes[:inner])):
        yield number * run, part.destination + shift, run


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
            lines.append(f"{self.num_merged} layers merged with their adapters, gathered one at a time")
        return "\n  ".join(lines)
