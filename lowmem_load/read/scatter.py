"""Moves elements between flat tensors of one device, as the scatters of a plan say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from lowmem_load.planning.reads import Loop, Scatter


def scatter_elements(scatter: Scatter, source: torch.Tensor, destination: torch.Tensor, shift: int) -> None:
    """Move elements of the flat tensor `source` to `destination`, `shift` elements further on."""
    values = source_elements(scatter, source)
    casts = scatter.casts
    if casts and casts[-1] == destination.dtype:
        casts = casts[:-1]  # copy_ does it without a temporary, which may be twice as large as the staging
    for dtype in casts:
        values = values.to(dtype)
    offset = destination.storage_offset() + scatter.destination_start + shift
    sizes = [loop.size for loop in scatter.loops]
    destination.as_strided(sizes, [loop.destination for loop in scatter.loops], offset).copy_(values)


def source_elements(scatter: Scatter, source: torch.Tensor) -> torch.Tensor:
    """Return the elements of the flat tensor `source` that are moved, as a view with a dim for each loop."""
    sizes, strides = [loop.size for loop in scatter.loops], [loop.source for loop in scatter.loops]
    return source.as_strided(sizes, strides, source.storage_offset() + scatter.source_start)


def gathered(scatter: Scatter) -> Scatter:
    """Return the scatter of what `source_elements` gives, laid out row-major."""
    loops, stride = [], math.prod(loop.size for loop in scatter.loops)
    for loop in scatter.loops:
        stride //= loop.size
        loops.append(Loop(loop.size, stride, loop.destination))
    return replace(scatter, source_start=0, loops=tuple(loops))


def split(scatter: Scatter, max_numel: int) -> Iterator[Scatter]:
    """Yield scatters that move the same elements, at most `max_numel` of them each."""
    first, *inner = scatter.loops or (Loop(1, 1, 1),)
    numel = math.prod(loop.size for loop in inner)
    step = max(1, max_numel // numel)
    for start in range(0, first.size, step):
        size = min(step, first.size - start)
        part = replace(
            scatter,
            source_start=scatter.source_start + start * first.source,
            destination_start=scatter.destination_start + start * first.destination,
            loops=(Loop(size, first.source, first.destination), *inner),
        )
        if size * numel <= max_numel:
            yield part
        else:  # one iteration is too much
            yield from split(replace(part, loops=tuple(inner)), max_numel)
