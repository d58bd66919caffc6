"""Moves elements between flat tensors of one device, as the nests of a plan say."""

from __future__ import annotations

import torch

from lowmem_load.planning.nest import Nest


def scatter_elements(nest: Nest, source: torch.Tensor, destination: torch.Tensor, shift: int) -> None:
    """Move elements of the flat tensor `source` to `destination`, `shift` elements further on."""
    values = source_elements(nest, source)
    casts = nest.casts
    if casts and casts[-1] == destination.dtype:
        casts = casts[:-1]  # copy_ does it without a temporary, which may be twice as large as the staging
    for dtype in casts:
        values = values.to(dtype)
    offset = destination.storage_offset() + nest.destination + shift
    sizes = [axis.size for axis in nest.axes]
    destination.as_strided(sizes, [axis.destination for axis in nest.axes], offset).copy_(values)


def source_elements(nest: Nest, source: torch.Tensor) -> torch.Tensor:
    """Return the elements of the flat tensor `source` that are moved, as a view with a dim for each axis."""
    sizes, strides = [axis.size for axis in nest.axes], [axis.source for axis in nest.axes]
    return source.as_strided(sizes, strides, source.storage_offset() + nest.source)
