"""The verb `fill`: parts of expressions into this rank's memory, proved as a whole before the first byte is read.

Lazy reads, resumes and values that are needed at once come here; a load fills the memory of its `LoadPlan` likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lowmem_load.errors import PlanError
from lowmem_load.io.executor import Executor
from lowmem_load.phases import no_callback
from lowmem_load.planning.expression import Expression, Source, cast, leaves, numel
from lowmem_load.planning.load_plan import Costs, reading_order
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.reads import Fill
from lowmem_load.planning.regions import FlatRange, Region


class Part(NamedTuple):
    """A region of an expression, and the flat memory that is to hold it, row-major, in the dtype of the memory."""

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
    planned, planner = plan_parts(parts)
    with executor.undone_on_error():
        fill_planned(planned, planner, executor, on_part)
        executor.check_unchanged(part.expression for part in parts)
    return planner.costs(part.fill for part in planned)


def plan_parts(parts: Sequence[Part]) -> tuple[list[PlannedPart], Planner]:
    """Return the parts as `fill_planned` takes them, and what has planned them."""
    planner = Planner()
    planned = []
    for name, expression, region, memory in parts:
        values = cast(expression, memory.dtype)
        planned.append(PlannedPart(name, planner.plan_fill(name, values, region, on_host=memory.is_cpu), memory))
    return planned, planner


def fill_planned(
    parts: Sequence[PlannedPart], planner: Planner, executor: Executor, on_part: Callable[[], object] = no_callback
) -> None:
    """Fill parts that `planner` has planned, in the order of the files.

    `on_part` is called as each is begun; it may raise, and so end the reading.
    """
    prove_memory(parts)
    for part in sorted(parts, key=lambda part: reading_order([part.fill], part.name)):
        executor.fill(part.fill, part.memory, planner.values, planner.constants, part.name)
        on_part()
    executor.finish()


def prove_memory(parts: Sequence[PlannedPart]) -> None:
    """Raise PlanError unless the memory of each part has the size and dtype of its fill, and no two parts share any."""
    spans: list[tuple[str, int, int, str]] = []
    for name, planned, memory in parts:
        if (memory.numel(), memory.dtype) != (planned.numel, planned.dtype) or not memory.is_contiguous():
            raise PlanError(
                f"{name}: {planned.numel} elements of {planned.dtype} do not fit memory of {memory.numel()} of "
                f"{memory.dtype}"
            )
        if memory.nbytes:
            spans.append((str(memory.device), memory.data_ptr(), memory.nbytes, name))
    spans.sort()
    for (device, start, nbytes, one), (other_device, other_start, _, other) in itertools.pairwise(spans):
        if device == other_device and other_start < start + nbytes:
            raise PlanError(f"{one} and {other}: would be filled into the same memory")


def read_whole(executor: Executor, expression: Expression) -> torch.Tensor:
    """Return the value of an expression as a host tensor. Raises CheckpointError if its files have changed."""
    whole = torch.empty(numel(expression), dtype=expression.dtype, device="cpu")
    fill([Part(name_in_files(expression), expression, FlatRange(0, whole.numel()), whole)], executor)
    return whole.reshape(expression.shape)


def name_in_files(expression: Expression) -> str:
    """Return the first name in files of what an expression is made of."""
    return next((leaf.name for leaf in leaves(expression) if isinstance(leaf, Source)), "a value")
