"""Third stage: makes memory and fills it as the plan says, within a step of all ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.engines.target import Target
from lowmem_load.files.executor import Executor, refuse_left
from lowmem_load.files.fill import Filling, PlannedPart, fill_planned
from lowmem_load.files.memory import naming_shortage
from lowmem_load.load.make_plan import PlannedModel
from lowmem_load.load.read_once import ReadOnce
from lowmem_load.models import loader
from lowmem_load.phases import Phases, Progress, computing, no_callback, progress_bar
from lowmem_load.planning.load_plan import CompanionPlan, TargetPlan
from lowmem_load.planning.reads import Fill
from lowmem_load.planning.regions import partition_numel
from lowmem_load.quantized.format import packing_of
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import share
from lowmem_load.weights_out.buckets import in_batches

BATCH_BYTES = 8 << 20
"""Bytes of companions that are exchanged at a time. A larger one goes by itself."""

SAMPLE_S = 5e-3
"""Between two samples of the memory in use, which take 10 to 60 us each."""


def execute(
    planned: PlannedModel,
    target: Target,
    executor: Executor,
    once: ReadOnce | None = None,
    on_part: Callable[[], object] = no_callback,
) -> None:
    """Replace every symbolic parameter and buffer of the described model by one that has its values.

    This uses up `planned`. Collective: of the ranks of `once`, by default this process alone. `on_part` is called after
    each parameter.
    """
    once = once or ReadOnce(Alone(), [""], "off")
    plan, filling = planned.plan, Filling(planned.plan.values, planned.constants, executor)
    executor.sources.expect(plan.files)
    combined = _combine_companions(planned, executor, once)
    _fill_buffers(planned, target, filling)
    # A value in memory is freed after the last parameter that needs it.
    uses = [plan.values_of(part.fills) for part in plan.targets]
    last_use = {number: position for position, numbers in enumerate(uses) for number in numbers}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # source and copy of what is in several destinations
    restores: list[Callable[[], None]] = []
    made_bytes, all_bytes = 0, plan.partition_bytes + plan.replicated_bytes
    for position, part in enumerate(plan.targets):
        slot = planned.parameters.pop(part.name)
        parameter, packing = slot.tensor, packing_of(slot.tensor)
        with naming_shortage(f"parameter {part.name}, after {share(made_bytes, all_bytes)}", part.held_bytes):
            made, memory = target.make(part, parameter, filling.finish)
        made_bytes += part.held_bytes
        for number, (destination, tensor) in enumerate(zip(part.destinations, memory, strict=True)):
            if destination.fill is not None:
                planned_part = PlannedPart(part.name, destination.fill, tensor[: destination.fill.numel])
                filling.prove(planned_part)
                if not once.takes(position, number, planned_part.memory):
                    filling.start(planned_part)
            if destination.copied_from is not None:
                origin, first = destination.copied_from
                refuse_left(part.name, tensor)
                numel = destination.region.numel
                copies.append((memory[origin].narrow(0, first, numel), tensor[:numel]))
        if packing is not None:
            read = {**combined.pop(part.name, {}), **_read_companions(part, filling)}
            restores.append(functools.partial(packing.restore, part.name, made, read, target.device))
        for number in uses[position]:
            if last_use[number] == position:
                planned.constants.tensors.pop(number, None)
        loader.copy_marks(parameter, made)
        slot.put(made)
        if isinstance(parameter, SymbolicTensor):
            parameter.value.forget()
        on_part()
    once.run(plan.name, executor, planned.constants)
    filling.finish()
    executor.sources.check_unchanged()
    for source, copy in copies:  # only now are the sources filled
        copy.copy_(source)
    for restore in restores:
        restore()
    target.finish()


def _fill_buffers(planned: PlannedModel, target: Target, filling: Filling) -> None:
    """Start to replace the symbolic buffers of the described model. They are there after `filling.finish`."""
    for buffer in planned.plan.buffers:
        name, slot = buffer.names[0], planned.buffers.pop(buffer.names[0])
        before = after = slot.tensor
        if buffer.fill is not None:
            with naming_shortage(f"buffer {name}", buffer.fill.numel * buffer.dtype.itemsize):
                flat = torch.empty(buffer.fill.numel, dtype=buffer.dtype, device=target.device)
            _start(filling, name, buffer.fill, flat)
            after = flat.view(buffer.shape)
        elif before.device.type == "cpu" and target.device.type != "cpu":
            flat = torch.empty(before.numel(), dtype=buffer.dtype, device=target.device)
            filling.executor.move(before, flat)
            after = flat.view(buffer.shape)
        elif not before.is_meta:
            after = before.to(device=target.device, dtype=buffer.dtype)
        if after is not before:
            slot.put(after)


def _start(filling: Filling, name: str, fill: Fill, memory: torch.Tensor) -> None:
    part = PlannedPart(name, fill, memory)
    filling.prove(part)
    filling.start(part)


def _read_companions(part: TargetPlan, filling: Filling) -> dict[str, torch.Tensor]:
    """Start to read what goes with packed values; return it by its names. It is there after `filling.finish`."""
    read: dict[str, torch.Tensor] = {}
    for companion in part.companions:
        if companion.fill is not None and not companion.in_parts:
            flat = torch.empty(companion.fill.numel, dtype=companion.dtype, device="cpu")
            _start(filling, f"{part.name}.{companion.name}", companion.fill, flat)
            read[companion.name] = flat.view(companion.shape)
    return read


# -- companions of packed weights that the ranks make together -------------------------------------------------------


def _combine_companions(planned: PlannedModel, executor: Executor, once: ReadOnce) -> dict[str, Mapping[str, Any]]:
    """Return what companions that are filled in parts are for, by the names of their parameters.

    Each rank computes the scales of its blocks, and sends them. Collective. Memory: `BATCH_BYTES`, or the largest.
    """
    combined: dict[str, Mapping[str, Any]] = {}
    shared = [
        (target.name, companion)
        for target in sorted(planned.plan.targets, key=lambda target: target.name)  # ranks plan in orders of their own
        for companion in target.companions
        if companion.in_parts
    ]
    if not shared:
        return combined
    ranks, progress = once.ranks, once.progress or computing()
    others = Alone() if ranks.is_fake else ranks
    with contextlib.closing(SideGroup(others)) as side:
        for number, batch in enumerate(in_batches(shared, lambda one: one[1].nbytes, BATCH_BYTES)):
            with ranks.step("computing the scales of packed weights", progress=progress):
                if not number:
                    side.connect()
                memory, parts = _in_parts(batch, others.world_size)
                for (name, companion), of_ranks in zip(batch, parts, strict=True):
                    assert companion.fill is not None  # as of all that are in parts
                    mine = of_ranks[side.place][: companion.fill.numel]
                    filling = Filling(planned.plan.values, planned.constants, executor)
                    fill_planned([PlannedPart(f"{name}.{companion.name}", companion.fill, mine)], filling)
            with ranks.step("sending the scales of packed weights", progress=side.progress(progress)):
                for rank, message in enumerate(memory):
                    side.broadcast(message, rank)
                side.finish(ranks.check)
            for (name, companion), of_ranks in zip(batch, parts, strict=True):
                whole = torch.cat(of_ranks)[: math.prod(companion.shape)]
                packing = packing_of(planned.parameters[name].tensor)
                assert packing is not None  # as of all that have companions
                combined[name] = packing.combine({companion.name: whole})
    return combined


def _in_parts(
    batch: Sequence[tuple[str, CompanionPlan]], world_size: int
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return memory for companions, a row for each rank's message, and the parts of each companion in it."""
    numels = [partition_numel(math.prod(companion.shape), world_size) for _, companion in batch]
    nbytes = [numel * companion.dtype.itemsize for numel, (_, companion) in zip(numels, batch, strict=True)]
    memory = torch.zeros(world_size, sum(nbytes), dtype=torch.uint8, device="cpu")
    pieces = torch.split(memory, nbytes, dim=1)
    return memory, [
        [row.view(companion.dtype) for row in piece] for piece, (_, companion) in zip(pieces, batch, strict=True)
    ]


