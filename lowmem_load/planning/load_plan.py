"""The plan of one load on one rank: everything that will be read and where it goes. Plain data, proved when it is made.

[Note: plan and material] A plan can be compared, printed and costed in any process. What it needs besides, and what
cannot be data (values in memory, functions of torch), lies in a `Material` beside it and is referred to by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowmem_load.errors import PlanError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.planning.copies import Copy, plan_copies
from lowmem_load.planning.expression import Computed, Elementwise, Expression, Held, Shape, Slice, Source, numel
from lowmem_load.planning.proof import prove_coverage
from lowmem_load.planning.ranges import FlatRange, Rectangle, Region
from lowmem_load.planning.reads import (
    Apply,
    Fill,
    Move,
    Piece,
    Read,
    ReadLimits,
    Scatter,
    Step,
    plan_pieces,
    plan_reads,
    scatter_of,
    written,
)

MAX_COPIES = 1 << 20
"""Copies of one destination on one rank. Far above any known conversion; beyond it a plan costs more than the data."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan, or a part of one, costs on its rank.

    Attributes:
        needed_bytes: bytes of files that the filled memory is made of.
        read_bytes: bytes fetched from files: over-read included, headers not.
        num_reads: reads that fetch them.
        staging_bytes: of the staging buffer that each reading thread needs.
        largest_temporary_bytes: of the largest values that are in memory only to compute others.
    """

    needed_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    staging_bytes: int = 0
    largest_temporary_bytes: int = 0

    def plus(self, other: Costs) -> Costs:
        """Return the costs of doing both, one after the other."""
        return Costs(
            self.needed_bytes + other.needed_bytes,
            self.read_bytes + other.read_bytes,
            self.num_reads + other.num_reads,
            max(self.staging_bytes, other.staging_bytes),
            max(self.largest_temporary_bytes, other.largest_temporary_bytes),
        )


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that is in memory before the plan is executed, flat; `origin` says where it comes from."""

    origin: str
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ComputedValue:
    """The result of an operation on whole tensors: number `function` of the material's, on the filled inputs."""

    operation: str
    function: int
    inputs: tuple[Fill, ...]
    input_shapes: tuple[Shape, ...]
    shape: Shape
    dtype: torch.dtype


Value = HeldValue | ComputedValue


