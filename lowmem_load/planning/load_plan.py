"""The plan of one load on one rank: everything that will be read, and where it goes. Plain data, proved when made.

[Note: plan and constants] A plan is data: it can be compared, printed and costed in any process. Tensors in memory and
functions of torch are not such data. They are in a `Constants` object next to the plan (`planner.py`), which refers to
them by number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lowmem_load.planning.expression import Shape
from lowmem_load.planning.reads import Fill, Read, ReadCost
from lowmem_load.planning.regions import Region
from lowmem_load.text import fingerprint


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan, or a part of one, costs its rank.

    `largest_temporary_bytes` is the most that is in memory at one time only to compute or move values: all values that
    one destination needs, and the inputs of the largest. Each reading thread may need as much again for elementwise
    operations.
    """

    needed_bytes: int = 0  # of files, that end up in the filled memory
    read_bytes: int = 0  # needed ones and gaps between them, without headers
    num_reads: int = 0
    staging_bytes: int = 0  # of the buffer that each reading thread needs
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


class HeldValue(NamedTuple):
    """A flat tensor that is in memory before the plan is executed. `origin` says where it comes from."""

    origin: str


class ComputedValue(NamedTuple):
    """The result of an operation on full tensors: function number `function` of the constants, of these inputs."""

    operation: str
    function: int
    inputs: tuple[Fill, ...]
    input_shapes: tuple[Shape, ...]
    shape: Shape
    dtype: torch.dtype


Value = HeldValue | ComputedValue


@dataclass(frozen=True, slots=True)
class SlowPath:
    """A parameter or buffer that cannot be read straight into its final memory."""

    name: str
    reason: str


class Destination(NamedTuple):
    """One piece of memory of a target parameter.

    Without a fill, it is copied once everything is filled. `copied_from` has the number of the destination that has
    these elements as well, and the element at which they start there. `holders` are the ranks that fill the same memory
    alike, this one included; none where that is not known.
    """

    region: Region
    numel: int  # allocated: the region and the padding behind it
    fill: Fill | None
    copied_from: tuple[int, int] | None = None
    holders: Sequence[int] = ()


class CompanionPlan(NamedTuple):
    """A tensor that belongs to a quantized parameter, such as its scales. Every rank keeps all of it."""

    name: str  # as the quantization method calls it
    shape: Shape
    dtype: torch.dtype
    fill: Fill | None  # None if it is made of others
    in_parts: bool = False  # of which the fill is this rank's; it only makes others, and is not kept

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """A target parameter: what this rank keeps of it, and how that is filled. If it is quantized: its packed values."""

    names: tuple[str, ...]  # several if it is tied
    shape: Shape  # of the full parameter, as it is stored
    dtype: torch.dtype
    kind: str  # of the target: "zero3", "replicated", "sharded"
    destinations: tuple[Destination, ...]
    is_recast: bool  # an ordinary load keeps it in another dtype
    is_uninitialised: bool  # nothing gives it a value; then it is zero
    slow_paths: tuple[SlowPath, ...]
    fingerprint: str  # of its expression; equal on all ranks that read the same files
    companions: tuple[CompanionPlan, ...] = ()

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def held_bytes(self) -> int:
        """Bytes of all destinations, padding included."""
        return sum(destination.numel for destination in self.destinations) * self.dtype.itemsize

    @property
    def fills(self) -> list[Fill]:
        """Everything that is filled for it on this rank."""
        of_companions = [companion.fill for companion in self.companions if companion.fill is not None]
        return [destination.fill for destination in self.destinations if destination.fill is not None] + of_companions


