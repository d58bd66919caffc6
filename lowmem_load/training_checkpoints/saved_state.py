"""What the ranks of a job have saved: tensors that are put together from blocks, in files of one save.

A save over an earlier one that was killed leaves files of both, with equal names, sizes and shapes. torch's files have
nothing in them that tells one save from another, but their times do. Copies may have other times than their originals:
tools that do not keep them write one file after the other.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Part, fill
from lowmem_load.files.format import CheckpointFile
from lowmem_load.files.remote_file import Item, T, map_in_threads
from lowmem_load.files.source import ByteSource, read_bytes
from lowmem_load.files.stand_ins import is_stand_in, written_at
from lowmem_load.files.torch_zip import TorchObjects
from lowmem_load.planning.expression import Concat, Expression, Shape, concat, numel, reshape
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.regions import FlatRange
from lowmem_load.text import key_of

File = TypeVar("File", TorchObjects, CheckpointFile)

Saved: TypeAlias = PlannedFile | TorchObjects

OF_VERL = "huggingface"
"""Folder in a checkpoint of verl that has the model's configuration and tokenizer."""

SLACK_S = 1.0
"""Clocks of servers, and file systems that keep whole seconds."""

PATIENCE_S = 10.0
"""Ranks write at the same time. One may be this much later than all others, or as long as it takes to copy its file."""

COPIED_BYTES_PER_S = 25e6

MAX_CUTS = 128
"""Cuts within each other by which chunks are told apart. Real ones need one for each dim that is cut, of at most 64."""

_COPIES = 2
"""Number of the phase of a save that copies files."""

MAX_METADATA_NBYTES = 256 << 20
"""Bytes of a pickle of metadata: a chunk takes about 190, so this is 1.4 million chunks."""

COMPARED_BYTES = 16 << 20
"""Bytes of each of two tensors that are in memory while they are compared."""