@dataclass(frozen=True, slots=True)
class SlowPath:
    """A parameter that is not read straight into its partition.

    Attributes:
        name: the parameter.
        reason: why, in words.
        extra_bytes: bytes held or read beyond the partition for it.
    """

    name: str
    reason: str
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Destination:
    """A piece of memory of a target.

    Attributes:
        region: elements of the target that it holds.
        numel: elements that are allocated, padding behind the region included.
        on_host: whether it is host memory.
        fill: how the region is filled.
    """

    region: Region
    numel: int
    on_host: bool
    fill: Fill


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """A parameter: what this rank holds of it and how that is filled.

    Attributes:
        names: all names of the parameter; more than one where it is tied.
        shape, dtype: of the whole parameter, as it will be stored.
        kind: what becomes of it, as its target names it: "zero3", "replicated".
        destinations: one for each piece of memory.
        is_recast: whether an ordinary load keeps it in another dtype.
        is_uninitialised: whether nothing gives it a value, in which case it is zero.
        slow_paths: what keeps it from being read straight into its destinations.
        fingerprint: of what it is made of as a whole: equal on all ranks that read the same files.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    kind: str
    destinations: tuple[Destination, ...]
    is_recast: bool
    is_uninitialised: bool
    slow_paths: tuple[SlowPath, ...]
    fingerprint: str

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def held_bytes(self) -> int:
        """Bytes of all destinations, padding included."""
        return sum(destination.numel for destination in self.destinations) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """A buffer of the model, whole on every rank.

    Attributes:
        names: all names of the buffer.
        shape, dtype: as it will be held.
        fill: how it is filled; None for one that is in memory already and is only moved or cast.
        fingerprint: as of `TargetPlan`.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    fill: Fill | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that a plan was made against.

    Attributes:
        path: as it was opened.
        nbytes: its size.
        digest: of its header, which says what tensor lies where.
    """

    path: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that a load does on one rank of one world.

    Attributes:
        name: what is loaded.
        rank, world_size: of the partition group.
        targets: the distinct parameters, in the order in which they are read.
        buffers: the distinct buffers.
        values: values in memory and computed ones, which steps refer to by number.
        files: all files of the checkpoint whose headers were read.
        read_to_describe: operations whose results transformers needed while the model was described, with the bytes
            that each read; most loads have none.
        missing_keys, unexpected_keys, mismatched_keys: as transformers' `output_loading_info` gives them.
        costs: of executing the plan.
        seconds: that describing and planning took on this machine; two plans that differ in them alone are equal.
    """

    name: str
    rank: int
    world_size: int
    targets: tuple[TargetPlan, ...]
    buffers: tuple[BufferPlan, ...]
    values: tuple[Value, ...]
    files: tuple[PlannedFile, ...]
    read_to_describe: tuple[tuple[str, int], ...]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: tuple[Any, ...]
    costs: Costs
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def needed_bytes(self) -> int:
        """See `Costs`."""
        return self.costs.needed_bytes

    @property
    def read_bytes(self) -> int:
        """See `Costs`."""
        return self.costs.read_bytes

    @property
    def num_reads(self) -> int:
        """See `Costs`."""
        return self.costs.num_reads

    @property
    def staging_bytes(self) -> int:
        """See `Costs`."""
        return self.costs.staging_bytes

    @property
    def largest_temporary_bytes(self) -> int:
        """See `Costs`."""
        return self.costs.largest_temporary_bytes

    @property
    def partition_bytes(self) -> int:
        """Bytes that this rank holds of parameters that are cut up, padding included."""
        return sum(target.held_bytes for target in self.targets if target.kind != REPLICATED)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the parameters that every rank holds whole."""
        return sum(target.held_bytes for target in self.targets if target.kind == REPLICATED)

    @property
    def slow_paths(self) -> list[SlowPath]:
        """Why, and at what cost, parameters are not read straight into their partitions."""
        return [path for target in self.targets for path in target.slow_paths]

    @property
    def fingerprint(self) -> str:
        """Equal on all ranks that load the same model from the same files in the same way."""
        lines = sorted(f"{target.name} {target.kind} {target.fingerprint}" for target in self.targets)
        lines += [f"buffer {buffer.names[0]} {buffer.fingerprint}" for buffer in self.buffers]
        lines += sorted(f"file {_file_name(file.path)} {file.nbytes} {file.digest}" for file in self.files)
        return fingerprint(lines)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the plan, to be written as JSON: bytes, counts, names."""
        kinds = sorted({target.kind for target in self.targets})
        return {
            "name": self.name,
            "rank": self.rank,
            "world_size": self.world_size,
            "num_targets": {kind: sum(target.kind == kind for target in self.targets) for kind in kinds},
            "num_elements": sum(target.numel for target in self.targets),
            "num_buffers": len(self.buffers),
            "partition_bytes": self.partition_bytes,
            "replicated_bytes": self.replicated_bytes,
            "needed_bytes": self.needed_bytes,
            "read_bytes": self.read_bytes,
            "num_reads": self.num_reads,
            "staging_bytes": self.staging_bytes,
            "largest_temporary_bytes": self.largest_temporary_bytes,
            "files": [{"path": file.path, "nbytes": file.nbytes, "digest": file.digest} for file in self.files],
            "read_to_describe": [list(entry) for entry in self.read_to_describe],
            "missing_keys": list(self.missing_keys),
            "unexpected_keys": list(self.unexpected_keys),
            "mismatched_keys": [str(key) for key in self.mismatched_keys],
            "uninitialised_parameters": [target.name for target in self.targets if target.is_uninitialised],
            "recast_parameters": [target.name for target in self.targets if target.is_recast],
            "slow_paths": [[path.name, path.reason, path.extra_bytes] for path in self.slow_paths],
            "fingerprint": self.fingerprint,
            "seconds": dict(self.seconds),
        }


