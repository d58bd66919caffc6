"""Proves that a list of copies covers a destination exactly once: nothing left out, nothing written twice. Pure.

[Note: proof by rows] Copies that do not interleave are runs, and sorting them shows gaps and overlaps. Copies that
interleave are cut into rows as long as their largest stride. Rows in which the same copies write the same places are
alike, so one of them is proved for all, and in it every copy has lost the loop that goes from row to row; again and
again, until only runs are left. The cost depends on the number of copies and not on the number of elements. Copies
that cannot be cut so, because their strides do not divide each other, are proved on a bitmap, a window at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lowmem_load.errors import PlanError
from lowmem_load.planning.nest import Axis, Nest, extent

PROOF_CELLS = 1 << 24
"""Cells of one window of a bitmap, one byte each: what a proof takes in memory. Larger bitmaps take more windows."""

# A piece is a nest of which only the destination counts. Its axes have descending strides, none has size 1, and none
# could be one with the next. Each stride is at least as long as the extent of the axes after it, so the elements come
# in ascending order. A single element has no axes.


class _Lane(NamedTuple):
    """A piece that every row of `[first_row, end_row)` holds; its start counts from the start of the row."""

    first_row: int
    end_row: int
    piece: Nest


class _Range(NamedTuple):
    """Elements `[start, end)`, which the pieces, all inside, should cover once."""

    pieces: Sequence[Nest]
    start: int
    end: int


def prove_coverage(name: str, nests: Sequence[Nest], numel: int) -> None:
    """Check that the destinations of the nests are each of the elements `[0, numel)` exactly once.

    Exact at any size. See [Note: proof by rows] for the cost.

    Raises:
        PlanError: elements are left out, written twice, or lie outside (the message names the first that were found),
            or the axes of a nest run into each other, which those of a planned copy never do.
    """
    if len(nests) == 1 and _is_one_run(nests[0], numel):  # as of most parameters
        return
    pieces = [_piece(name, nest, numel) for nest in nests if nest.numel]
    proofs = [_prove(name, _Range(pieces, 0, numel))]
    while proofs:  # innermost last; no recursion, as the nests decide how deep it goes
        row = next(proofs[-1], None)
        if row is None:
            proofs.pop()
        else:
            proofs.append(_prove(name, row))


def _is_one_run(nest: Nest, numel: int) -> bool:
    return nest.destination == 0 and len(nest.axes) == 1 and nest.axes[0][::2] == (numel, 1)


def _reach(axes: Sequence[Axis]) -> int:
    return extent(axes, "destination")


def _end(piece: Nest) -> int:
    return piece.destination + _reach(piece.axes)


def _is_run(piece: Nest) -> bool:
    return not piece.axes or piece.axes[0].destination == 1


def _in_order(pieces: Iterable[Nest]) -> list[Nest]:
    return sorted(pieces, key=lambda piece: (piece.destination, piece.axes))


def _prove(name: str, elements: _Range) -> Iterator[_Range]:
    """Prove one range; yield the rows that must be proved besides, each before it goes on to what lies after them."""
    position = elements.start
    for group in _groups(elements.pieces):
        start, end = group[0].destination, max(map(_end, group))
        if start > position:
            raise PlanError(f"{name}: elements [{position}, {start}) are not covered")
        if not all(map(_is_run, group)):
            rows = _rows(group, start, end)
            if rows is None:
                _prove_on_bitmap(name, _Range(group, start, end))
            else:
                yield from rows
        elif len(group) > 1:
            overlap = group[1].destination, min(_end(group[0]), _end(group[1]))
            raise PlanError(f"{name}: elements [{overlap[0]}, {overlap[1]}) are covered twice")
        position = end
    if position < elements.end:
        raise PlanError(f"{name}: elements [{position}, {elements.end}) are not covered")


def _piece(name: str, nest: Nest, numel: int) -> Nest:
    """Return the destination of a nest, as few axes as possible."""
    places = Nest(0, nest.destination, tuple(axis._replace(source=0) for axis in nest.axes)).merged()
    axes = tuple(axis for axis in places.axes if axis.size > 1)
    if any(axis.destination < _reach(axes[number + 1 :]) for number, axis in enumerate(axes)):
        raise PlanError(f"{name}: axes of a copy run into each other: {nest.axes}")
    piece = Nest(0, nest.destination, axes)
    if piece.destination < 0 or _end(piece) > numel:
        raise PlanError(f"{name}: a copy to [{piece.destination}, {_end(piece)}) leaves the {numel} elements")
    return piece


def _groups(pieces: Sequence[Nest]) -> Iterator[list[Nest]]:
    """Yield, in order, the pieces that no cut through the whole range keeps apart."""
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


def _rows(group: Sequence[Nest], start: int, end: int) -> Iterator[_Range] | None:
    """Return one row of each kind that `[start, end)` has, or None if the group does not fall into rows."""
    length = max(piece.axes[0].destination for piece in group if piece.axes)
    lanes: list[_Lane] = []
    for piece in group:
        cut = _lanes(piece.shifted(destination=-start), length)
        if cut is None:
            return None
        lanes += cut
    return _kinds_of_rows(lanes, length, start, end)


def _lanes(piece: Nest, length: int) -> list[_Lane] | None:
    """Cut a piece into rows of `length` elements; None if more than its outermost axis would have to be cut."""
    row, column = divmod(piece.destination, length)
    if column + _reach(piece.axes) <= length:
        return [_Lane(row, row + 1, Nest(0, column, piece.axes))]
    (size, _, stride), inner = piece.axes[0], piece.axes[1:]
    if length % stride or column % stride + _reach(inner) > stride:
        return None
    per_row = length // stride
    head = -(-(length - column) // stride)
    whole, tail = divmod(size - head, per_row)
    lanes = [_Lane(row, row + 1, Nest(0, column, _around(head, stride, inner)))]
    row, column = row + 1, column % stride
    if whole:
        lanes.append(_Lane(row, row + whole, Nest(0, column, _around(per_row, stride, inner))))
    if tail:
        lanes.append(_Lane(row + whole, row + whole + 1, Nest(0, column, _around(tail, stride, inner))))
    return lanes


def _around(size: int, stride: int, inner: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return inner if size == 1 else (Axis(size, 0, stride), *inner)


def _kinds_of_rows(lanes: Sequence[_Lane], length: int, start: int, end: int) -> Iterator[_Range]:
    """Yield, for each set of pieces that a row of `[start, end)` holds, the first such row.

    Only the last row may be shorter. None that is proved whole is like it: its pieces would reach beyond `end`.
    """
    waiting = sorted(lanes, key=lambda lane: lane.first_row, reverse=True)
    active: list[_Lane] = []
    known = set()
    for row in sorted({row for lane in lanes for row in (lane.first_row, lane.end_row)})[:-1]:
        active = [lane for lane in active if lane.end_row > row]
        while waiting and waiting[-1].first_row == row:
            active.append(waiting.pop())
        pieces = tuple(_in_order(lane.piece for lane in active))
        if pieces not in known:
            known.add(pieces)
            base = start + row * length
            here = [piece.shifted(destination=base) for piece in pieces]
            yield _Range(here, base, min(base + length, end))


def _prove_on_bitmap(name: str, elements: _Range) -> None:
    """Mark what each piece writes. A cell of the bitmap stands for as many elements as no piece tells apart."""
    granule = math.gcd(*(part for piece in elements.pieces for part in _granule_parts(piece, elements.start)))
    pieces = [_scaled(piece.shifted(destination=-elements.start), granule) for piece in elements.pieces]
    cells = (elements.end - elements.start) // granule
    for window in range(0, cells, PROOF_CELLS):
        seen = np.zeros(min(PROOF_CELLS, cells - window), dtype=np.bool_)
        for piece in pieces:
            for part in piece.clipped(window, window + len(seen), "destination"):
                sizes, strides = [axis.size for axis in part.axes], [axis.destination for axis in part.axes]
                written = np.lib.stride_tricks.as_strided(seen[part.destination - window :], sizes, strides)
                if written.any():
                    t = np.unravel_index(int(np.argmax(written)), sizes)
                    cell = part.destination + sum(int(i) * stride for i, stride in zip(t, strides, strict=True))
                    first = elements.start + cell * granule
                    raise PlanError(f"{name}: elements [{first}, {first + granule}) are covered twice")
                written[...] = True
        if not seen.all():
            gap = int(np.argmin(seen))
            size = int(np.argmax(seen[gap:])) or len(seen) - gap
            first = elements.start + (window + gap) * granule
            raise PlanError(f"{name}: elements [{first}, {first + size * granule}) are not covered")


def _granule_parts(piece: Nest, start: int) -> Iterator[int]:
    """Yield the numbers that a common granule of elements must divide."""
    yield piece.destination - start
    yield from (axis.destination for axis in piece.axes if axis.destination != 1)
    yield piece.axes[-1].size if piece.axes and piece.axes[-1].destination == 1 else 1


def _scaled(piece: Nest, granule: int) -> Nest:
    """Return a piece in cells of `granule` elements."""
    axes = (
        Axis(size // granule, 0, 1) if stride == 1 else Axis(size, 0, stride // granule)
        for size, _, stride in piece.axes
    )
    return Nest(0, piece.destination // granule, tuple(axis for axis in axes if axis.size > 1))
