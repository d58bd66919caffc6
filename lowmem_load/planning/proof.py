"""Proves that copies fill a destination exactly once, and that names keep tensors apart. Pure.

[Note: proof by rows] Sorted runs that follow each other show gaps and overlaps at once. Copies that interleave are cut
into rows as long as their largest stride. Two rows are alike if the same copies write the same places in both, so one
row of each kind is proved. Within it every copy has one loop less. This repeats until only runs are left. The cost
grows with the number of copies, not with the number of elements. If strides do not divide each other, copies cannot be
cut into rows; these are marked on a bitmap, part by part.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from lowmem_load.errors import CheckpointError, PlanError, listed
from lowmem_load.planning.nest import Axis, Nest, extent

K = TypeVar("K", bound=Hashable)

PROOF_CELLS = 1 << 24
"""Elements whose bitmap is in memory at a time, one byte each."""

# A piece, below, is a nest of which only the destination matters. Its axes have descending strides, none has size 1,
# and no two can be merged. Each stride is at least the extent of the axes after it, so the elements are in ascending
# order. A piece without axes is one element.


class _RowSpan(NamedTuple):
    """A piece that each of the rows `[first_row, end_row)` contains. Its destination counts from the row's start."""

    first_row: int
    end_row: int
    piece: Nest


def prove_coverage(name: str, nests: Sequence[Nest], numel: int) -> None:
    """Raise PlanError unless the nests write each of the elements `[0, numel)` exactly once."""
    if len(nests) == 1 and nests[0].destination == 0 and [axis[::2] for axis in nests[0].axes] == [(numel, 1)]:
        return  # one run, as of most parameters
    _prove(name, [_piece(name, nest, numel) for nest in nests if nest.numel], 0, numel)


def prove_names(where: str, source: Iterable[K], new_names: Mapping[K, Hashable], left_out: Collection[K] = ()) -> None:
    """Raise unless each tensor of the source has a new name of its own, or is one of those that the caller reports.

    A new name is what tells a tensor from all others in the result: with several results, a tuple of one and a name.

    Raises:
        CheckpointError: two names become one.
        PlanError: a tensor would be lost silently.
    """
    first: dict[Hashable, K] = {}
    for old, new in new_names.items():
        if (other := first.setdefault(new, old)) != old:
            raise CheckpointError(f"{where}: {_path(other)} and {_path(old)} would both become {_path(new)}")
    if lost := [_path(old) for old in source if (old in new_names) == (old in left_out)]:
        raise PlanError(f"{where}: {listed(lost)}: neither written nor reported as left out, or both")


def _path(name: Hashable) -> str:
    return ".".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _reach(axes: Sequence[Axis]) -> int:
    return extent(axes, "destination")


def _end(piece: Nest) -> int:
    return piece.destination + _reach(piece.axes)


def _in_order(pieces: Iterable[Nest]) -> list[Nest]:
    return sorted(pieces, key=lambda piece: (piece.destination, piece.axes))


def _prove(name: str, pieces: Iterable[Nest], position: int, end: int) -> None:
    """Raise unless pieces, which all lie inside, cover the elements `[position, end)` once."""
    for group in _groups(pieces):
        group_start, group_end = group[0].destination, max(map(_end, group))
        if group_start > position:
            raise PlanError(f"{name}: elements [{position}, {group_start}) are not covered")
        if any(piece.axes and piece.axes[0].destination != 1 for piece in group):
            rows = rows_of(group, group_start, group_end)
            if rows is None:
                prove_on_bitmap(name, group, group_start, group_end)
            for row in rows or ():  # at most one level for each stride of the group: a row has smaller ones
                _prove(name, *row)
        elif len(group) > 1:
            overlap = group[1].destination, min(_end(group[0]), _end(group[1]))
            raise PlanError(f"{name}: elements [{overlap[0]}, {overlap[1]}) are covered twice")
        position = group_end
    if position < end:
        raise PlanError(f"{name}: elements [{position}, {end}) are not covered")