class BufferPlan(NamedTuple):
    """A buffer of the model. Every rank keeps all of it."""

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    fill: Fill | None  # None if it is in memory already and is only moved or cast
    slow_paths: tuple[SlowPath, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file whose header the plan was made from."""

    path: str
    nbytes: int
    digest: str  # of its header, which says which tensor lies where
    version: str = field(compare=False)  # see `ByteSource.version`; nodes may have other ones

    @property
    def name(self) -> str:
        """Name in its folder, which nodes may have in different places."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that a load does on one rank.

    Attributes:
        name: what is loaded.
        rank, world_size: of the partition group.
        targets: the distinct parameters, in the order in which they are read.
        buffers: the distinct buffers.
        values: values that steps refer to by number: in memory, or computed.
        files: all files whose headers were read.
        read_to_describe: what transformers had to know while the model was described: operation, and the bytes that
            were read for it. Most loads have none.
        missing_keys, unexpected_keys, mismatched_keys: as in transformers' `output_loading_info`.
        costs: what the plan costs this rank: `needed_bytes` of the files that it keeps, `read_bytes` with the gaps
            between them, `num_reads`, `staging_bytes` for each reading thread, and `largest_temporary_bytes`, the most
            that values computed from several tensors take at one time.
        read_cost: cost of a read that the plan was optimized for.
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
    read_cost: ReadCost = field(default_factory=ReadCost)

    @property
    def partition_bytes(self) -> int:
        """Bytes of partitioned parameters that this rank owns, padding included."""
        return sum(target.held_bytes for target in self.targets if target.kind != REPLICATED)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the parameters that every rank keeps in full."""
        return sum(target.held_bytes for target in self.targets if target.kind == REPLICATED)

    @property
    def num_quantized(self) -> int:
        """Number of quantized parameters."""
        return sum(bool(target.companions) for target in self.targets)

    @property
    def companion_bytes(self) -> int:
        """Bytes of the tensors that belong to quantized parameters. Every rank keeps all of them."""
        return sum(part.nbytes for target in self.targets for part in target.companions if not part.in_parts)

    @property
    def slow_paths(self) -> list[SlowPath]:
        """Name and reason of each parameter or buffer that is converted on full tensors."""
        of_targets = [path for target in self.targets for path in target.slow_paths]
        return of_targets + [path for buffer in self.buffers for path in buffer.slow_paths]

    def values_of(self, fills: Iterable[Fill]) -> set[int]:
        """Return the numbers of all values that some fills need, also indirectly. Internal."""
        numbers: set[int] = set()
        pending = [number for fill in fills for number in fill.needs]
        while pending:
            number = pending.pop()
            if number in numbers:
                continue
            numbers.add(number)
            value = self.values[number]
            if isinstance(value, ComputedValue):
                pending.extend(inner for fill in value.inputs for inner in fill.needs)
        return numbers

    @property
    def fingerprint(self) -> str:
        """Digest that is equal on all ranks that load the same model from the same files in the same way."""
        # Ranks have their targets in the order of their own reads, and files in folders of their own.
        lines = sorted(f"{target.name} {target.kind} {target.fingerprint}" for target in self.targets)
        lines += [f"buffer {buffer.names[0]} {buffer.fingerprint}" for buffer in self.buffers]
        lines += sorted(f"file {file.name} {file.nbytes} {file.digest}" for file in self.files)
        return fingerprint(lines)


def reading_order(fills: Iterable[Fill], name: str) -> tuple[str, int, str]:
    """Return path and byte of the first tensor that is read, then the name: files are read front to back."""
    steps = (step for fill in fills for step in fill.steps)
    first = next((step.tensor for step in steps if isinstance(step, Read)), None)
    return ("", 0, name) if first is None else (first.path, first.start, name)


REPLICATED = "replicated"
"""Kind of a parameter that every rank keeps in full."""

SHARDED = "sharded"
"""Kind of parameters that their owner has sharded over a mesh of DTensors."""


def in_common_order(files: Iterable[PlannedFile]) -> list[PlannedFile]:
    """Return files in an order that is the same on all ranks, although nodes may have them in different folders."""
    return sorted(files, key=lambda file: (file.name, file.digest))
