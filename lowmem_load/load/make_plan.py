"""Second stage: a proved plan of every parameter and buffer of a described model, for one rank. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from lowmem_load.engines.target import Layout
from lowmem_load.engines.zero3_target import refuse_partitioned
from lowmem_load.errors import UnsupportedError
from lowmem_load.load.describe import Described
from lowmem_load.models.quantizers import packed_format
from lowmem_load.planning import expression as ex
from lowmem_load.planning.load_plan import (
    BufferPlan,
    Destination,
    LoadPlan,
    SlowPath,
    TargetPlan,
    reading_order,
)
from lowmem_load.planning.planner import Constants, Planner
from lowmem_load.planning.reads import Fill, Read, ReadCost, ReadLimits
from lowmem_load.planning.regions import FlatRange, Region
from lowmem_load.quantized.format import Packing, packing_of, plan_companions
from lowmem_load.symbolic.initialise import INITIALISED, UNINITIALISED
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.text import fingerprint

Place = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters or buffers."""


@dataclass(slots=True)
class PlannedModel:
    """A plan, and the described parameters and buffers by the first of their names.

    Attributes:
        constants: what the plan's steps refer to by number.
        places: all places of each parameter and buffer.
        packings: how quantized parameters are packed.
        combined: what is made of the companions in parts of quantized parameters, once `combine_companions` has run.
    """

    plan: LoadPlan
    constants: Constants
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    packings: dict[str, Packing] = field(default_factory=dict)
    combined: dict[str, Mapping[str, Any]] = field(default_factory=dict)


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
    parameters, places, names_of = _distinct(model, "_parameters")
    packings = {name: packing for name, parameter in parameters.items() if (packing := packing_of(parameter))}
    targets = [
        replace(
            _plan_target(planner, names_of[name], parameter, target.layout(name, parameter)),
            companions=tuple(plan_companions(planner, name, packings.get(name), rank, described.settings.world_size)),
        )
        for name, parameter in parameters.items()
    ]
    targets.sort(key=lambda plan: reading_order(plan.fills, plan.name))  # so that files are read front to back
    buffers, buffer_places, buffer_names = _distinct(model, "_buffers")
    on_host = target.device.type == "cpu"
    fp32 = {id(buffer) for buffer in target.fp32_buffers(model)}
    buffer_plans = [
        _plan_buffer(planner, buffer_names[name], buffer, keeps_fp32=id(buffer) in fp32, on_host=on_host)
        for name, buffer in buffers.items()
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
    return PlannedModel(load_plan, planner.constants, parameters, {**places, **buffer_places}, buffers, packings)


def _distinct(
    model: nn.Module, kind: Literal["_parameters", "_buffers"]
) -> tuple[dict[str, Any], dict[str, list[Place]], dict[str, list[str]]]:
    """Return the distinct parameters or buffers by their first names, with all places and all names of each.

    They are those that the modules have: a `named_parameters` of a class may leave some out, or give them other names.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Any] = {}
    places: dict[str, list[Place]] = {}
    all_names: dict[str, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for last, tensor in vars(module)[kind].items():
            if tensor is not None:
                name = f"{prefix}.{last}" if prefix else last
                key = first.setdefault(id(tensor), name)
                tensors.setdefault(key, tensor)
                places.setdefault(key, []).append((module, last))
                all_names.setdefault(key, []).append(name)
    return tensors, places, all_names


def _plan_target(planner: Planner, names_: list[str], parameter: nn.Parameter, layout: Layout) -> TargetPlan:
    name, expression = names_[0], _described(names_[0], parameter)
    is_recast = expression.dtype != layout.dtype
    leaves = ex.leaves(expression)
    # Ranks agree on the whole expression; below, a rank may drop a cast of the loader for its own dtype.
    digest = fingerprint([_line(parameter, leaves), f"{layout.dtype} {layout.kind} {len(layout.regions)}"])
    if is_recast and isinstance(expression, ex.Cast) and not layout.keeps_casts:  # the loader's: DeepSpeed casts once
        expression = expression.part
    stored = ex.cast(expression, layout.dtype)
    destinations = tuple(_destinations(planner, name, stored, layout))
    fills = [destination.fill for destination in destinations if destination.fill is not None]
    slow_paths = tuple(_slow_paths(name, leaves, fills))
    return TargetPlan(
        names=tuple(names_),
        shape=tuple(parameter.shape),
        dtype=layout.dtype,
        kind=layout.kind,
        destinations=destinations,
        is_recast=is_recast,
        is_uninitialised=any(isinstance(leaf, ex.Computed) and leaf.operation == UNINITIALISED for leaf in leaves),
        slow_paths=slow_paths,
        fingerprint=digest,
    )


def _destinations(planner: Planner, name: str, stored: ex.Expression, layout: Layout) -> Iterator[Destination]:
    """Yield the plan of each piece of memory; what another one holds, too, is copied from there."""
    for number, (region, size) in enumerate(zip(layout.regions, layout.numels, strict=True)):
        copied_from = _holder(layout.regions, number)
        fill = None
        if copied_from is None:
            fill = planner.plan_fill(name, stored, region, on_host=layout.on_host)
        yield Destination(region, size, fill, copied_from, layout.holders[number] if layout.holders else ())


def _holder(regions: Sequence[Region], number: int) -> tuple[int, int] | None:
    """Return the first other region that holds all of this one, and the element at which this one starts there."""
    this = regions[number]
    for other_number, other in enumerate(regions):
        is_copied = other.numel > this.numel or (other.numel == this.numel and other_number < number)
        if not (is_copied and this.numel and isinstance(this, FlatRange) and isinstance(other, FlatRange)):
            continue
        if other.start <= this.start and this.end <= other.end:
            return other_number, this.start - other.start
    return None


def _described(name: str, parameter: torch.Tensor) -> ex.Expression:
    if isinstance(parameter, SymbolicTensor):
        expression = parameter.initialised or parameter.expression
        if expression.dtype != parameter.dtype:
            raise UnsupportedError(
                f"{name}: came out as {parameter.dtype}, though what it is made of is {expression.dtype}: somebody has "
                "replaced functions of torch that make tensors; load outside of that"
            )
        return expression
    if parameter.is_meta:
        raise UnsupportedError(f"{name}: transformers gave it no value, neither from the files nor by initializing it")
    return ex.hold(parameter)


def _plan_buffer(
    planner: Planner, names_: list[str], buffer: torch.Tensor, *, keeps_fp32: bool, on_host: bool
) -> BufferPlan:
    dtype, fill = torch.float32 if keeps_fp32 else buffer.dtype, None
    whole = ex.hold(buffer) if not isinstance(buffer, SymbolicTensor) else buffer.initialised or buffer.expression
    if isinstance(buffer, SymbolicTensor):
        expression = whole
        while keeps_fp32 and isinstance(expression, ex.Cast):  # upcasting later would not give back what a cast took
            expression = expression.part
        whole_range = FlatRange(0, ex.numel(expression))
        fill = planner.plan_fill(names_[0], ex.cast(expression, dtype), whole_range, on_host=on_host)
    fills = [] if fill is None else [fill]
    leaves = ex.leaves(whole)
    slow_paths = tuple(_slow_paths(names_[0], leaves, fills))
    return BufferPlan(tuple(names_), tuple(buffer.shape), dtype, fill, slow_paths, fingerprint([_line(buffer, leaves)]))


def _slow_paths(name: str, leaves: list[Any], fills: list[Fill]) -> Iterator[SlowPath]:
    """Yield why a parameter is not read straight into its partition."""
    for leaf in leaves:
        if isinstance(leaf, ex.Held) and leaf.origin == INITIALISED:
            yield SlowPath(name, "initialized on this rank: not in the checkpoint")
        elif isinstance(leaf, ex.Held) and leaf.origin != ex.IN_MEMORY:
            yield SlowPath(name, f"made of {leaf.origin}")
        elif isinstance(leaf, ex.Computed) and leaf.operation != UNINITIALISED:
            yield SlowPath(name, f"{leaf.operation} ran on whole tensors")
    if any(_is_scattered(step) for fill in fills for step in fill.steps):
        yield SlowPath(name, "gathered from scattered bytes")


def _is_scattered(step: object) -> bool:
    """Return whether a step reads elements that do not lie side by side, or gaps between them."""
    if not isinstance(step, Read) or step.is_direct:
        return False
    has_runs = any(axis.source == axis.destination == 1 for axis in (*step.outer, *step.nest.axes))
    return not has_runs or step.read_bytes > step.needed_bytes_each * step.num_reads


def _line(tensor: torch.Tensor, leaves: Sequence[ex.Leaf]) -> str:
    """Describe a tensor and its leaves. Ranks that differ here hold different files or arguments."""
    parts = [f"{tuple(tensor.shape)} {tensor.dtype}"]
    if (packing := packing_of(tensor)) is not None:
        parts.append(packing.method)
        beside = [companion.expression for companion in packing.companions.values() if companion.expression is not None]
        leaves = [*leaves, *(leaf for part in beside for leaf in ex.leaves(part))]
    for leaf in leaves:
        parts.append(type(leaf).__name__)
        if isinstance(leaf, ex.Source):
            parts.append(f"{leaf.path.rpartition('/')[2]} {leaf.name} {leaf.start} {leaf.shape} {leaf.dtype}")
        elif isinstance(leaf, ex.Held):
            parts.append(leaf.origin)
        elif isinstance(leaf, ex.Computed | ex.Elementwise):
            parts.append(leaf.operation)
    return "; ".join(parts)