REPLICATED = "replicated"
"""Kind of a parameter that every rank holds whole."""


def _file_name(path: str) -> str:
    """Return what follows the last slash: nodes may have the same file in different folders."""
    return path.rpartition("/")[2]


@dataclass(slots=True)
class Material:
    """What the steps of a plan refer to by number. See [Note: plan and material]."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    functions: list[Callable[[Sequence[torch.Tensor]], torch.Tensor]] = field(default_factory=list)


class Planner:
    """Turns expressions into fills, and collects the values and functions that these share.

    Args:
        limits: how large reads are.

    Attributes:
        values: of the plan.
        material: what goes with it.
    """

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self.values: list[Value] = []
        self.material = Material()
        self._limits = limits or ReadLimits()
        self._numbers: dict[int, int] = {}
        self._known: list[Expression | Callable[..., Any]] = []  # keeps what `_numbers` knows by id alive

    def plan_fill(self, name: str, expression: Expression, region: Region, *, on_host: bool = True) -> Fill:
        """Plan the memory that holds `region` of `expression`, and prove that every element is filled once.

        Args:
            name: for messages.
            expression: what the memory is made of.
            region: the elements that it holds; a rectangle is laid out row-major.
            on_host: whether it is host memory.

        Raises:
            PlanError: the region leaves the expression, needs more than `MAX_COPIES` copies, is not covered exactly
                once, or needs elements that are not in memory.
        """
        expression, flat_range = _selected(name, expression, region)
        steps: list[Step] = []
        for number, copy in enumerate(plan_copies(expression, flat_range)):
            if number == MAX_COPIES:
                raise PlanError(f"{name}: more than {MAX_COPIES} copies are needed for {flat_range.numel} elements")
            steps += self._steps(name, copy, on_host)
        prove_coverage(name, [part for step in steps for part in written(step)], flat_range.numel)
        return Fill(flat_range.numel, expression.dtype, tuple(steps), tuple(dict.fromkeys(self._needed(steps))))

    def costs(self, fills: Iterable[Fill]) -> Costs:
        """Return what executing some fills costs; a computed value that several of them need is computed for each."""
        total = Costs()
        for fill in fills:
            total = total.plus(self._steps_costs(fill.steps))
            for number in fill.needs:
                total = total.plus(self._value_costs(self.values[number]))
        return total

    def _steps(self, name: str, copy: Copy, on_host: bool) -> Iterator[Step]:
        leaf = copy.leaf
        if isinstance(leaf, Source):
            yield from plan_reads(copy, leaf, self._limits, on_host=on_host)
        elif isinstance(leaf, Elementwise):
            yield self._apply(name, leaf, copy)
        elif isinstance(leaf, Computed):
            yield Move(self._computed(name, leaf), scatter_of(copy, copy.leaf_start))
        else:
            yield Move(self._held(leaf), _within(name, leaf, scatter_of(copy, copy.leaf_start - leaf.first)))

    def _apply(self, name: str, leaf: Elementwise, copy: Copy) -> Apply:
        widest = max(part.dtype.itemsize for part in (leaf, *leaf.parts))
        pieces = []
        for first, size, scatter in plan_pieces(copy, widest, self._limits):
            span = FlatRange(first, first + size)
            pieces.append(Piece(size, tuple(self.plan_fill(name, part, span) for part in leaf.parts), scatter))
        return Apply(leaf.operation, self._function(leaf.compute), leaf.dtype, tuple(pieces))

    def _held(self, leaf: Held) -> int:
        number = self._numbers.get(id(leaf))
        if number is None:
            number = self._add(leaf, HeldValue(leaf.origin, leaf.flat.numel(), leaf.dtype))
            self.material.tensors[number] = leaf.flat
        return number

    def _computed(self, name: str, leaf: Computed) -> int:
        number = self._numbers.get(id(leaf))
        if number is None:
            inputs = tuple(self.plan_fill(name, part, FlatRange(0, numel(part))) for part in leaf.inputs)
            shapes = tuple(part.shape for part in leaf.inputs)
            function = self._function(leaf.compute)
            number = self._add(leaf, ComputedValue(leaf.operation, function, inputs, shapes, leaf.shape, leaf.dtype))
        return number

    def _add(self, leaf: Held | Computed, value: Value) -> int:
        self._known.append(leaf)
        self.values.append(value)
        return self._numbers.setdefault(id(leaf), len(self.values) - 1)

    def _function(self, compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> int:
        if id(compute) not in self._numbers:
            self._known.append(compute)
            self.material.functions.append(compute)
            self._numbers[id(compute)] = len(self.material.functions) - 1
        return self._numbers[id(compute)]

    @staticmethod
    def _needed(steps: Iterable[Step]) -> Iterator[int]:
        for step in steps:
            if isinstance(step, Move):
                yield step.value
            elif isinstance(step, Apply):
                yield from (number for piece in step.pieces for fill in piece.inputs for number in fill.needs)

    def _steps_costs(self, steps: Iterable[Step]) -> Costs:
        total = Costs()
        for step in steps:
            if isinstance(step, Read):
                staging = 0 if step.is_direct else step.numel * step.tensor.dtype.itemsize
                needed = step.needed_bytes_each * step.num_reads
                total = total.plus(Costs(needed, step.read_bytes, step.num_reads, staging))
            elif isinstance(step, Apply):
                for piece in step.pieces:
                    for fill in piece.inputs:
                        total = total.plus(self._steps_costs(fill.steps))
                    held = step.dtype.itemsize + sum(fill.dtype.itemsize for fill in piece.inputs)
                    total = total.plus(Costs(largest_temporary_bytes=piece.numel * held))
        return total

    def _value_costs(self, value: Value) -> Costs:
        if isinstance(value, HeldValue):
            return Costs()
        held = math.prod(value.shape) * value.dtype.itemsize
        held += sum(fill.numel * fill.dtype.itemsize for fill in value.inputs)
        inner = self.costs(value.inputs)
        return replace(inner, largest_temporary_bytes=inner.largest_temporary_bytes + held)


def _selected(name: str, expression: Expression, region: Region) -> tuple[Expression, FlatRange]:
    """Return the expression and the flat range of it that are the elements of `region` in order."""
    if isinstance(region, Rectangle):
        sizes = zip(region.starts, region.sizes, expression.shape, strict=True)
        if any(start < 0 or size < 0 or start + size > extent for start, size, extent in sizes):
            raise PlanError(f"{name}: {region} of a tensor of shape {expression.shape}")
        part = Slice(expression, region.starts, (1,) * len(region.sizes), region.sizes, expression.dtype)
        return part, FlatRange(0, region.numel)
    if not 0 <= region.start <= region.end <= numel(expression):
        raise PlanError(f"{name}: elements [{region.start}, {region.end}) of {numel(expression)}")
    return expression, region


def _within(name: str, leaf: Held, scatter: Scatter) -> Scatter:
    """Return `scatter` if it stays within the elements that are in memory."""
    reach = sum((loop.size - 1) * loop.source for loop in scatter.loops)
    if scatter.source_start < 0 or scatter.source_start + reach >= leaf.flat.numel():
        first = scatter.source_start + leaf.first
        raise PlanError(
            f"{name}: elements [{first}, {first + reach + 1}) of a value that is {leaf.origin} are needed, "
            f"[{leaf.first}, {leaf.first + leaf.flat.numel()}) are in memory"
        )
    return scatter