def _piece(name: str, nest: Nest, numel: int) -> Nest:
    places = Nest(0, nest.destination, tuple(axis._replace(source=0) for axis in nest.axes)).merged()
    axes = tuple(axis for axis in places.axes if axis.size > 1)
    if any(axis.destination < _reach(axes[number + 1 :]) for number, axis in enumerate(axes)):
        raise PlanError(f"{name}: loops of a copy interleave: {nest.axes}")
    piece = Nest(0, nest.destination, axes)
    if piece.destination < 0 or _end(piece) > numel:
        raise PlanError(f"{name}: a copy writes [{piece.destination}, {_end(piece)}) of {numel} elements")
    return piece


def _groups(pieces: Iterable[Nest]) -> Iterator[list[Nest]]:
    # Each group ends before the next one starts.
    group: list[Nest] = []
    end = 0
    for piece in _in_order(pieces):
        if group and piece.destination >= end:
            yield group
            group = []
        group.append(piece)
        end = max(end, _end(piece))
    if group:
        yield group


def rows_of(group: Sequence[Nest], start: int, end: int) -> Iterator[tuple[list[Nest], int, int]] | None:
    """Return pieces, start and end of one row of each kind in a group; None if it cannot be cut into rows."""
    length = max(piece.axes[0].destination for piece in group if piece.axes)
    spans: list[_RowSpan] = []
    for piece in group:
        cut = _spans_of(piece.shifted(destination=-start), length)
        if cut is None:
            return None
        spans += cut
    return _kinds_of_rows(spans, length, start, end)


def _spans_of(piece: Nest, length: int) -> list[_RowSpan] | None:
    # Returns None if that would cut more than the outermost axis.
    row, column = divmod(piece.destination, length)
    if column + _reach(piece.axes) <= length:
        return [_RowSpan(row, row + 1, Nest(0, column, piece.axes))]
    (size, _, stride), inner = piece.axes[0], piece.axes[1:]
    if length % stride or column % stride + _reach(inner) > stride:
        return None
    per_row = length // stride
    head = -(-(length - column) // stride)
    num_full, tail = divmod(size - head, per_row)
    spans = []
    for num_rows, num_each, first in (
        (1, head, column),
        (num_full, per_row, column % stride),
        (1, tail, column % stride),
    ):
        if num_rows and num_each:
            axes = inner if num_each == 1 else (Axis(num_each, 0, stride), *inner)
            spans.append(_RowSpan(row, row + num_rows, Nest(0, first, axes)))
        row += num_rows
    return spans


def _kinds_of_rows(
    spans: Sequence[_RowSpan], length: int, start: int, end: int
) -> Iterator[tuple[list[Nest], int, int]]:
    # Only the last row may be shorter. No full row is of its kind: the pieces of a full row would end after `end`.
    waiting = sorted(spans, key=lambda span: span.first_row, reverse=True)
    active: list[_RowSpan] = []
    known = set()
    for row in sorted({row for span in spans for row in (span.first_row, span.end_row)})[:-1]:
        active = [span for span in active if span.end_row > row]
        while waiting and waiting[-1].first_row == row:
            active.append(waiting.pop())
        pieces = tuple(_in_order(span.piece for span in active))
        if pieces not in known:
            known.add(pieces)
            base = start + row * length
            yield [piece.shifted(destination=base) for piece in pieces], base, min(base + length, end)


def prove_on_bitmap(name: str, pieces: Sequence[Nest], first_element: int, end: int) -> None:
    """Check a range element by element, part by part."""
    for start in range(first_element, end, PROOF_CELLS):
        seen = np.zeros(min(PROOF_CELLS, end - start), dtype=np.bool_)
        for piece in pieces:
            for part in piece.clipped(start, start + len(seen), "destination"):
                sizes, strides = [axis.size for axis in part.axes], [axis.destination for axis in part.axes]
                written = np.lib.stride_tricks.as_strided(seen[part.destination - start :], sizes, strides)
                if written.any():
                    t = np.unravel_index(int(np.argmax(written)), sizes)
                    first = part.destination + sum(int(i) * stride for i, stride in zip(t, strides, strict=True))
                    raise PlanError(f"{name}: elements [{first}, {first + 1}) are covered twice")
                written[...] = True
        if not seen.all():
            gap = int(np.argmin(seen))
            first, size = start + gap, int(np.argmax(seen[gap:])) or len(seen) - gap
            raise PlanError(f"{name}: elements [{first}, {first + size}) are not covered")
