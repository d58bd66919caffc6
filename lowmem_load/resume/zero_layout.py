"""Where the elements of each parameter lie in a checkpoint of ZeRO-3. Pure.

[Note: flat groups] Each of N ranks has saved one flat tensor per sub-group of the optimizer, in fp32, and one for each
of its moments. A sub-group's flat tensor holds this rank's partitions of its parameters, one after the other, each with
the padding that makes all N of them equally long: `ceil(numel / N)` elements. So element `i` of a parameter is element
`offset + i % size` of rank `i // size`. Which parameters form a sub-group depends on N as well (`sub_group_size` counts
elements of a rank), so nothing is looked for by its number: the file says the names and shapes of each sub-group.
Frozen parameters have one padded fragment in each rank's file of model states.

[Note: chains] Stages 1 and 2 put the whole parameters of each of the optimizer's groups one behind the other, with some
padding behind each and at the end, and cut that into N equally long flat tensors. Those of the fp32 values are saved
without the padding at the end, so the last of them may be shorter, or empty; those of moments with it.

Source: deepspeed 0.19.8 `runtime/zero/stage3.py`, `_create_fp16_sub_groups` and `_rigid_state_dict`;
`runtime/zero/stage_1_and_2.py`, `__init__` and `state_dict`; `runtime/engine.py`, `_get_zero_param_shapes` and
`_get_zero_frozen_param_attributes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.planning.expression import Expression, Shape, Source, concat
from lowmem_load.planning.ranges import FlatRange, partition_numel, partition_range

FP32 = "fp32"
"""Key of the values of a parameter, in fp32 if it was trained, beside those of the optimizer's moments."""


@dataclass(frozen=True, slots=True)
class _Flats:
    """The elements of one parameter, or of one of its moments, in flat tensors in the files of all ranks."""

    flats: tuple[Source, ...]
    offset: int
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.flats[0].dtype


@dataclass(frozen=True, slots=True)
class Pieces(_Flats):
    """The elements of one parameter, or of one of its moments, of which each rank's flat tensor holds a partition.

    Attributes:
        flats: the flat tensor of each rank.
        offset: element of it at which the partition starts.
        numel: of the whole.
    """

    def part(self, wanted: FlatRange) -> Expression:
        """Return what elements `wanted` of the whole are made of: runs of the files of the ranks that hold some."""
        size = partition_numel(self.numel, len(self.flats))
        parts: list[Source] = []
        for rank in range(wanted.start // size, -(-wanted.end // size)) if wanted.numel else ():
            held = partition_range(self.numel, rank, len(self.flats))
            first, last = max(wanted.start, held.start), min(wanted.end, held.end)
            parts.append(_run(self.flats[rank], self.offset + first - held.start, last - first))
        return _joined(parts, self.flats)


@dataclass(frozen=True, slots=True)
class Chain(_Flats):
    """The elements of one parameter, or of one of its moments, in flat tensors that lie one behind the other.

    Attributes:
        flats: the flat tensor of each rank: all of one length, but for the last ones.
        offset: element of all of them together at which the parameter starts.
        numel: of the parameter.
    """

    def part(self, wanted: FlatRange) -> Expression:
        """Return what elements `wanted` of the parameter are made of: runs of the files of the ranks that hold some."""
        (size,) = self.flats[0].shape
        parts: list[Source] = []
        start, end = self.offset + wanted.start, self.offset + wanted.end
        for rank in range(start // size, -(-end // size)) if wanted.numel else ():
            first, last = max(start, rank * size), min(end, (rank + 1) * size)
            parts.append(_run(self.flats[rank], first - rank * size, last - first))
        return _joined(parts, self.flats)


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter as a checkpoint has it.

    Attributes:
        name: as the model had it.
        shape: of the whole.
        pieces: of its values (`FP32`) and of each of the optimizer's moments.
        group: number of its sub-group; None for one that the optimizer did not have.
        scalars: what else the optimizer keeps for its sub-group: the number of steps.
    """

    name: str
    shape: Shape
    pieces: Mapping[str, Pieces | Chain]
    group: int | None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.pieces[FP32].dtype


def group_numels(groups: Sequence[Mapping[str, Shape]], world_size: int) -> list[int]:
    """Return how many elements each sub-group's flat tensor has on a rank, padding included."""
    return [sum(partition_numel(math.prod(shape), world_size) for shape in group.values()) for group in groups]


def place_groups(
    groups: Sequence[Mapping[str, Shape]],
    flats: Mapping[str, Sequence[Sequence[Source]]],
    scalars: Sequence[Mapping[str, Any]],
) -> dict[str, SavedParameter]:
    """Return the trained parameters by name.

    `flats` has flat tensors by key, rank and sub-group, as long as `group_numels` says.
    """
    found: dict[str, SavedParameter] = {}
    for number, group in enumerate(groups):
        of_ranks = {key: tuple(ranks[number] for ranks in by_rank) for key, by_rank in flats.items()}
        offset = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            pieces = {key: Pieces(ranks, offset, numel) for key, ranks in of_ranks.items()}
            found[name] = SavedParameter(name, tuple(shape), pieces, number, scalars[number])
            offset += partition_numel(numel, len(of_ranks[FP32]))
    return found


def place_chains(
    groups: Sequence[Mapping[str, Shape]],
    paddings: Sequence[Sequence[int]],
    flats: Mapping[str, Sequence[Sequence[Source]]],
    scalars: Sequence[Mapping[str, Any]],
) -> dict[str, SavedParameter]:
    """Return the trained parameters by name. See [Note: chains].

    `flats` has flat tensors by key, rank and group; `paddings` the elements that lie behind each parameter.

    Raises:
        CheckpointError: a flat tensor is too short.
    """
    found: dict[str, SavedParameter] = {}
    for number, group in enumerate(groups):
        of_ranks = {key: tuple(ranks[number] for ranks in by_rank) for key, by_rank in flats.items()}
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[number], strict=True):
            numel = math.prod(shape)
            chains = {key: Chain(ranks, offset, numel) for key, ranks in of_ranks.items()}
            found[name] = SavedParameter(name, tuple(shape), chains, number, scalars[number])
            offset += numel + padding
        for ranks in of_ranks.values():
            _check_chain(ranks, offset - padding if group else 0)
    return found


def _check_chain(flats: Sequence[Source], needed: int) -> None:
    """Raise CheckpointError unless flat tensors together have the elements of a group, and all full ones one length."""
    size = max(flat.shape[0] for flat in flats)
    for rank, flat in enumerate(flats):
        mine = min(max(0, needed - rank * size), size)
        if flat.shape[0] < mine or needed > size * len(flats):
            raise CheckpointError(
                f"{flat.path}: {flat.name} has {flat.shape[0]} elements, but {needed} of {len(flats)} ranks with at "
                f"most {size} each are expected, as the model states say"
            )


def place_fragments(name: str, shape: Shape, fragments: Sequence[Source]) -> SavedParameter:
    """Return a frozen parameter: one padded fragment per rank, or one that is whole."""
    return SavedParameter(name, tuple(shape), {FP32: Pieces(tuple(fragments), 0, math.prod(shape))}, None)


def _joined(parts: Sequence[Source], flats: Sequence[Source]) -> Expression:
    if len(parts) == 1:
        return parts[0]
    return concat(parts, 0) if parts else _run(flats[0], 0, 0)


def _run(flat: Source, first: int, numel: int) -> Source:
    return replace(flat, start=flat.start + first * flat.dtype.itemsize, shape=(numel,))