# -- the step in which ranks read: of loads, of fills of lazy models, and of resumes ----------------------------------


class Reading:
    """What one rank has read and made within `reading`."""

    def __init__(self, ranks: RankGroup, executors: Sequence[Executor], needed_bytes: int, reports: Sequence[Phases]):
        self._ranks, self._executors, self._needed_bytes, self._reports = ranks, executors, needed_bytes, reports
        self._read_before, self._num_parts, self._next_sample_s = self._read_bytes(), 0, 0.0
        self.num_waits: Callable[[], int] = lambda: 0  # for other ranks, which is progress, too

    def on_part(self) -> None:
        """Note that a part of memory is there; raise if another rank has failed."""
        self._num_parts += 1
        self._ranks.check()
        if (now_s := time.perf_counter()) >= self._next_sample_s:
            self._next_sample_s = now_s + SAMPLE_S
            for report in self._reports:
                report.sample_memory()

    def progress(self) -> Progress:
        """Return how far this rank is. In any thread."""
        read_bytes = self._read_bytes() - self._read_before
        path = next((executor.stats.path for executor in reversed(self._executors) if executor.stats.path), "no file")
        read = f"{share(read_bytes, self._needed_bytes)} read, last from {path}"
        amount = read_bytes + self._num_parts + self.num_waits()
        return Progress(amount, f"{self._num_parts} tensors begun, {read}")

    def _read_bytes(self) -> int:
        return sum(executor.stats.read_bytes for executor in self._executors)


@contextlib.contextmanager
def reading(
    ranks: RankGroup,
    name: str,
    executors: Sequence[Executor],
    needed_bytes: int,
    reports: Sequence[Phases] = (),
    *,
    bar: str,
    title: str = "reading",
) -> Iterator[Reading]:
    """A step in which executors read for parts of memory, with a progress bar. Collective.

    Reads end when another rank fails.
    """
    state = Reading(ranks, executors, needed_bytes, reports)
    with (
        ranks.step(title, name=name, progress=state.progress),
        progress_bar(needed_bytes, bar, ranks.rank) as update,
        contextlib.ExitStack() as after,
    ):

        def on_bytes(num_bytes: int) -> None:
            update(num_bytes)
            ranks.check()

        for executor in executors:
            after.callback(_watch, executor, executor.on_bytes, executor.tasks.check)
            _watch(executor, on_bytes, ranks.check)
        yield state


def _watch(executor: Executor, on_bytes: Callable[[int], object], check: Callable[[], object]) -> None:
    executor.on_bytes, executor.tasks.check = on_bytes, check
