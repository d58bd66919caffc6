"""Who writes which bytes: from what the files of a save are made of to each rank's writes. Pure.

[Note: the plan read backwards] A load asks which bytes of files fill a rank's partition; a save asks which bytes of
files are filled by it. `plan_copies` answers the first half for both: every tensor of a file, as loops over parameters.
These copies are the same on all ranks, and are proved to cover each tensor once. A rank then takes of each copy the
iterations whose parameter elements it holds (`held_part`). Ranks hold disjoint ranges that together are the parameter,
so each byte of each file is written by exactly one of them; the bytes that they will write are added up to make sure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lowmem_load.errors import PlanError, UnsupportedError
from lowmem_load.planning.copies import Copy, plan_copies
from lowmem_load.planning.expression import Expression, Source, leaves, numel
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.saving.layout import FileLayout


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of one parameter that go to one tensor of one file.

    Attributes:
        file: number of the file.
        tensor: its name in the file.
        start: byte of the file at which the tensor starts.
        dtype: of the tensor.
        copy: from the parameter (elements of the whole) to the tensor.
    """

    file: int
    tensor: str
    start: int
    dtype: torch.dtype
    copy: Copy

    @property
    def parameter(self) -> str:
        """Name of the parameter or buffer."""
        assert isinstance(self.copy.leaf, Source)  # plan_writes
        return self.copy.leaf.name

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.copy.numel * self.dtype.itemsize


def plan_writes(files: Sequence[tuple[FileLayout, Mapping[str, Expression]]]) -> list[Write]:
    """Return what must be written by all ranks together, proved to cover every tensor of every file once.

    Raises:
        UnsupportedError: a tensor is not made of parameters by moving and casting their elements.
        PlanError: a tensor would not be covered once. That is a fault of this package.
    """
    writes: list[Write] = []
    for number, (layout, tensors) in enumerate(files):
        for name, expression in tensors.items():
            _refuse_computed(layout.name, name, expression)
            copies = list(plan_copies(expression, FlatRange(0, numel(expression))))
            prove_coverage(f"{layout.name}: {name}", copies, numel(expression))
            writes += [Write(number, name, layout.starts[name], expression.dtype, copy) for copy in copies]
    return writes


def held_writes(writes: Iterable[Write], held: Mapping[str, FlatRange]) -> list[Write]:
    """Return the parts of the writes whose elements lie in `held`, in the order of the parameters' first use.

    Args:
        writes: of all ranks.
        held: which elements of each parameter and buffer are this rank's to write, by name.
    """
    mine: dict[str, list[Write]] = {}
    for write in writes:
        parts = [replace(write, copy=copy) for copy in held_part(write.copy, held[write.parameter])]
        if parts:
            mine.setdefault(write.parameter, []).extend(parts)
    return [write for parts in mine.values() for write in parts]


class _Loop(NamedTuple):
    size: int
    leaf: int
    destination: int


def held_part(copy: Copy, held: FlatRange) -> Iterator[Copy]:
    """Yield copies, at most two per loop, that are together what `copy` takes of the elements in `held`.

    Raises:
        PlanError: loops of the copy run into each other on the parameter's side, which those of a planned copy do not.
    """
    order = sorted(map(_Loop, copy.sizes, copy.leaf_strides, copy.destination_strides), key=lambda loop: -loop.leaf)
    yield from _clipped(copy, copy.leaf_start, copy.destination_start, (), tuple(order), held)


def _clipped(
    copy: Copy, leaf: int, destination: int, outer: tuple[_Loop, ...], loops: tuple[_Loop, ...], held: FlatRange
) -> Iterator[Copy]:
    end = leaf + _extent(loops)
    if end <= held.start or leaf >= held.end:
        return
    if leaf >= held.start and end <= held.end:
        yield _copy(copy, leaf, destination, (*outer, *loops))
        return
    (size, step, shift), inner = loops[0], loops[1:]
    inner_extent = _extent(inner)
    if step < inner_extent:
        raise PlanError(f"loops of a copy run into each other: {copy.sizes} by {copy.leaf_strides}")
    first = min(size, max(0, -(-(held.start - leaf) // step)))
    last = min(size, (held.end - inner_extent - leaf) // step + 1)
    if first < last:
        whole = _Loop(last - first, step, shift)
        yield _copy(copy, leaf + first * step, destination + first * shift, (*outer, whole, *inner))
    for t in sorted({first - 1, max(first, last)}):  # those that a border of the range may cut
        if 0 <= t < size:
            yield from _clipped(copy, leaf + t * step, destination + t * shift, outer, inner, held)


def _copy(copy: Copy, leaf: int, destination: int, loops: tuple[_Loop, ...]) -> Copy:
    """Return a part of a copy, with its loops in the order of the destination, as few of them as possible."""
    merged: list[_Loop] = []
    for loop in sorted((loop for loop in loops if loop.size > 1), key=lambda loop: -loop.destination):
        before = merged[-1] if merged else None
        joins = before and (before.leaf, before.destination) == (loop.size * loop.leaf, loop.size * loop.destination)
        if before and joins:
            merged[-1] = _Loop(before.size * loop.size, loop.leaf, loop.destination)
        else:
            merged.append(loop)
    sizes, leaf_strides, strides = zip(*(merged or [_Loop(1, 1, 1)]), strict=True)
    return Copy(copy.leaf, leaf, destination, sizes, leaf_strides, strides, copy.casts)


def _extent(loops: Iterable[_Loop]) -> int:
    return 1 + sum((loop.size - 1) * loop.leaf for loop in loops)


def _refuse_computed(file: str, name: str, expression: Expression) -> None:
    for leaf in leaves(expression):
        if not isinstance(leaf, Source):
            what = getattr(leaf, "operation", None) or getattr(leaf, "origin", "a value in memory")
            raise UnsupportedError(
                f"{file}: {name}: is made by {what}, for which whole parameters would have to be gathered; save it "
                "with save_original_format=False, or with stage3_gather_16bit_weights_on_model_save"
            )


def strided(writes: Iterable[Write]) -> dict[str, tuple[int, int]]:
    """Return the tensors that are written piece by piece: how many pieces, and bytes of the largest, by name."""
    found: dict[str, tuple[int, int]] = {}
    for write in writes:
        run = run_of(write.copy)
        pieces = write.copy.numel // max(1, run)
        if pieces > 1:
            count, largest = found.get(write.tensor, (0, 0))
            found[write.tensor] = count + pieces, max(largest, run * write.dtype.itemsize)
    return found


def run_of(copy: Copy) -> int:
    """Return how many elements of the destination lie beside each other. The copy's loops are in its order."""
    run = 1
    for size, stride in zip(reversed(copy.sizes), reversed(copy.destination_strides), strict=True):
        if stride != run:
            break
        run *= size
    return run if copy.numel else 0


def total_bytes(writes: Iterable[Write]) -> int:
    """Return how many bytes are written."""
    return sum(math.prod((write.copy.numel, write.dtype.itemsize)) for write in writes)
