"""Cuts of a tensor's dims among ranks, and the elements that they leave to one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowmem_load.planning.ranges import Grid

Run = tuple[int, int]
"""Indices `[start, end)` along one dim."""


@dataclass(frozen=True, slots=True)
class Split:
    """One cut of dim `dim` of a tensor among the ranks of one mesh dim."""

    dim: int
    num_chunks: int  # ranks along the mesh dim
    index: int  # of the chunk that this rank holds
    split_factor: int = 1  # groups that the dim is cut into first; each is then cut into chunks, as by `_StridedShard`


def grid_of(shape: Sequence[int], splits: Iterable[Split]) -> Grid:
    """Return the elements of a tensor of `shape` that remain after the splits, in order. Pure.

    Source: torch 2.13 `distributed/tensor/placement_types.py`, `Shard._split_tensor`, `_StridedShard._split_tensor`.
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for split in splits:
        # The groups of a strided split are what a later mesh dim, such as tensor parallelism, gives to its ranks.
        groups = [_chunk(runs[split.dim], split.split_factor, number) for number in range(split.split_factor)]
        runs[split.dim] = [run for group in groups for run in _chunk(group, split.num_chunks, split.index)]
    return Grid(tuple(tuple(_joined(dim)) for dim in runs))


def _chunk(runs: Sequence[Run], num_chunks: int, index: int) -> list[Run]:
    """Return the part of some runs that is chunk `index` of `num_chunks`, by the rule of `torch.chunk`."""
    size = -(-sum(end - start for start, end in runs) // num_chunks)
    first, last = index * size, (index + 1) * size  # positions in the runs laid end to end
    chunk, position = [], 0
    for start, end in runs:
        low, high = max(first, position), min(last, position + end - start)
        if low < high:
            chunk.append((start + low - position, start + high - position))
        position += end - start
    return chunk


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Return runs with neighbours joined; `(0, 0)` if there are none."""
    joined: list[Run] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined or [(0, 0)]
