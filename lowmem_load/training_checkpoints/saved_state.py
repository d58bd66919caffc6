"""What the ranks of a job have saved: tensors that are put together from blocks, in files of one save.

A save over an earlier one that was killed leaves files of both, with equal names, sizes and shapes. torch's files have
nothing in them that tells one save from another, but their times do. Copies may have other times than their originals:
tools that do not keep them write one file after the other.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Part, fill
from lowmem_load.planning.expression import Concat, Expression, Shape, concat, numel, reshape
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.regions import FlatRange
from lowmem_load.text import key_of

SLACK_S = 1.0
"""Clocks of servers, and file systems that keep whole seconds."""

PATIENCE_S = 10.0
"""Ranks write at the same time. One may be this much later than all others, or as long as it takes to copy its file."""

COPIED_BYTES_PER_S = 25e6

COMPARED_BYTES = 16 << 20
"""Bytes of each of two tensors that are in memory while they are compared."""


class Tile(NamedTuple):
    """A block of a tensor: its first index along each dim, and its values, whose shape is that of the block."""

    offsets: Shape
    values: Expression


@dataclass(frozen=True, slots=True)
class TiledTensor:
    """A tensor that is put together from tiles: `whole` is all of it."""

    whole: Expression

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.whole.dtype

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return numel(self.whole)

    def part(self, elements: FlatRange) -> tuple[Expression, FlatRange]:
        """Return an expression that has these elements, and where: the bands of rows that hold some of them."""
        whole = self.whole
        if not isinstance(whole, Concat) or whole.dim:
            return whole, elements
        row = math.prod(whole.shape[1:])
        first = min(bisect.bisect_right(whole.ends, elements.start // row), len(whole.ends) - 1)
        last = bisect.bisect_left(whole.ends, -(-elements.end // row), lo=first) + 1
        skipped = whole.ends[first - 1] * row if first else 0
        return concat(whole.parts[first:last], 0), FlatRange(elements.start - skipped, elements.end - skipped)


@dataclass(frozen=True, slots=True)
class SavedState:
    """What the ranks of a job have saved.

    Attributes:
        folder: where the files are.
        kind: who writes such files, for messages.
        tensors: by the keys that lead to them in the state dict that was saved.
        files: all files that were opened.
        has_shapes: whether the files say how large the tensors are; else a missing last part is not noticed.
    """

    folder: str
    kind: str
    tensors: Mapping[tuple[str, ...], TiledTensor]
    files: tuple[PlannedFile, ...]
    has_shapes: bool = True


def assemble(what: str, shape: Shape, tiles: Iterable[Tile]) -> TiledTensor:
    """Return the tensor of `shape` that the tiles make up; of several at one place, which replicas are, the first.

    Raises:
        CheckpointError: tiles leave a part empty or overlap; `what` names the tensor in the message.
    """
    by_place: dict[bytes, Tile] = {}
    for tile in tiles:
        by_place.setdefault(key_of((tile.offsets, tile.values.shape)), tile)
    filled = [tile for tile in by_place.values() if numel(tile.values)] or list(by_place.values())[:1]
    if not filled:
        raise CheckpointError(f"{what}: no chunk of it was saved")
    origin = (0,) * len(shape)
    if len({tile.values.dtype for tile in filled}) > 1:
        raise CheckpointError(f"{what}: its chunks are of different dtypes")
    for tile in filled:
        ends = [start + size for start, size in zip(tile.offsets, tile.values.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"{what}: a chunk ends at {tuple(ends)}, the tensor at {shape}")
    if not math.prod(shape):
        return TiledTensor(reshape(filled[0].values, shape))
    return TiledTensor(_join(what, filled, origin, shape))


def _box(group: Sequence[Tile], start: Shape, sizes: Shape, dim: int) -> tuple[Shape, Shape]:
    """Return start and sizes of a group of the tiles of a block, as `_cut` makes it along a dim."""
    first = group[0].offsets[dim]
    size = max(tile.offsets[dim] + tile.values.shape[dim] for tile in group) - first
    return (*start[:dim], first, *start[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :])


def _join(what: str, tiles: Sequence[Tile], start: Shape, sizes: Shape) -> Expression:
    """Return the values of the block at `start` that the tiles make up."""
    if len(tiles) == 1 and (tiles[0].offsets, tiles[0].values.shape) == (start, sizes):
        return tiles[0].values
    for dim in range(len(sizes)):
        groups = _cut(what, tiles, start, sizes, dim)
        if len(groups) > 1:
            return concat([_join(what, group, *_box(group, start, sizes, dim)) for group in groups], dim)
    raise CheckpointError(f"{what}: its chunks overlap, or leave a part of the block at {start} of shape {sizes} empty")


def _cut(what: str, tiles: Sequence[Tile], start: Shape, sizes: Shape, dim: int) -> list[list[Tile]]:
    """Return the tiles in groups along a dim, between which no tile reaches. Raise where groups leave a gap."""
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


def are_equal(name: str, one: TiledTensor, other: TiledTensor, executor: Executor) -> bool:
    """Return whether two tensors of a checkpoint have the same bytes, which are read chunk by chunk."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    step = COMPARED_BYTES // one.dtype.itemsize
    for start in range(0, one.numel, step):
        elements = FlatRange(start, min(start + step, one.numel))
        chunks = [torch.empty(elements.numel, dtype=one.dtype, device="cpu") for _ in range(2)]
        values = zip((one, other), chunks, strict=True)
        fill([Part(name, *tensor.part(elements), chunk) for tensor, chunk in values], executor)
        if not torch.equal(*(chunk.view(torch.uint8) for chunk in chunks)):
            return False
    return True


# -- whether one save has written the files ----------------------------------------------------------------------------


def check_written_before(last: str, paths: Iterable[str]) -> None:
    """Raise CheckpointError if some files were written before the one that a save writes last, and some after it."""
    end = os.stat(last).st_mtime
    times = {path: os.stat(path).st_mtime for path in paths}
    later = [path for path, when in times.items() if when > end + SLACK_S]
    if later and any(when < end for when in times.values()):
        raise _of_two_saves(later[0], times[later[0]], last, end, last)


def check_written_together(paths: Iterable[str]) -> None:
    """Raise CheckpointError if ranks have written their files at times that are too far apart."""
    files = sorted((os.stat(path).st_mtime, path, os.stat(path).st_size) for path in paths)
    for (before, earlier, _), (when, path, nbytes) in itertools.pairwise(files):
        if when - before > PATIENCE_S + nbytes / COPIED_BYTES_PER_S:
            raise _of_two_saves(path, when, earlier, before, os.path.join(os.path.dirname(path), "*"))


def _of_two_saves(later: str, when: float, earlier: str, before: float, to_touch: str) -> CheckpointError:
    return CheckpointError(
        f"{later}: was written at {_shown(when)}, {os.path.basename(earlier)} at {_shown(before)}: a save over an "
        "earlier one did not end; take another checkpoint. If these are of one save, and were copied without their "
        f"times: touch {to_touch}"
    )


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
