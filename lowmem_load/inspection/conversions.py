"""What becomes of stored tensors on their way into parameters, read off a plan for one rank. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowmem_load.planning.alike import Alike
from lowmem_load.planning.expression import Source
from lowmem_load.planning.load_plan import ComputedValue, HeldValue, LoadPlan, TargetPlan, place_of
from lowmem_load.planning.reads import Apply, Fill, Read


@dataclass(slots=True)
class Conversion:
    """One kind of way from stored tensors into parameters.

    Attributes:
        kind: in words.
        num_parameters: that go this way.
        stored_bytes: of the parameters.
        read_bytes, num_reads: that it takes if one rank loads all.
        example: a parameter, and what it is made of.
    """

    kind: str
    num_parameters: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    example: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A parameter, and what a plan says of it.

    Attributes:
        names: of it.
        target: its plan, or that of a parameter that is like it.
        tensors: what it has in place of the tensors of that plan; nothing where the plan is its own.
    """

    names: tuple[str, ...]
    target: TargetPlan
    tensors: Mapping[Source, Source]

    @property
    def place(self) -> tuple[str, int, str]:
        """By which the parameters of a plan are sorted."""
        first = self.target.first_tensor
        return place_of(self.names[0], None if first is None else self.tensors.get(first, first))


def loaded(plan: LoadPlan, alike: Alike) -> list[Loaded]:
    """Return all parameters in the order of a plan, those included that were left out because others are like them."""
    targets = {target.name: target for target in plan.targets}
    every = [Loaded(target.names, target, {}) for target in plan.targets]
    every += [Loaded(found.names, targets[found.like], found.tensors) for found in alike.found]
    return sorted(every, key=lambda each: each.place)


@dataclass(frozen=True, slots=True)
class _Way:
    """What the plan of a parameter says, whatever the tensors are called: those, how they are read, what is done."""

    tensors: tuple[Source, ...]
    read_bytes: int
    num_reads: int
    before: tuple[str, ...]
    after: tuple[str, ...]


def conversions_of(plan: LoadPlan, parameters: Iterable[Loaded]) -> list[Conversion]:
    """Return the ways that parameters of a plan go, those of most bytes first."""
    found: dict[str, Conversion] = {}
    ways: dict[str, _Way] = {}
    for each in parameters:
        target = each.target
        way = ways.get(target.name) or ways.setdefault(target.name, _way(target, plan))
        tensors = [each.tensors.get(tensor, tensor) for tensor in way.tensors]
        kind = ", ".join((*way.before, *_sources(each.names, target, tensors), *way.after)) or "as it lies"
        one = found.setdefault(kind, Conversion(kind))
        one.num_parameters += 1
        one.stored_bytes += target.held_bytes
        one.read_bytes += way.read_bytes
        one.num_reads += way.num_reads
        names = list(dict.fromkeys(tensor.name for tensor in tensors))
        made_of = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        one.example = one.example or f"{each.names[0]} <- {made_of or 'nothing in the files'}"
    return sorted(found.values(), key=lambda one: -one.stored_bytes)


def _way(target: TargetPlan, plan: LoadPlan) -> _Way:
    reads = list(reads_of(target.fills, plan))
    values = [plan.values[number] for number in plan.values_of(target.fills)]
    before = list(dict.fromkeys(value.origin for value in values if isinstance(value, HeldValue)))
    computed = [f"{value.operation} on whole tensors" for value in values if isinstance(value, ComputedValue)][:1]
    applied = [step.operation for fill in target.fills for step in fill.steps if isinstance(step, Apply)]
    computed += [f"{operation} on ranges" for operation in dict.fromkeys(applied)]
    after = computed or list(_moves(reads))
    if target.companions:
        after.append("packed")
    return _Way(
        tuple({(read.tensor.path, read.tensor.name): read.tensor for read in reads}.values()),
        sum(read.read_bytes for read in reads),
        sum(read.num_reads for read in reads),
        tuple(before),
        tuple(after),
    )


def _sources(names: Sequence[str], target: TargetPlan, tensors: Sequence[Source]) -> Iterator[str]:
    if len(tensors) > 1:
        yield f"made of {len(tensors)} tensors"
    elif tensors and tensors[0].name not in names:
        yield "renamed" if math.prod(tensors[0].shape) == target.numel else "cut out of a larger one"


def _moves(reads: list[Read]) -> Iterator[str]:
    if any(not is_run(read) for read in reads):
        yield "rearranged"
    casts = {(read.tensor.dtype, read.nest.casts[-1]) for read in reads if read.nest.casts}
    for stored, held in sorted(casts, key=str):
        yield f"cast from {_spelled(stored)} to {_spelled(held)}"


def is_run(read: Read) -> bool:
    """Return whether elements go to their places in the order in which they lie."""
    return all(axis.source == axis.destination for axis in (*read.outer, *read.nest.axes))


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reads_of(fills: list[Fill], plan: LoadPlan) -> Iterator[Read]:
    """Yield the reads that some fills take, those of values that are computed first included."""
    for fill in fills:
        yield from _direct_reads(fill)
    for number in sorted(plan.values_of(fills)):
        value = plan.values[number]
        if isinstance(value, ComputedValue):
            for fill in value.inputs:
                yield from _direct_reads(fill)


def _direct_reads(fill: Fill) -> Iterator[Read]:
    for step in fill.steps:
        if isinstance(step, Read):
            yield step
        elif isinstance(step, Apply):
            for piece in step.pieces:
                for inner in piece.inputs:
                    yield from _direct_reads(inner)


def read_sizes(plan: LoadPlan) -> Mapping[int, int]:
    """Return how many reads of a plan fetch how many bytes: by bytes, ascending."""
    fills = [fill for target in plan.targets for fill in target.fills]
    fills += [buffer.fill for buffer in plan.buffers if buffer.fill is not None]
    found: dict[int, int] = {}
    for read in reads_of(fills, plan):
        nbytes = read.numel * read.tensor.dtype.itemsize
        found[nbytes] = found.get(nbytes, 0) + read.num_reads
    return dict(sorted(found.items()))
