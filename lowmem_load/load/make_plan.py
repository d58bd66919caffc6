"""Second stage: a proved plan of every parameter and buffer of a described model, for one rank. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lowmem_load.engines.target import Layout
from lowmem_load.engines.zero3_target import refuse_partitioned
from lowmem_load.errors import UnsupportedError
from lowmem_load.load.describe import Described
from lowmem_load.models.quantizers import packed_format
from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import BufferPlan, Destination, LoadPlan, SlowPath, TargetPlan, reading_order
from lowmem_load.planning.planner import Constants, Planner
from lowmem_load.planning.reads import Fill, Read, ReadCost, ReadLimits
from lowmem_load.planning.regions import FlatRange, Region
from lowmem_load.quantized.format import packing_of, plan_companions
from lowmem_load.symbolic.initialise import INITIALISED, UNINITIALISED
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import fingerprint


@dataclass(slots=True)
class Slot:
    """A described parameter or buffer, with all of its names, and its places: modules, and its name in each."""

    tensor: Any
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self, made: torch.Tensor) -> None:
        """Put another tensor into all places."""
        for module, name in self.places:
            setattr(module, name, made)


@dataclass(slots=True)
class PlannedModel:
    """A plan, and the described parameters and buffers by the first of their names."""

    plan: LoadPlan
    constants: Constants  # what the plan's steps refer to by number
    parameters: dict[str, Slot]
    buffers: dict[str, Slot]


def make_plan(described: Described, rank: int, cost: ReadCost | None = None) -> PlannedModel:
    """Plan every parameter and buffer of a described model for one rank; raise for what cannot be planned.

    Pure: nothing is read or allocated.
    """
    model, target = described.model, described.target
    refuse_partitioned(model)
    described.constructor.check(described.name, model)
    packed_format(model).check(described.name, model)
    target.check(model)
    cost = cost or ReadCost()
    limits = ReadLimits(max_gap_bytes=cost.max_gap_bytes)
    planner = Planner(limits._replace(direct_bytes=cost.request_bytes) if cost.request_bytes else limits)
    parameters, buffers = _distinct(model, "_parameters"), _distinct(model, "_buffers")
    place = rank, described.settings.world_size
    targets = [
        _plan_target(planner, slot, target.layout(name, slot.tensor), place) for name, slot in parameters.items()
    ]
    targets.sort(key=lambda plan: reading_order(plan.fills, plan.name))  # so that files are read front to back
    on_host = target.device.type == "cpu"
    fp32 = {id(buffer) for buffer in target.fp32_buffers(model)}
    buffer_plans = [
        _plan_buffer(planner, slot, keeps_fp32=id(slot.tensor) in fp32, on_host=on_host) for slot in buffers.values()
    ]
    costs = planner.costs(fill for plan in targets for fill in plan.fills)
    costs = costs.plus(planner.costs(plan.fill for plan in buffer_plans if plan.fill is not None))
    load_plan = LoadPlan(
        name=described.name,
        rank=rank,
        world_size=described.settings.world_size,
        targets=tuple(targets),
        buffers=tuple(buffer_plans),
        values=tuple(planner.values),
        files=described.files,
        read_to_describe=described.read_to_describe,
        missing_keys=tuple(sorted(described.info["missing_keys"])),
        unexpected_keys=tuple(sorted(described.info["unexpected_keys"])),
        mismatched_keys=tuple(described.info["mismatched_keys"]),
        costs=costs,
        read_cost=cost,
    )
    return PlannedModel(load_plan, planner.constants, parameters, buffers)


def _distinct(model: nn.Module, kind: Literal["_parameters", "_buffers"]) -> dict[str, Slot]:
    """Return the distinct parameters or buffers by their first names.

    They are those that the modules have: a `named_parameters` of a class may leave some out, or give them other names.
    """
    slots: dict[int, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for last, tensor in vars(module)[kind].items():
            if tensor is not None:
                slot = slots.setdefault(id(tensor), Slot(tensor))
                slot.names.append(f"{prefix}.{last}" if prefix else last)
                slot.places.append((module, last))
    return {slot.names[0]: slot for slot in slots.values()}


def _plan_target(planner: Planner, slot: Slot, layout: Layout, place: tuple[int, int]) -> TargetPlan:
    """Plan a parameter for a rank; `place` has its number, and the number of ranks."""
    name, parameter = slot.names[0], slot.tensor
    expression = _described(name, parameter)
    is_recast = expression.dtype != layout.dtype
    leaves = ex.leaves(expression)
    # Ranks agree on the full expression; below, a rank may drop a cast of the loader for its own dtype.
    digest = fingerprint([_line(parameter, leaves), f"{layout.dtype} {layout.kind} {len(layout.regions)}"])
    if is_recast and isinstance(expression, ex.Cast) and not layout.keeps_casts:  # the loader's: DeepSpeed casts once
        expression = expression.part
    stored = ex.cast(expression, layout.dtype)
    destinations = tuple(_destinations(planner, name, stored, layout))
    fills = [destination.fill for destination in destinations if destination.fill is not None]
    slow_paths = tuple(_slow_paths(name, leaves, fills))
    return TargetPlan(
        names=tuple(slot.names),
        shape=tuple(parameter.shape),
        dtype=layout.dtype,
        kind=layout.kind,
        destinations=destinations,
        is_recast=is_recast,
        is_uninitialised=any(isinstance(leaf, ex.Computed) and leaf.operation == UNINITIALISED for leaf in leaves),
        slow_paths=slow_paths,
        fingerprint=digest,
        companions=plan_companions(planner, name, parameter, *place),
    )


def _destinations(planner: Planner, name: str, stored: ex.Expression, layout: Layout) -> Iterator[Destination]:
    """Yield the plan of each piece of memory; what another one has, too, is copied from there."""
    for number, (region, size) in enumerate(zip(layout.regions, layout.numels, strict=True)):
        copied_from = _holder(layout.regions, number)
        fill = None
        if copied_from is None:
            fill = planner.plan_fill(name, stored, region, on_host=layout.on_host)
        yield Destination(region, size, fill, copied_from, layout.holders[number] if layout.holders else ())


def _holder(regions: Sequence[Region], number: int) -> tuple[int, int] | None:
    """Return the first other region that has all of this one, and the element at which this one starts there."""
    this = regions[number]
    for other_number, other in enumerate(regions):
        is_copied = other.numel > this.numel or (other.numel == this.numel and other_number < number)
        if not (is_copied and this.numel and isinstance(this, FlatRange) and isinstance(other, FlatRange)):
            continue
        if other.start <= this.start and this.end <= other.end:
            return other_number, this.start - other.start
    return None


def _described(name: str, parameter: torch.Tensor) -> ex.Expression:
    """Return what a parameter is made of; raise UnsupportedError if it has no value."""
    expression = _expression_of(parameter)
    if expression.dtype != parameter.dtype:
        raise UnsupportedError(
            f"{name}: came out as {parameter.dtype}, though what it is made of is {expression.dtype}: somebody has "
            "replaced functions of torch that make tensors; load outside of that"
        )
    if parameter.is_meta and not isinstance(parameter, SymbolicTensor):
        raise UnsupportedError(f"{name}: transformers gave it no value, neither from the files nor by initializing it")
    return expression


def _expression_of(tensor: torch.Tensor) -> ex.Expression:
    return (tensor.initialised or tensor.expression) if isinstance(tensor, SymbolicTensor) else ex.hold(tensor)


def _plan_buffer(planner: Planner, slot: Slot, *, keeps_fp32: bool, on_host: bool) -> BufferPlan:
    buffer, name, expression = slot.tensor, slot.names[0], _expression_of(slot.tensor)
    dtype, leaves, fills = torch.float32 if keeps_fp32 else buffer.dtype, ex.leaves(expression), list[Fill]()
    if isinstance(buffer, SymbolicTensor):
        while keeps_fp32 and isinstance(expression, ex.Cast):  # upcasting later would not give back what a cast took
            expression = expression.part
        all_of_it = FlatRange(0, ex.numel(expression))
        fills.append(planner.plan_fill(name, ex.cast(expression, dtype), all_of_it, on_host=on_host))
    return BufferPlan(
        names=tuple(slot.names),
        shape=tuple(buffer.shape),
        dtype=dtype,
        fill=fills[0] if fills else None,
        slow_paths=tuple(_slow_paths(name, leaves, fills)),
        fingerprint=fingerprint([_line(buffer, leaves)]),
    )


def _slow_paths(name: str, leaves: list[Any], fills: list[Fill]) -> Iterator[SlowPath]:
    """Yield why a parameter is not read straight into its partition."""
    for leaf in leaves:
        if isinstance(leaf, ex.Held) and leaf.origin == INITIALISED:
            yield SlowPath(name, "initialized on this rank: not in the checkpoint")
        elif isinstance(leaf, ex.Held) and leaf.origin != ex.IN_MEMORY:
            yield SlowPath(name, f"made of {leaf.origin}")
        elif isinstance(leaf, ex.Computed) and leaf.operation != UNINITIALISED:
            yield SlowPath(name, f"{leaf.operation} ran on full tensors")
    if any(_is_scattered(step) for fill in fills for step in fill.steps):
        yield SlowPath(name, "gathered from scattered bytes")


def _is_scattered(step: object) -> bool:
    """Return whether a step reads elements that are not adjacent, or gaps between them."""
    if not isinstance(step, Read):
        return False
    has_runs = any(axis.source == axis.destination == 1 for axis in (*step.outer, *step.nest.axes))
    return not has_runs or step.read_bytes > step.needed_bytes_each * step.num_reads


def _line(tensor: torch.Tensor, leaves: Sequence[ex.Leaf]) -> str:
    """Describe a tensor and its leaves. Ranks that differ here have different files or arguments."""
    parts = [f"{tuple(tensor.shape)} {tensor.dtype}"]
    if (packing := packing_of(tensor)) is not None:
        parts.append(packing.method)
        others = (*packing.companions.values(), *packing.in_parts.values())
        leaves = [*leaves, *(leaf for other in others for leaf in ex.leaves(other))]
    for leaf in leaves:
        parts.append(type(leaf).__name__)
        if isinstance(leaf, ex.Source):
            parts.append(f"{leaf.path.rpartition('/')[2]} {leaf.name} {leaf.start} {leaf.shape} {leaf.dtype}")
        elif isinstance(leaf, ex.Held):
            parts.append(leaf.origin)
        elif isinstance(leaf, ex.Computed | ex.Elementwise):
            parts.append(leaf.operation)
    return "; ".join(parts)
