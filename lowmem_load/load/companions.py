"""Companions of packed weights that the ranks make together: each computes the scales of its blocks, and sends them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lowmem_load.distributed.peers import Progress, computing
from lowmem_load.distributed.side_group import Exchange, SideGroup
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import PlannedPart, fill_planned
from lowmem_load.load.make_plan import PlannedModel
from lowmem_load.planning.load_plan import CompanionPlan
from lowmem_load.quantized.format import packing_of, part_of_rank

BATCH_BYTES = 8 << 20
"""Bytes of companions that are exchanged at a time. A larger one goes by itself."""


class _Shared(NamedTuple):
    name: str
    companion: CompanionPlan


def combine_companions(
    planned: PlannedModel,
    executor: Executor,
    ranks: RankGroup | None = None,
    progress: Callable[[], Progress] | None = None,
) -> None:
    """Make what companions that are filled in parts are for; see `PlannedModel.combined`.

    Collective; local without `ranks`. `progress` is that of the reading.

    Memory: twice `BATCH_BYTES`, or twice the largest.
    """
    shared = [
        _Shared(target.name, companion)
        for target in sorted(planned.plan.targets, key=lambda target: target.name)  # ranks plan in orders of their own
        for companion in target.companions
        if companion.in_parts
    ]
    for batch in _batches(shared):
        values = _made(batch, planned, executor, ranks, progress)
        for (name, companion), whole in zip(batch, values, strict=True):
            packing = packing_of(planned.parameters[name])
            assert packing is not None
            planned.combined[name] = packing.combine({companion.name: whole})


def _batches(shared: Sequence[_Shared]) -> Iterator[list[_Shared]]:
    batch: list[_Shared] = []
    for part in shared:
        if batch and sum(other.companion.nbytes for other in batch) + part.companion.nbytes > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _made(
    batch: Sequence[_Shared],
    planned: PlannedModel,
    executor: Executor,
    ranks: RankGroup | None,
    progress: Callable[[], Progress] | None,
) -> list[torch.Tensor]:
    """Return companions, whole: each rank fills its parts, and sends them."""
    world_size = 1 if ranks is None or ranks.is_fake else ranks.world_size
    sizes = [part_of_rank(math.prod(part.companion.shape), 0, world_size).numel for part in batch]  # the largest
    own = [torch.zeros(size, dtype=part.companion.dtype, device="cpu") for part, size in zip(batch, sizes, strict=True)]
    if ranks is None or world_size == 1:
        _fill(batch, own, planned, executor)
        return own
    with ranks.step("computing the scales of packed weights", progress=progress):
        _fill(batch, own, planned, executor)
        message = torch.cat([values.view(torch.uint8) for values in own])
        side = SideGroup(ranks)
        side.connect()
        exchange = Exchange(side, [message.numel()] * world_size, to=None)
        assert exchange.mine is not None  # all ranks send
        exchange.mine.copy_(message)
    try:
        with ranks.step("sending the scales of packed weights", progress=side.progress(progress or computing())):
            exchange.start()
            exchange.finish(ranks.check)
    finally:
        side.close()
    received = [exchange.received[rank] for rank in range(world_size)]
    whole, first = [], 0
    for part, values in zip(batch, own, strict=True):
        span = slice(first, first + values.nbytes)
        whole.append(torch.cat([sent[span].view(values.dtype) for sent in received])[: math.prod(part.companion.shape)])
        first += values.nbytes
    return whole


def _fill(batch: Sequence[_Shared], values: Sequence[torch.Tensor], planned: PlannedModel, executor: Executor) -> None:
    parts = []
    for part, flat in zip(batch, values, strict=True):
        fill = part.companion.fill
        assert fill is not None  # as of all that are in parts
        parts.append(PlannedPart(f"{part.name}.{part.companion.name}", fill, flat[: fill.numel]))
    fill_planned(parts, planned, executor)
