"""What tests of reading together share: a tensor in a file, every rank's plan of it, and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import Costs, Destination, LoadPlan, TargetPlan
from lowmem_load.planning.nest import Nest
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import partition_range
from lowmem_load.planning.reads import Fill, ReadCost, ReadLimits

SHAPE = (5, 12, 30)
NUMEL = 5 * 12 * 30
START = 41
"""Byte of the file at which the tensor starts: no multiple of anything."""

VALUES = torch.arange(NUMEL, dtype=torch.int32).reshape(SHAPE)
CONTENT = b"\xff" * START + VALUES.numpy().tobytes()
"""Of the file."""


def leaf(path: Path | str = "data") -> ex.Source:
    return ex.Source(str(path), "w", START, SHAPE, torch.int32)


def fills(node: ex.Expression, world_size: int, limits: ReadLimits) -> tuple[Planner, list[Fill]]:
    """Every rank's plan of its partition; one planner, so that values and functions have one number."""
    planner = Planner(limits)
    ranges = [partition_range(ex.numel(node), rank, world_size) for rank in range(world_size)]
    return planner, [planner.plan_fill("w", node, each) for each in ranges]


def plan_of(node: ex.Expression, world_size: int, cost: ReadCost, rank: int = 0) -> LoadPlan:
    """The plan of a model of one parameter."""
    fill = fills(node, world_size, ReadLimits(max_gap_bytes=cost.max_gap_bytes))[1][rank]
    destination = Destination(partition_range(ex.numel(node), rank, world_size), fill.numel, fill)
    target = TargetPlan(("w",), node.shape, node.dtype, "zero3", (destination,), False, False, (), "")
    return LoadPlan("model", rank, world_size, (target,), (), (), (), (), (), (), (), Costs(), cost)


def move(nest: Nest, values: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """Moves elements; returns what was there before."""
    sizes = [axis.size for axis in nest.axes]
    offset = values.storage_offset() + nest.source
    source = values.as_strided(sizes, [axis.source for axis in nest.axes], offset)
    offset = destination.storage_offset() + nest.destination
    place = destination.as_strided(sizes, [axis.destination for axis in nest.axes], offset)
    before = place.clone()
    place.copy_(source)
    return before


def in_threads(num_ranks: int, act: Callable[[int], object]) -> list[Any]:
    """Returns what `act` returns or raises for each rank, each in a thread."""
    found: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found
