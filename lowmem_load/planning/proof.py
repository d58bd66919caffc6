"""Proves that a list of copies covers a destination exactly once: nothing left out, nothing written twice. Pure.

[Note: proof by rows] Copies that do not interleave are runs, and sorting them shows gaps and overlaps. Copies that
interleave are cut into rows as long as their largest stride. Rows in which the same copies write the same places are
alike, so one of them is proved for all, and in it every copy has lost the loop that goes from row to row; again and
again, until only runs are left. The cost depends on the number of copies and not on the number of elements. Copies
that cannot be cut so, because their strides do not divide each other, are proved on a bitmap, a window at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lowmem_load.errors import PlanError

PROOF_CELLS = 1 << 24
"""Cells of one window of a bitmap, one byte each: what a proof takes in memory. Larger bitmaps take more windows."""


class Written(Protocol):
    """The destination side of a copy: element `destination_start + sum(t * destination_strides)` for all `t < sizes`.

    Of the loops, each stride must be at least as long as what the loops of smaller strides reach over.
    """

    @property
    def destination_start(self) -> int: ...  # noqa: D102

    @property
    def sizes(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def destination_strides(self) -> tuple[int, ...]: ...  # noqa: D102


class _Loop(NamedTuple):
    size: int
    stride: int


class _Piece(NamedTuple):
    """Elements `start + sum(t * stride)`; largest stride first, none of size 1, none that could be one with the next.

    Each stride is at least as long as the extent of the loops after it, so the elements come in ascending order.
    """

    start: int
    loops: tuple[_Loop, ...]

    @property
    def end(self) -> int:
        return self.start + _extent(self.loops)

    @property
    def is_run(self) -> bool:
        return not self.loops or self.loops[0].stride == 1


class _Lane(NamedTuple):
    """A piece that every row of `[first_row, end_row)` holds; its start counts from the start of the row."""

    first_row: int
    end_row: int
    piece: _Piece


class _Range(NamedTuple):
    """Elements `[start, end)`, which the pieces, all inside, should cover once."""

    pieces: Sequence[_Piece]
    start: int
    end: int


def prove_coverage(name: str, copies: Sequence[Written], numel: int) -> None:
    """Check that the copies write each of the elements `[0, numel)` of a destination exactly once.

    Exact at any size. See [Note: proof by rows] for the cost.

    Raises:
        PlanError: elements are left out, written twice, or lie outside (the message names the first that were found),
            or the loops of a copy run into each other, which those of a planned copy never do.
    """
    if len(copies) == 1 and _is_one_run(copies[0], numel):  # as of most parameters
        return
    pieces = [_piece(name, copy, numel) for copy in copies if 0 not in copy.sizes]
    proofs = [_prove(name, _Range(pieces, 0, numel))]
    while proofs:  # innermost last; no recursion, as the copies decide how deep it goes
        row = next(proofs[-1], None)
        if row is None:
            proofs.pop()
        else:
            proofs.append(_prove(name, row))


def _is_one_run(copy: Written, numel: int) -> bool:
    return copy.destination_start == 0 and copy.sizes == (numel,) and copy.destination_strides == (1,)


def _prove(name: str, elements: _Range) -> Iterator[_Range]:
    """Prove one range; yield the rows that must be proved besides, each before it goes on to what lies after them."""
    position = elements.start
    for group in _groups(elements.pieces):
        start, end = group[0].start, max(piece.end for piece in group)
        if start > position:
            raise PlanError(f"{name}: elements [{position}, {start}) are not covered")
        if not all(piece.is_run for piece in group):
            rows = _rows(group, start, end)
            if rows is None:
                _prove_on_bitmap(name, _Range(group, start, end))
            else:
                yield from rows
        elif len(group) > 1:
            overlap = group[1].start, min(group[0].end, group[1].end)
            raise PlanError(f"{name}: elements [{overlap[0]}, {overlap[1]}) are covered twice")
        position = end
    if position < elements.end:
        raise PlanError(f"{name}: elements [{position}, {elements.end}) are not covered")


def _extent(loops: Sequence[_Loop]) -> int:
    """Return the distance from the first element to the end of the last."""
    extent = 1
    for size, stride in loops:
        extent += (size - 1) * stride
    return extent


def _piece(name: str, copy: Written, numel: int) -> _Piece:
    """Return the destination of a copy with its loops in order, and as few of them as possible."""
    loops: list[_Loop] = []
    extent = 1
    for stride, size in sorted(zip(copy.destination_strides, copy.sizes, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            raise PlanError(f"{name}: loops of a copy run into each other: {copy.sizes} by {copy.destination_strides}")
        extent += (size - 1) * stride
        if loops and stride == loops[-1].size * loops[-1].stride:
            loops[-1] = _Loop(size * loops[-1].size, loops[-1].stride)
        else:
            loops.append(_Loop(size, stride))
    if copy.destination_start < 0 or copy.destination_start + extent > numel:
        last = copy.destination_start + extent
        raise PlanError(f"{name}: a copy to [{copy.destination_start}, {last}) leaves the {numel} elements")
    return _Piece(copy.destination_start, tuple(reversed(loops)))


def _groups(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield, in order, the pieces that no cut through the whole range keeps apart."""
    group: list[_Piece] = []
    end = 0
    for piece in sorted(pieces):
        if group and piece.start >= end:
            yield group
            group = []
        group.append(piece)
        end = max(end, piece.end)
    if group:
        yield group


