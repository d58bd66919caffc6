"""Turns expressions into fills, which are proved and costed as they are made. Pure: nothing is read or allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.expression import Computed, Elementwise, Expression, Held, Source, concat, numel, slice_dim
from lowmem_load.planning.load_plan import ComputedValue, Costs, HeldValue, Value
from lowmem_load.planning.nest import Copy, Nest, extent, plan_copies
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.reads import (
    BLOCK_NUMEL,
    Apply,
    ApplyPiece,
    Fill,
    Move,
    Read,
    ReadLimits,
    Step,
    plan_pieces,
    plan_reads,
    written_nests,
)
from lowmem_load.planning.regions import FlatRange, Grid, Region

MAX_COPIES = 1 << 20
"""Most copies into one destination. No known conversion comes near it; a plan with more costs more than the data."""


@dataclass(slots=True)
class Constants:
    """Tensors and functions that the steps of a plan refer to by number. See [Note: plan and constants]."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    functions: list[Callable[[Sequence[torch.Tensor]], torch.Tensor]] = field(default_factory=list)


class Planner:
    """Turns expressions into fills, and collects the values and functions that they share."""

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self.values: list[Value] = []
        self.constants = Constants()
        self._limits = limits or ReadLimits()
        self._numbers: dict[int, int] = {}
        self._costs: dict[int, tuple[Costs, int]] = {}
        self._known: list[Expression | Callable[..., Any]] = []  # kept alive: `_numbers` knows them by id

    def plan_fill(self, name: str, expression: Expression, region: Region, *, on_host: bool = True) -> Fill:
        """Return how memory for a region of an expression is filled, each element once; else raise PlanError.

        A grid lies row-major in memory. Only memory `on_host` is read into directly.
        """
        expression, flat_range = _selected(name, expression, region)  # a grid becomes a range of what it selects
        steps: list[Step] = []
        for number, copy in enumerate(plan_copies(expression, flat_range)):
            if number == MAX_COPIES:
                raise PlanError(f"{name}: more than {MAX_COPIES} copies are needed for {flat_range.numel} elements")
            steps += self._steps(name, copy, on_host)
        prove_coverage(name, [part for step in steps for part in written_nests(step)], flat_range.numel)
        return Fill(flat_range.numel, expression.dtype, tuple(steps), tuple(dict.fromkeys(self._needed(steps))))

    def costs(self, fills: Iterable[Fill]) -> Costs:
        """Return what executing some fills costs. A computed value that several fills need is computed for each."""
        fills = list(fills)
        total = self._steps_costs(step for fill in fills for step in fill.steps)
        for fill in fills:
            results = 0  # all values of a fill are in memory before its first step runs
            for number in fill.needs:
                costs, result_bytes = self._value_costs(number)
                temporary = costs.largest_temporary_bytes + results
                total = total.plus(replace(costs, largest_temporary_bytes=temporary))
                results += result_bytes
        return total

    def _steps(self, name: str, copy: Copy, on_host: bool) -> Iterator[Step]:
        leaf = copy.leaf
        if isinstance(leaf, Source):
            yield from plan_reads(copy, leaf, self._limits, on_host=on_host)
        elif isinstance(leaf, Elementwise):
            yield self._apply(name, leaf, copy)
        elif isinstance(leaf, Computed):
            yield Move(self._computed(name, leaf), copy.nest)
        else:
            yield Move(self._held_value(leaf), _within(name, leaf, copy.nest.shifted(source=-leaf.first)))

    def _apply(self, name: str, leaf: Elementwise, copy: Copy) -> Apply:
        part_bytes = leaf.part_group * sum(part.dtype.itemsize for part in leaf.parts)
        nbytes_each = -(-part_bytes // leaf.group) + leaf.dtype.itemsize
        pieces: list[ApplyPiece] = []
        for first, size, nest in plan_pieces(copy, nbytes_each, self._limits):
            if len(pieces) == MAX_COPIES:
                raise PlanError(f"{name}: {leaf.operation} would run on more than {MAX_COPIES} scattered pieces")
            start, end = first // leaf.group, -(-(first + size) // leaf.group)  # whole groups
            inputs = tuple(
                self.plan_fill(name, part, _groups(start, end, leaf.part_group, numel(part))) for part in leaf.parts
            )
            computed = _groups(start, end, leaf.group, numel(leaf))
            pieces.append(ApplyPiece(computed.numel, inputs, nest.shifted(source=first - computed.start)))
        function = self._function(leaf.compute)
        return Apply(leaf.operation, function, leaf.dtype, tuple(pieces), leaf.group, leaf.part_group)

    def _held_value(self, leaf: Held) -> int:
        # Several parameters may be made of one value, which then has one number.
        number = self._numbers.get(id(leaf))
        if number is None:
            number = self._add(leaf, self.values, HeldValue(leaf.origin))
            self.constants.tensors[number] = leaf.flat
        return number

    def _computed(self, name: str, leaf: Computed) -> int:
        number = self._numbers.get(id(leaf))
        if number is None:
            inputs = tuple(self.plan_fill(name, part, FlatRange(0, numel(part))) for part in leaf.parts)
            shapes = tuple(part.shape for part in leaf.parts)
            function = self._function(leaf.compute)
            value = ComputedValue(leaf.operation, function, inputs, shapes, leaf.shape, leaf.dtype)
            number = self._add(leaf, self.values, value)
        return number

    def _function(self, compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> int:
        number = self._numbers.get(id(compute))
        return self._add(compute, self.constants.functions, compute) if number is None else number

    def _add(self, known: Expression | Callable[..., Any], entries: list[Any], entry: object) -> int:
        self._known.append(known)
        entries.append(entry)
        return self._numbers.setdefault(id(known), len(entries) - 1)

    @staticmethod
    def _needed(steps: Iterable[Step]) -> Iterator[int]:
        for step in steps:
            if isinstance(step, Move):
                yield step.value
            elif isinstance(step, Apply):
                yield from (number for piece in step.pieces for fill in piece.inputs for number in fill.needs)

    def _steps_costs(self, steps: Iterable[Step]) -> Costs:
        needed = read = num_reads = staging = 0
        of_pieces = Costs()
        for step in steps:
            if isinstance(step, Read):
                itemsize, num_each = step.tensor.dtype.itemsize, step.num_reads
                needed += step.needed_bytes_each * num_each
                read += step.numel * num_each * itemsize
                num_reads += num_each
                staging = staging if step.is_direct else max(staging, step.numel * itemsize)
            elif isinstance(step, Apply):
                for piece in step.pieces:
                    of_pieces = of_pieces.plus(self._piece_costs(step, piece))
        return of_pieces.plus(Costs(needed, read, num_reads, staging))

    def _piece_costs(self, step: Apply, piece: ApplyPiece) -> Costs:
        piece_bytes = piece.numel * step.dtype.itemsize
        piece_bytes += sum(fill.numel * fill.dtype.itemsize for fill in piece.inputs)
        # All inputs are filled before the first block is computed, so the two never need memory at the same time.
        block = min(piece.numel, BLOCK_NUMEL) * step.dtype.itemsize
        inputs = Costs()
        for fill in piece.inputs:
            inputs = inputs.plus(self._steps_costs(fill.steps))
        return replace(inputs, largest_temporary_bytes=piece_bytes + max(block, inputs.largest_temporary_bytes))

    def _value_costs(self, number: int) -> tuple[Costs, int]:
        # The costs of computing a value, and the bytes of the result.
        value = self.values[number]
        if isinstance(value, HeldValue):
            return Costs(), 0
        if number not in self._costs:
            result_bytes = math.prod(value.shape) * value.dtype.itemsize
            value_bytes = result_bytes + sum(fill.numel * fill.dtype.itemsize for fill in value.inputs)
            inner = self.costs(value.inputs)
            costs = replace(inner, largest_temporary_bytes=inner.largest_temporary_bytes + value_bytes)
            self._costs[number] = costs, result_bytes
        return self._costs[number]


def _groups(first: int, end: int, size: int, num_elements: int) -> FlatRange:
    return FlatRange(first * size, min(end * size, num_elements))


def _selected(name: str, expression: Expression, region: Region) -> tuple[Expression, FlatRange]:
    if isinstance(region, Grid):
        if not region.numel:
            return expression, FlatRange(0, 0)
        dims = zip(region.runs, expression.shape, strict=True)
        if any(not 0 <= start <= end <= size for runs, size in dims for start, end in runs):
            raise PlanError(f"{name}: {region} of a tensor of shape {expression.shape}")
        for dim, runs in enumerate(region.runs):
            parts = [slice_dim(expression, dim, start, 1, end - start) for start, end in runs]
            expression = parts[0] if len(parts) == 1 else concat(parts, dim)
        return expression, FlatRange(0, region.numel)
    if not 0 <= region.start <= region.end <= numel(expression):
        raise PlanError(f"{name}: elements [{region.start}, {region.end}) of {numel(expression)}")
    return expression, region


def _within(name: str, leaf: Held, nest: Nest) -> Nest:
    num_spanned = extent(nest.axes, "source")
    if nest.source < 0 or nest.source + num_spanned > leaf.flat.numel():
        first = nest.source + leaf.first
        raise PlanError(
            f"{name}: elements [{first}, {first + num_spanned}) of a value that is {leaf.origin} are needed, "
            f"[{leaf.first}, {leaf.first + leaf.flat.numel()}) are in memory"
        )
    return nest
