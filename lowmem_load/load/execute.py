"""Third stage: makes memory and fills it as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem_load.engines.target import Target
from lowmem_load.errors import UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Filling, PlannedPart
from lowmem_load.files.memory import naming_shortage
from lowmem_load.load.make_plan import PlannedModel
from lowmem_load.models import loader
from lowmem_load.phases import no_callback
from lowmem_load.planning.load_plan import BufferPlan, TargetPlan
from lowmem_load.planning.reads import Fill
from lowmem_load.quantized.format import Packing, packing_of
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import share

if TYPE_CHECKING:
    from lowmem_load.load.read_once import ReadOnce


def execute(
    planned: PlannedModel,
    target: Target,
    executor: Executor,
    on_part: Callable[[], object] = no_callback,
    once: ReadOnce | None = None,
) -> None:
    """Replace every symbolic parameter and buffer of the described model by one that holds its values.

    This uses up `planned`. `on_part` is called after each parameter. `once` carries out the reads of ranks that hold
    the same.
    """
    plan, filling = planned.plan, Filling(planned, executor)
    executor.sources.expect(plan.files)
    fill_buffers(planned, target, filling)
    # A value in memory is freed after the last parameter that needs it.
    uses = [plan.values_of(part.fills) for part in plan.targets]
    last_use = {number: position for position, numbers in enumerate(uses) for number in numbers}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    restores: list[Callable[[], None]] = []
    made_bytes, all_bytes = 0, plan.partition_bytes + plan.replicated_bytes
    for position, part in enumerate(plan.targets):
        parameter = planned.parameters.pop(part.name)
        with naming_shortage(f"parameter {part.name}, after {share(made_bytes, all_bytes)}", part.held_bytes):
            made, memory = target.make(part, parameter, filling.finish)
        made_bytes += part.held_bytes
        _check_dtypes(part, (made, *memory))
        for number, (destination, tensor) in enumerate(zip(part.destinations, memory, strict=True)):
            if destination.fill is not None:
                flat = tensor[: destination.fill.numel]
                if once is None or not once.takes(position, number, flat):
                    _start(filling, part.name, destination.fill, flat)
        copies += _copies(part, memory)
        if (packing := packing_of(parameter)) is not None:
            restores.append(restore_later(part, packing, made, planned, target, filling))
        for number in uses[position]:
            if last_use[number] == position:
                planned.constants.tensors.pop(number, None)
        loader.copy_marks(parameter, made)
        for module, name in planned.places.pop(part.name):
            setattr(module, name, made)
        if isinstance(parameter, SymbolicTensor):
            parameter.value.forget()
        on_part()
    if once is not None:
        once.run(plan.name, executor, planned.constants)
    filling.finish()
    executor.sources.check_unchanged()
    for source, copy in copies:  # only now are the sources filled
        copy.copy_(source)
    for restore in restores:
        restore()
    target.finish()


def fill_buffers(planned: PlannedModel, target: Target, filling: Filling) -> None:
    """Start to replace the symbolic buffers of the described model. They are there after `filling.finish`."""
    for buffer in planned.plan.buffers:
        _fill_buffer(buffer, planned, target, filling)


def _start(filling: Filling, name: str, fill: Fill, memory: torch.Tensor) -> None:
    part = PlannedPart(name, fill, memory)
    filling.prove(part)
    filling.start(part)


def _copies(part: TargetPlan, memory: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield source and copy of what several destinations of a target hold."""
    for destination, tensor in zip(part.destinations, memory, strict=True):
        if destination.copied_from is not None:
            number, first = destination.copied_from
            yield memory[number].narrow(0, first, destination.region.numel), tensor[: destination.region.numel]


def _check_dtypes(plan: TargetPlan, tensors: Sequence[torch.Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors} - {plan.dtype}
    if dtypes:
        raise UnsupportedError(
            f"{plan.name}: was made as {', '.join(map(str, dtypes))}, though {plan.dtype} was asked for: somebody has "
            "replaced functions of torch that make tensors; load outside of that"
        )


def restore_later(
    part: TargetPlan,
    packing: Packing,
    made: nn.Parameter,
    planned: PlannedModel,
    target: Target,
    filling: Filling,
) -> Callable[[], None]:
    """Start reading what goes with packed values; return a function that then makes the quantized parameter."""
    read: dict[str, Any] = dict(planned.combined.pop(part.name, {}))
    for companion in part.companions:
        if companion.fill is not None and not companion.in_parts:
            flat = torch.empty(companion.fill.numel, dtype=companion.dtype, device="cpu")
            _start(filling, f"{part.name}.{companion.name}", companion.fill, flat)
            read[companion.name] = flat.view(companion.shape)
    return lambda: packing.restore(part.name, made, read, target.device)


def _fill_buffer(buffer: BufferPlan, planned: PlannedModel, target: Target, filling: Filling) -> None:
    before = planned.buffers.pop(buffer.names[0])
    after = before
    if buffer.fill is not None:
        with naming_shortage(f"buffer {buffer.names[0]}", buffer.fill.numel * buffer.dtype.itemsize):
            flat = torch.empty(buffer.fill.numel, dtype=buffer.dtype, device=target.device)
        _start(filling, buffer.names[0], buffer.fill, flat)
        after = flat.view(buffer.shape)
    elif before.device.type == "cpu" and target.device.type != "cpu":
        flat = torch.empty(before.numel(), dtype=buffer.dtype, device=target.device)
        filling.executor.move(before, flat)
        after = flat.view(buffer.shape)
    elif not before.is_meta:
        after = before.to(device=target.device, dtype=buffer.dtype)
    if after is not before:
        for module, name in planned.places.pop(buffer.names[0]):
            setattr(module, name, after)
