"""Files of weights: where each tensor lies, what each rank writes of it, and how.

A safetensors file is laid out as safetensors itself does it (0.8.0, `safetensors/src/tensor.rs`, `prepare`): tensors of
the widest dtypes come first, those of one dtype by name, so that all are aligned. The header is padded with spaces to 8
bytes.

[Note: pages of two nodes] Ranges of two nodes meet within a page. Where a client of NFS has the page, because somebody
has read the file there, it sends all of it when a part is written, and undoes what another node wrote to the rest. With
O_DIRECT it sends the bytes that are written; NFS and FUSE need no alignment for that. Source: Linux 6.1
`fs/nfs/write.c`, `nfs_can_extend_write`. Two clients of NFS 3 and 4.2 lost bytes without O_DIRECT, none with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.files.safetensors import BITS, CODES, METADATA, PACKED
from lowmem_load.models.saver import SavedFile
from lowmem_load.planning.expression import Held, Shape, Source, numel
from lowmem_load.planning.nest import Copy, Nest, nests_within, offsets
from lowmem_load.planning.regions import Region
from lowmem_load.weights_out.buckets import PlannedTensor
from lowmem_load.weights_out.send import gather_elements
from lowmem_load.weights_out.weights import needs_gathering, plan_tensor

STAGING_BYTES = 8 << 20
"""Bytes of the one buffer for elements that are cast, rearranged or on a device."""

DIRECT_BYTES = 64 << 20
"""Most bytes of one write straight from a partition, so that the progress bar moves."""

WRITEBACK_BYTES = 32 << 20
"""Bytes that a rank writes into the page cache before it has the disk begin with them."""

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

_ORDER = {code: number for number, code in enumerate(BITS)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one file of weights."""

    name: str  # its path in the folder, with "/"
    header: bytes
    nbytes: int  # of the file
    tensors: Sequence[tuple[int, PlannedTensor]] = ()  # each after the byte where it starts, in the order of the file
    constants: Mapping[int, bytes] = field(default_factory=dict)  # such as padding, by offset

    def __str__(self) -> str:
        """Return all that decides what lies where."""
        return f"{self.name} {self.nbytes} {self.header!r} {sorted(self.constants.items())}"


def lay_out(file: SavedFile) -> FileLayout:
    """Return the layout of a safetensors file; raise UnsupportedError if it cannot have the dtype of a tensor."""
    name, tensors = file.name, file.tensors
    for key, part in tensors.items():
        if part.dtype not in CODES or (CODES[part.dtype] in PACKED and not part.shape):
            raise UnsupportedError(
                f"{name}: {key} is {part.shape} of {part.dtype}, which a safetensors file cannot have"
            )
    if wrong := [key for key in tensors if key == METADATA or key != key.encode(errors="ignore").decode()]:
        raise UnsupportedError(f"{name}: {wrong[0]!a} cannot be a name in a safetensors file; rename that tensor")

    def place(key: str) -> tuple[int, bytes]:
        return -_ORDER[CODES[tensors[key].dtype]], key.encode()

    entries: dict[str, object] = {METADATA: dict(file.metadata)} if file.metadata else {}
    starts: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=place):
        shape, code = tensors[key].shape, CODES[tensors[key].dtype]
        starts[key], end = end, end + numel(tensors[key]) * tensors[key].dtype.itemsize
        in_file = [*shape[:-1], shape[-1] * PACKED[code]] if code in PACKED else list(shape)
        entries[key] = {"dtype": code, "shape": in_file, "data_offsets": [starts[key], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    planned = [(len(header) + starts[key], plan_tensor(key, tensors[key], name)) for key in starts]
    return FileLayout(name, header, len(header) + end, planned, dict(_constants(name, planned)))


def _constants(file: str, tensors: Iterable[tuple[int, PlannedTensor]]) -> Iterator[tuple[int, bytes]]:
    for start, tensor in tensors:
        for copy in tensor.copies:
            leaf, nest = copy.leaf, copy.nest
            if isinstance(leaf, Held):
                if not nest.is_run or nest.casts:
                    raise needs_gathering(f"{file}: {tensor.name}", leaf)
                values = leaf.flat[nest.source - leaf.first :][: nest.numel]
                yield start + nest.destination * tensor.dtype.itemsize, values.view(torch.uint8).numpy().tobytes()


def cut(file: FileLayout, most_bytes: int) -> Iterator[PlannedTensor]:
    """Yield the data of a file in order, as flat tensors of at most so many bytes."""
    for dtype, group in itertools.groupby((tensor for _, tensor in file.tensors), lambda tensor: tensor.dtype):
        most = most_bytes // dtype.itemsize
        copies, filled = list[Copy](), 0
        for tensor in group:
            done, size = 0, math.prod(tensor.shape)
            while done < size:
                end = min(size, done + most - filled)
                for copy in tensor.copies:
                    for part in copy.nest.clipped(done, end, "destination"):
                        copies.append(Copy(copy.leaf, part.shifted(destination=filled - done)))
                filled, done = filled + end - done, end
                if filled == most:
                    yield PlannedTensor(file.name, (filled,), dtype, tuple(copies))
                    copies, filled = [], 0
        if filled:
            yield PlannedTensor(file.name, (filled,), dtype, tuple(copies))


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
        self._num_waiting = 0  # bytes that were written since the disk was last told to begin
        library = None if past_cache else ctypes.CDLL(None, use_errno=True)
        self._sync_file_range = getattr(library, "sync_file_range", None)
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
            self._begin_writeback(number, count)
            self._on_bytes(count)
            data, offset = data[count:], offset + count

    def _begin_writeback(self, number: int, count: int) -> None:
        """Count bytes of file `number`; have the disk begin with all that the page cache has of it if they are enough.

        Otherwise Linux lets the disk wait until a tenth of the memory is to be written, or `sync` is called.
        """
        self._num_waiting += count
        if self._sync_file_range is None or self._num_waiting < WRITEBACK_BYTES:
            return
        self._num_waiting = 0
        start = length = ctypes.c_int64(0)  # this length means: to the end of the file
        with self._named(number):
            if self._sync_file_range(self._descriptor(number), start, length, _SYNC_FILE_RANGE_WRITE):
                code = ctypes.get_errno()
                if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # the others say that there is no such call here
                    raise OSError(code, os.strerror(code))

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
