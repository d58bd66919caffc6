"""Steps that are taken out of fills, and done together with other ranks: what comes to this one goes where it belongs.

How the ranks read, and how bytes come from one to another, is said by `cooperative.py` (a node) and `exchange.py` (a
network).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lowmem_load.errors import PlanError, listed
from lowmem_load.planning.cooperative import Segment, Shared, within
from lowmem_load.planning.load_plan import Value
from lowmem_load.planning.planner import Material
from lowmem_load.planning.reads import Apply, Fill, Move, Piece, Read, Scatter, Step
from lowmem_load.read.executor import Executor
from lowmem_load.read.scatter import scatter_elements
from lowmem_load.read.temporaries import compute_into

_CPU = torch.device("cpu")


class ReadTogether(ABC):
    """Takes steps out of fills, and carries them out together with other ranks.

    Memory: `MAX_OPEN_BYTES` for elementwise operations that wait for their inputs, and what a subclass says.

    Args:
        steps: that are taken out of the fills that they are in.

    Attributes:
        waited: grows while this rank waits for others.
        why_alone: why `run` may find that the ranks do not read together.
    """

    why_alone: ClassVar[str]

    def __init__(self, steps: Sequence[Step]) -> None:
        self.waited = 0
        self._chosen = {id(step): step for step in steps}
        self._taken: list[_Taken] = []

    def take(self, fill: Fill, destination: torch.Tensor, material: Material) -> Fill:
        """Return what of a fill is left to do alone; the rest is done by `run`."""
        mine = [step for step in fill.steps if id(step) in self._chosen]
        for step in mine:
            numbers = {part.value for part in _parts(step) if isinstance(part, Move)}
            self._taken.append(_Taken(step, destination, {number: material.tensors[number] for number in numbers}))
        return replace(fill, steps=tuple(step for step in fill.steps if id(step) not in self._chosen)) if mine else fill

    def run(self, executor: Executor, values: Sequence[Value], material: Material) -> Shared | None:
        """Carry out what was taken; alone, and returning None, where the ranks do not read it together.

        Raises:
            CheckpointError: as of `Executor.finish`.
            PlanError: what the ranks have read does not hold all that this rank needs.
            StoppedError: another rank has failed.
        """
        deliveries = [each for taken in self._taken for each in _deliveries(taken, executor, material)]
        shared = self._read(executor, deliveries)
        if shared is None:
            for taken in self._taken:
                fill = Fill(taken.destination.numel(), taken.destination.dtype, (taken.step,), tuple(taken.known))
                executor.fill(fill, taken.destination, values, Material(dict(taken.known), material.functions))
            return None
        missing = sorted({each.read.tensor.name for each in deliveries if each.left})
        if missing:
            raise PlanError(f"{listed(missing)}: not all that is needed was in what the ranks read together")
        return shared

    @abstractmethod
    def _read(self, executor: Executor, deliveries: Sequence[Delivery]) -> Shared | None:
        """Read with the other ranks, and fulfil the deliveries; None, and nothing read, if that is not to be done."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step that was taken, the memory that it fills, and the values in memory that it needs."""

    step: Step
    destination: torch.Tensor
    known: Mapping[int, torch.Tensor]


class Delivery:
    """A read whose elements come from bands; `put` is given what has come, as its destination is to be filled."""

    def __init__(self, read: Read, put: Callable[[Scatter, torch.Tensor], None]) -> None:
        self.read, self._put = read, put
        self.left = read.num_reads * math.prod(loop.size for loop in read.scatter.loops)

    def deliver(self, segment: Segment, memory: torch.Tensor) -> int:
        """Put what is in a segment where it belongs; return the bytes of it that were needed."""
        part = segment.wanted
        content = memory[segment.place : segment.place + part.end - part.start]
        return sum(self.take(scatter, content) for scatter in within(self.read, segment))

    def take(self, scatter: Scatter, content: torch.Tensor) -> int:
        """Put elements of flat host memory, uint8, where they belong; return their bytes."""
        self._put(scatter, content.view(self.read.tensor.dtype))
        self.left -= math.prod(loop.size for loop in scatter.loops)
        return math.prod(loop.size for loop in scatter.loops if loop.source) * self.read.tensor.dtype.itemsize


class _OpenPiece:
    """A piece of an elementwise operation, which is computed once all of its inputs have come."""

    def __init__(self, taken: _Taken, step: Apply, piece: Piece, executor: Executor, material: Material) -> None:
        self._taken, self._piece, self._executor = taken, piece, executor
        self._compute, self._dtype = material.functions[step.function], step.dtype
        self._inputs: list[torch.Tensor] = []
        reads = [part for fill in piece.inputs for part in fill.steps if isinstance(part, Read)]
        self._left = sum(each.num_reads * math.prod(loop.size for loop in each.scatter.loops) for each in reads)

    def put(self, number: int, scatter: Scatter, values: torch.Tensor) -> None:
        """Fill a part of input `number`."""
        if not self._inputs:
            self._open()
        scatter_elements(scatter, values, self._inputs[number], 0)
        self._left -= math.prod(loop.size for loop in scatter.loops)
        if self._left == 0:
            result = next((each for each in self._inputs if each.dtype == self._dtype), None)
            if result is None:
                result = torch.empty(self._piece.numel, dtype=self._dtype, device=_CPU)
            compute_into(result, self._compute, self._inputs)
            self._inputs = []
            self._executor.place(self._piece.scatter, result, self._taken.destination)

    def _open(self) -> None:
        for fill in self._piece.inputs:
            self._inputs.append(torch.empty(fill.numel, dtype=fill.dtype, device=_CPU))
            for part in fill.steps:
                if isinstance(part, Move):
                    scatter_elements(part.scatter, self._taken.known[part.value], self._inputs[-1], 0)


def _deliveries(taken: _Taken, executor: Executor, material: Material) -> list[Delivery]:
    step = taken.step
    if isinstance(step, Read):
        return [Delivery(step, lambda scatter, values: executor.place(scatter, values, taken.destination))]
    assert isinstance(step, Apply)  # as `shared_steps` chooses
    found = []
    for piece in step.pieces:
        opened = _OpenPiece(taken, step, piece, executor, material)
        for number, fill in enumerate(piece.inputs):
            reads = [part for part in fill.steps if isinstance(part, Read)]
            found += [Delivery(read, _partial(opened, number)) for read in reads]
    return found


def _partial(opened: _OpenPiece, number: int) -> Callable[[Scatter, torch.Tensor], None]:
    return lambda scatter, values: opened.put(number, scatter, values)


def _parts(step: Step) -> list[Step]:
    if not isinstance(step, Apply):
        return [step]
    return [part for piece in step.pieces for fill in piece.inputs for part in fill.steps]
