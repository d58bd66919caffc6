"""Where the elements of each parameter lie in the files of a ZeRO checkpoint. Pure.

[Note: flat groups] Under stage 3 each of N ranks saves one flat tensor per sub-group of the optimizer, in fp32, and one
for each of its moments. The flat tensor holds the rank's partitions of the sub-group's parameters, one after the other.
Every partition is padded to the same length, `ceil(numel / N)` elements. So element `i` of a parameter is element
`offset + i % size` of rank `i // size`. `sub_group_size` counts elements of a rank, so the sub-groups depend on N too:
parameters are found by the names and shapes that the file gives for each sub-group, never by its number. Of each frozen
parameter, each rank's file of model states has one padded fragment.

[Note: chains] Stages 1 and 2 put the replicated parameters of each optimizer group one after the other, pad each of
them and the end, and cut the result into N flat tensors of equal length. The fp32 values are saved without the padding
at the end, so the last tensors may be shorter or empty. Moments are saved with it.

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
from lowmem_load.planning.ranges import FlatRange, partition_numel

FP32 = "fp32"
"""Key of a parameter's values, beside the keys of the moments. Values of frozen parameters may have 16 bits."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The elements of one parameter, or of one of its moments, in the flat tensors of all ranks.

    Element `i` of the parameter is element `offset + (i + shift) % size` of the flat tensor of rank
    `(i + shift) // size`. See [Note: flat groups], where `shift` is 0, and [Note: chains], where `offset` is 0.

    Attributes:
        flats: flat tensor of each rank.
        numel: elements of the parameter.
        size: elements of a rank that belong together.
        offset: element of each flat tensor at which they start.
        shift: element of all flat tensors together at which the parameter starts.
    """

    flats: tuple[Source, ...]
    numel: int
    size: int
    offset: int = 0
    shift: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.flats[0].dtype

    def part(self, wanted: FlatRange) -> Expression:
        """Return the elements `wanted` of the parameter: a run of each file that holds some of them."""
        start, end = self.shift + wanted.start, self.shift + wanted.end
        runs: list[Source] = []
        for rank in range(start // self.size, -(-end // self.size)) if wanted.numel else ():
            first, last = max(start, rank * self.size), min(end, (rank + 1) * self.size)
            runs.append(_run(self.flats[rank], self.offset + first - rank * self.size, last - first))
        if len(runs) == 1:
            return runs[0]
        return concat(runs, 0) if runs else _run(self.flats[0], 0, 0)


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter of a checkpoint.

    Attributes:
        name: in the model that was saved.
        shape: of the whole parameter.
        pieces: of its values (`FP32`) and of each of the optimizer's moments.
        group: number of its sub-group; None for a parameter that the optimizer did not have.
        scalars: other values that the optimizer keeps for the sub-group: the number of steps.
    """

    name: str
    shape: Shape
    pieces: Mapping[str, Pieces]
    group: int | None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
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
    paddings: Sequence[Sequence[int]] | None = None,
) -> dict[str, SavedParameter]:
    """Return the trained parameters by name.

    Args:
        groups: names and shapes of each group's parameters.
        flats: flat tensors by key, rank and group. Under stage 3 their lengths are those of `group_numels`.
        scalars: other values of each group.
        paddings: elements behind each parameter of each group under stages 1 and 2, see [Note: chains]; None under
            stage 3, see [Note: flat groups].

    Raises:
        CheckpointError: a flat tensor of stage 1 or 2 is too short.
    """
    found: dict[str, SavedParameter] = {}
    for number, group in enumerate(groups):
        of_ranks = {key: tuple(ranks[number] for ranks in by_rank) for key, by_rank in flats.items()}
        start = needed = 0
        for position, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            if paddings is None:
                size = partition_numel(numel, len(of_ranks[FP32]))
                pieces = {key: Pieces(ranks, numel, size, offset=start) for key, ranks in of_ranks.items()}
                start += size
            else:
                pieces = {key: Pieces(ranks, numel, ranks[0].shape[0], shift=start) for key, ranks in of_ranks.items()}
                needed = start + numel
                start = needed + paddings[number][position]
            found[name] = SavedParameter(name, tuple(shape), pieces, number, scalars[number])
        for ranks in of_ranks.values() if paddings is not None else ():
            _check_chain(ranks, needed)
    return found


def _check_chain(flats: Sequence[Source], needed: int) -> None:
    """Raise CheckpointError unless the flat tensors hold a group's elements, and all but the last ones are full."""
    size = max(flat.shape[0] for flat in flats)
    for rank, flat in enumerate(flats):
        mine = min(max(0, needed - rank * size), size)
        if flat.shape[0] < mine or needed > size * len(flats):
            raise CheckpointError(
                f"{flat.path}: {flat.name} has {flat.shape[0]} elements, but {needed} of {len(flats)} ranks with at "
                f"most {size} each are expected, as the model states say"
            )


def place_fragments(name: str, shape: Shape, fragments: Sequence[Source]) -> SavedParameter:
    """Return a frozen parameter: one padded fragment per rank, or one fragment that is the whole parameter."""
    numel = math.prod(shape)
    pieces = Pieces(tuple(fragments), numel, partition_numel(numel, len(fragments)))
    return SavedParameter(name, tuple(shape), {FP32: pieces}, None)


def _run(flat: Source, first: int, numel: int) -> Source:
    return replace(flat, start=flat.start + first * flat.dtype.itemsize, shape=(numel,))
