"""The verb `fill`: parts of expressions into this rank's memory, all proved before the first byte is read.

Lazy reads, resumes and values that are needed at once come here, and loads, which begin as memory is made.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.files.executor import Executor, refuse_left, span
from lowmem_load.phases import no_callback
from lowmem_load.planning.expression import Expression, Source, cast, leaves, numel
from lowmem_load.planning.load_plan import Costs, Value, reading_order
from lowmem_load.planning.planner import Constants, Planner
from lowmem_load.planning.reads import Fill
from lowmem_load.planning.regions import FlatRange, Region


class Part(NamedTuple):
    """A region of an expression, and the flat memory for it, row-major, in the dtype of the memory."""

    name: str
    expression: Expression
    region: Region
    memory: torch.Tensor


class PlannedPart(NamedTuple):
    """A part that was planned before, perhaps while its memory was not there yet."""

    name: str
    fill: Fill
    memory: torch.Tensor


def fill(parts: Sequence[Part], executor: Executor, on_part: Callable[[], object] = no_callback) -> Costs:
    """Plan, prove and fill parts; return what that took. For `on_part`, see `fill_planned`.

    Raises PlanError before anything is read, and CheckpointError if a file cannot be read or has changed.
    """
    planner = Planner()
    paths = {leaf.path for part in parts for leaf in leaves(part.expression) if isinstance(leaf, Source)}
    executor.have_enough_in_flight(paths, on_host=all(part.memory.is_cpu for part in parts))
    planned = []
    for name, expression, region, memory in parts:
        values = cast(expression, memory.dtype)
        planned.append(PlannedPart(name, planner.plan_fill(name, values, region, on_host=memory.is_cpu), memory))
    with executor.undone_on_error():
        fill_planned(planned, Filling(planner.values, planner.constants, executor), on_part)
        executor.check_unchanged(part.expression for part in parts)
    return planner.costs(part.fill for part in planned)


def fill_planned(parts: Sequence[PlannedPart], filling: Filling, on_part: Callable[[], object] = no_callback) -> None:
    """Fill planned parts in the order of the files. `on_part` is called as each begins, and may raise to end it."""
    for part in parts:
        filling.prove(part)
    for part in sorted(parts, key=lambda part: reading_order([part.fill], part.name)):
        filling.start(part)
        on_part()
    filling.finish()


class Filling:
    """Fills parts that are planned, of which each may begin as soon as it has memory.

    The parts that begin before a `finish` do not share memory. After it their memory may be given to others.
    """

    def __init__(self, values: Sequence[Value], constants: Constants, executor: Executor) -> None:
        self.executor, self._values, self._constants = executor, values, constants
        self._taken: list[tuple[str, int, int, str]] = []  # device, first and last byte, name; sorted, none overlap

    def prove(self, part: PlannedPart) -> None:
        """Raise PlanError unless the memory has the size and dtype of the fill, and no other part has any of it.

        Raises CheckpointError if a load that has failed may yet write into it.
        """
        name, planned, memory = part
        if (memory.numel(), memory.dtype) != (planned.numel, planned.dtype) or not memory.is_contiguous():
            raise PlanError(
                f"{name}: {planned.numel} elements of {planned.dtype} do not fit memory of {memory.numel()} of "
                f"{memory.dtype}"
            )
        if not memory.nbytes:
            return
        refuse_left(name, memory)
        taken = *span(memory), name
        place = bisect.bisect(self._taken, taken)
        neighbors = self._taken[max(0, place - 1) : place + 1]
        for one, other in itertools.pairwise(sorted([*neighbors, taken])):
            if one[0] == other[0] and other[1] < one[2]:
                raise PlanError(f"{one[3]} and {other[3]}: would be filled into the same memory")
        self._taken.insert(place, taken)

    def start(self, part: PlannedPart) -> None:
        """Start to fill a part that is proved."""
        self.executor.fill(part.fill, part.memory, self._values, self._constants, part.name)

    def finish(self) -> None:
        """Return once all that was started is filled."""
        self.executor.finish()
        self._taken.clear()


def read_whole(executor: Executor, expression: Expression) -> torch.Tensor:
    """Return the value of an expression as a host tensor. Raises CheckpointError if its files have changed."""
    full = torch.empty(numel(expression), dtype=expression.dtype, device="cpu")
    fill([Part(name_in_files(expression), expression, FlatRange(0, full.numel()), full)], executor)
    return full.reshape(expression.shape)


def name_in_files(expression: Expression) -> str:
    """Return the first name in files of what an expression is made of."""
    return next((leaf.name for leaf in leaves(expression) if isinstance(leaf, Source)), "a value")