def _rows(group: Sequence[_Piece], start: int, end: int) -> Iterator[_Range] | None:
    """Return one row of each kind that `[start, end)` has, or None if the group does not fall into rows."""
    length = max(piece.loops[0].stride for piece in group if piece.loops)
    lanes: list[_Lane] = []
    for piece in group:
        cut = _lanes(piece._replace(start=piece.start - start), length)
        if cut is None:
            return None
        lanes += cut
    return _kinds_of_rows(lanes, length, start, end)


def _lanes(piece: _Piece, length: int) -> list[_Lane] | None:
    """Cut a piece into rows of `length` elements; None if more than its outermost loop would have to be cut."""
    row, column = divmod(piece.start, length)
    if column + _extent(piece.loops) <= length:
        return [_Lane(row, row + 1, _Piece(column, piece.loops))]
    (size, stride), inner = piece.loops[0], piece.loops[1:]
    if length % stride or column % stride + _extent(inner) > stride:
        return None
    per_row = length // stride
    head = -(-(length - column) // stride)
    whole, tail = divmod(size - head, per_row)
    lanes = [_Lane(row, row + 1, _Piece(column, _around(_Loop(head, stride), inner)))]
    row, column = row + 1, column % stride
    if whole:
        lanes.append(_Lane(row, row + whole, _Piece(column, _around(_Loop(per_row, stride), inner))))
    if tail:
        lanes.append(_Lane(row + whole, row + whole + 1, _Piece(column, _around(_Loop(tail, stride), inner))))
    return lanes


def _around(loop: _Loop, inner: tuple[_Loop, ...]) -> tuple[_Loop, ...]:
    return inner if loop.size == 1 else (loop, *inner)


def _kinds_of_rows(lanes: Sequence[_Lane], length: int, start: int, end: int) -> Iterator[_Range]:
    """Yield, for each set of pieces that a row of `[start, end)` holds, the first such row.

    Only the last row may be shorter. None that is proved whole is like it: its pieces would reach beyond `end`.
    """
    waiting = sorted(lanes, reverse=True)
    active: list[_Lane] = []
    known = set()
    for row in sorted({row for lane in lanes for row in (lane.first_row, lane.end_row)})[:-1]:
        active = [lane for lane in active if lane.end_row > row]
        while waiting and waiting[-1].first_row == row:
            active.append(waiting.pop())
        pieces = tuple(sorted(lane.piece for lane in active))
        if pieces not in known:
            known.add(pieces)
            base = start + row * length
            here = [piece._replace(start=base + piece.start) for piece in pieces]
            yield _Range(here, base, min(base + length, end))


def _prove_on_bitmap(name: str, elements: _Range) -> None:
    """Mark what each piece writes. A cell of the bitmap stands for as many elements as no piece tells apart."""
    granule = math.gcd(*(part for piece in elements.pieces for part in _granule_parts(piece, elements.start)))
    pieces = [
        _Piece((piece.start - elements.start) // granule, _scaled(piece.loops, granule)) for piece in elements.pieces
    ]
    cells = (elements.end - elements.start) // granule
    for window in range(0, cells, PROOF_CELLS):
        seen = np.zeros(min(PROOF_CELLS, cells - window), dtype=np.bool_)
        for piece in pieces:
            for part in _clipped(piece, window, window + len(seen)):
                sizes, strides = tuple(size for size, _ in part.loops), tuple(stride for _, stride in part.loops)
                written = np.lib.stride_tricks.as_strided(seen[part.start - window :], sizes, strides)
                if written.any():
                    t = np.unravel_index(int(np.argmax(written)), sizes)
                    cell = part.start + sum(int(i) * stride for i, stride in zip(t, strides, strict=True))
                    first = elements.start + cell * granule
                    raise PlanError(f"{name}: elements [{first}, {first + granule}) are covered twice")
                written[...] = True
        if not seen.all():
            gap = int(np.argmin(seen))
            size = int(np.argmax(seen[gap:])) or len(seen) - gap
            first = elements.start + (window + gap) * granule
            raise PlanError(f"{name}: elements [{first}, {first + size * granule}) are not covered")


def _granule_parts(piece: _Piece, start: int) -> Iterator[int]:
    """Yield the numbers that a common granule of elements must divide."""
    yield piece.start - start
    yield from (stride for _, stride in piece.loops if stride != 1)
    yield piece.loops[-1].size if piece.loops and piece.loops[-1].stride == 1 else 1


def _scaled(loops: tuple[_Loop, ...], granule: int) -> tuple[_Loop, ...]:
    scaled = (_Loop(size // granule, 1) if stride == 1 else _Loop(size, stride // granule) for size, stride in loops)
    return tuple(loop for loop in scaled if loop.size > 1)


def _clipped(piece: _Piece, start: int, end: int) -> Iterator[_Piece]:
    """Yield pieces, at most two per loop, that are together the elements of `piece` inside `[start, end)`."""
    if piece.end <= start or piece.start >= end:
        return
    if piece.start >= start and piece.end <= end:
        yield piece
        return
    (size, stride), inner = piece.loops[0], piece.loops[1:]
    first = max(0, -(-(start - piece.start) // stride))
    last = min(size, (end - _extent(inner) - piece.start) // stride + 1)
    if first < last:
        yield _Piece(piece.start + first * stride, _around(_Loop(last - first, stride), inner))
    for t in {first - 1, last}:  # those that a border of the window may cut
        if 0 <= t < size:
            yield from _clipped(_Piece(piece.start + t * stride, inner), start, end)