class Files:
    """The files of one checkpoint, which the executor keeps open; `opened` has those that were opened, in order."""

    def __init__(self, folder: str, executor: Executor) -> None:
        self.folder, self.executor = folder, executor
        self.opened: list[PlannedFile] = []

    def open(self, name: str, describe: Callable[[ByteSource], File]) -> File:
        """Return what is in a file, without weights."""
        return self.open_all([name], describe)[0]

    def open_all(self, names: Sequence[str], describe: Callable[[ByteSource], File]) -> list[File]:
        """Return what is in each of some files, without weights."""
        files = self.each(lambda name: describe(self.executor.sources.opened(os.path.join(self.folder, name))), names)
        self.opened += [PlannedFile(file.path, file.nbytes, file.digest, file.version) for file in files]
        return files

    def each(self, read: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Return what is read of each item; several are read at a time where each takes a request."""
        if not is_stand_in(self.folder):
            return [read(item) for item in items]
        items, failed = list(items), dict[int, Exception]()

        def attempt(number: int) -> list[T]:
            try:
                return [read(items[number])]
            except Exception as error:  # noqa: BLE001
                failed[number] = error
                return []

        found = map_in_threads(attempt, range(len(items)), self.executor.tasks.check)
        if failed:
            raise failed[min(failed)]  # the same on all ranks
        return [one for each in found for one in each]

    def metadata(self, name: str) -> tuple[str, bytes]:
        """Return the path and the bytes of a pickle that says where elements lie."""
        path = os.path.join(self.folder, name)
        source = self.executor.sources.opened(path)
        if source.nbytes > MAX_METADATA_NBYTES:
            raise CheckpointError(f"{path}: has {source.nbytes} bytes, expected at most {MAX_METADATA_NBYTES}")
        pickled = read_bytes(source, 0, source.nbytes)
        digest = hashlib.sha256(pickled).hexdigest()[:16]
        self.opened.append(PlannedFile(path, source.nbytes, digest, source.version))
        return path, pickled

    def raw(self, name: str, nbytes: int, what: str, advice: str, digest: str = "") -> ByteSource:
        """Return a file of which another one says where elements lie, up to byte `nbytes`."""
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: is missing, with {what}; {advice}")
        source = self.executor.sources.opened(path)
        self.opened.append(PlannedFile(path, source.nbytes, digest, source.version))
        if source.nbytes < nbytes:
            raise TruncatedFileError(
                f"{path}: has {source.nbytes} bytes, {nbytes} are expected, with {what}; copy it again"
            )
        return source

    def check_one_save(self) -> None:
        """Raise CheckpointError if the files that were opened are not of one save."""
        check_written_together(self.opened)


class Tile(NamedTuple):
    """A block of a tensor: its first index along each dim, and its values, whose shape is that of the block."""

    offsets: Shape
    values: Expression


@dataclass(frozen=True, slots=True)
class BandedTensor:
    """A full tensor of a checkpoint. Its elements lie in bands, one after the other: `band` returns each by number.

    `ends` has the element at which each band ends.
    """

    shape: Shape
    dtype: torch.dtype
    ends: Sequence[int]
    band: Callable[[int], Expression]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Expression:
        """All of the tensor."""
        return reshape(self.part(FlatRange(0, self.numel))[0], self.shape)

    def part(self, elements: FlatRange) -> tuple[Expression, FlatRange]:
        """Return an expression that has these elements, and where: the bands that have some of them."""
        first = min(bisect.bisect_right(self.ends, elements.start), len(self.ends) - 1)
        last = bisect.bisect_left(self.ends, elements.end, lo=first) + 1
        start = self.ends[first - 1] if first else 0
        bands = [self.band(number) for number in range(first, last)]
        values = concat(bands, 0) if len(bands) > 1 else bands[0]
        return values, FlatRange(elements.start - start, elements.end - start)


def in_bands(whole: Expression) -> BandedTensor:
    """Return the tensor that an expression is. Its bands are the parts of a concatenation of rows."""
    parts = whole.parts if isinstance(whole, Concat) and not whole.dim else (whole,)
    return BandedTensor(whole.shape, whole.dtype, list(itertools.accumulate(map(numel, parts))), parts.__getitem__)


Entries: TypeAlias = "dict[tuple[str, ...], BandedTensor]"
"""Tensors by the keys that lead to them in the state dict that was saved."""


def assemble(what: str, shape: Shape, tiles: Iterable[Tile]) -> BandedTensor:
    """Return the tensor of `shape` that the tiles make up; of several at one place, which replicas are, the first.

    Raises CheckpointError, in which `what` names the tensor, if tiles leave a part empty or overlap.
    """
    by_place: dict[bytes, Tile] = {}
    for tile in tiles:
        by_place.setdefault(key_of((tile.offsets, tile.values.shape)), tile)
    filled = [tile for tile in by_place.values() if numel(tile.values)] or list(by_place.values())[:1]
    if not filled:
        raise CheckpointError(f"{what}: no chunk of it was saved")
    if len({tile.values.dtype for tile in filled}) > 1:
        raise CheckpointError(f"{what}: its chunks are of different dtypes")
    for tile in filled:
        ends = [start + size for start, size in zip(tile.offsets, tile.values.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"{what}: a chunk ends at {tuple(ends)}, the tensor at {shape}")
    if not math.prod(shape):
        return in_bands(reshape(filled[0].values, shape))
    return in_bands(_join(what, filled, (0,) * len(shape), shape))


def _join(what: str, tiles: Sequence[Tile], start: Shape, sizes: Shape, num_cuts: int = 0) -> Expression:
    """Return the values of the block at `start`, behind so many cuts, that the tiles make up."""
    if len(tiles) == 1 and (tiles[0].offsets, tiles[0].values.shape) == (start, sizes):
        return tiles[0].values
    for dim in range(len(sizes)):
        groups = _cut(what, tiles, start, sizes, dim)
        if len(groups) == 1:
            continue
        if num_cuts == MAX_CUTS:
            raise CheckpointError(f"{what}: its chunks lie as no save places them, more than {MAX_CUTS} in each other")
        parts = []
        bounds = [*(group[0].offsets[dim] for group in groups), start[dim] + sizes[dim]]
        for group, (first, end) in zip(groups, itertools.pairwise(bounds), strict=True):
            inner_start = (*start[:dim], first, *start[dim + 1 :])
            inner_sizes = (*sizes[:dim], end - first, *sizes[dim + 1 :])
            parts.append(_join(what, group, inner_start, inner_sizes, num_cuts + 1))
        return concat(parts, dim)
    raise CheckpointError(f"{what}: its chunks overlap, or leave a part of the block at {start} of shape {sizes} empty")


def _cut(what: str, tiles: Sequence[Tile], start: Shape, sizes: Shape, dim: int) -> list[list[Tile]]:
    """Return the tiles in groups along a dim, in order, between which no tile reaches. Raise where they leave a gap."""
    groups: list[list[Tile]] = []
    end = start[dim]
    for tile in sorted(tiles, key=lambda tile: tile.offsets[dim]):
        first, last = tile.offsets[dim], tile.offsets[dim] + tile.values.shape[dim]
        if not groups or first >= end:
            if first != end:
                raise CheckpointError(f"{what}: indices {end} to {first} of dim {dim} are in no chunk")
            groups.append([])
        groups[-1].append(tile)
        end = max(end, last)
    if end != start[dim] + sizes[dim]:
        raise CheckpointError(f"{what}: indices {end} to {start[dim] + sizes[dim]} of dim {dim} are in no chunk")
    return groups


def read_chunks(
    name: str, tensor: BandedTensor, span: FlatRange, executor: Executor, buffer: torch.Tensor
) -> Generator[tuple[torch.Tensor, FlatRange], None, None]:
    """Yield elements of a tensor chunk by chunk, each with its range and overwritten by the next."""
    memory = buffer.view(tensor.dtype)
    for start in range(span.start, span.end, memory.numel()):
        elements = FlatRange(start, min(start + memory.numel(), span.end))
        chunk = memory[: elements.numel]
        fill([Part(name, *tensor.part(elements), chunk)], executor)
        yield chunk, elements


def are_equal(name: str, one: Expression, other: Expression, executor: Executor) -> bool:
    """Return whether two tensors of a checkpoint have the same bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    span, buffers = FlatRange(0, numel(one)), torch.empty(2, COMPARED_BYTES, dtype=torch.uint8, device="cpu")
    pairs = zip(
        read_chunks(name, in_bands(one), span, executor, buffers[0]),
        read_chunks(name, in_bands(other), span, executor, buffers[1]),
        strict=True,
    )
    return all(torch.equal(mine.view(torch.uint8), its.view(torch.uint8)) for (mine, _), (its, _) in pairs)


def own_files(folder: str, names: Iterable[str]) -> list[str]:
    """Return the paths of those of the files that a checkpoint's folder has.

    Raises CheckpointError for a link that leads out of it: whoever made the folder may have chosen a private file.
    """
    paths = [path for path in (os.path.join(folder, name) for name in names) if os.path.isfile(path)]
    root = os.path.realpath(folder.removesuffix(f"{os.sep}{OF_VERL}"))
    if match := re.match(r"(.*/models--[^/]+)/snapshots/[^/]+(?:/|$)", f"{root}/"):
        root = match[1]  # in the Hub's cache all files are links to its blobs
    for path in paths:
        if os.path.commonpath((root, os.path.realpath(path))) != root:
            raise CheckpointError(
                f"{path}: is a link to a file outside of its folder; copy that file there, or remove it"
            )
    return paths


# -- whether one save has written the files ----------------------------------------------------------------------------


def check_written_before(last: PlannedFile, files: Sequence[PlannedFile]) -> None:
    """Raise CheckpointError if some files were written before the one that a save writes last, and some after it.

    Tools upload files in any order, so in a store these have only to be written together.
    """
    end = _when(last.path)
    times = {file.path: _when(file.path) for file in files}
    later = [path for path, when in times.items() if when > end + SLACK_S]
    if later and any(when < end for when in times.values()):
        if is_stand_in(last.path):
            check_written_together([last, *files])
            return
        raise _of_two_saves(later[0], times[later[0]], last.path, end, f"touch {last.path}")


def check_written_together(files: Iterable[Saved], then: Sequence[Saved] = (), copies: Iterable[Saved] = ()) -> None:
    """Raise CheckpointError if ranks have written their files at times that are too far apart.

    A save may write files `then`, however long it takes to compute their content, and last `copies` of other files,
    whose times they may have kept. A save that is killed has replaced some of `files`, so files `then` may be as far
    apart as one disk takes for all of them. S3 says of large files when their upload began: that of the one before may
    have taken the time.
    """
    nbytes_then = sum(file.nbytes for file in then)
    phases = [(file, number) for number, of_phase in enumerate((files, then, copies)) for file in of_phase]
    written = sorted((_when(file.path, phase), phase, file.path, file.nbytes) for file, phase in phases)
    for (before, previous, earlier, nbytes_before), (when, phase, path, nbytes) in itertools.pairwise(written):
        slowest = nbytes_then if phase else max(nbytes, nbytes_before * is_stand_in(path))
        patience_s = PATIENCE_S + slowest / COPIED_BYTES_PER_S
        if phase <= previous and phase != _COPIES and when - before > patience_s:
            folder = os.path.dirname(next(file.path for file, phase in phases if not phase))
            has_copies = any(phase == _COPIES for _, phase in phases)
            command = f"find {folder} -exec touch {{}} +" if has_copies else f"touch {folder}/*"
            raise _of_two_saves(path, when, earlier, before, command)


def _when(path: str, phase: int = 0) -> float:
    if (written := written_at(path)) is not None:
        return written
    status = os.stat(path)
    # A copy has come into its folder at the time of its inode, which no tool can keep.
    return max(status.st_mtime, status.st_ctime) if phase == _COPIES else status.st_mtime


def _of_two_saves(later: str, when: float, earlier: str, before: float, command: str) -> CheckpointError:
    command = "upload them all again" if is_stand_in(later) else command
    return CheckpointError(
        f"{later}: was written at {_shown(when)}, {os.path.basename(earlier)} at {_shown(before)}: a save over an "
        "earlier one did not end; take another checkpoint. If these are of one save, and were copied without their "
        f"times: {command}"
    )


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
