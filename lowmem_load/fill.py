"""From a described model to a filled one: each parameter is planned, then given memory, then filled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lowmem_load.describe.initialise import UNINITIALISED
from lowmem_load.describe.tensor import SymbolicTensor, forget, kept_of
from lowmem_load.ds.partition import is_partitioned
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf import loader
from lowmem_load.planning.copies import TargetPlan, plan_digest, plan_target
from lowmem_load.planning.expression import Cast, Computed, Expression, Source, cast, held, leaves, numel
from lowmem_load.read.executor import Reader, gathered_nbytes
from lowmem_load.report import LoadReport, SlowPath
from lowmem_load.targets.target import Partial, Placement


@dataclass(slots=True)
class Target:
    """A distinct parameter: all places that hold it, and the plan of each of its destinations."""

    parameter: nn.Parameter
    dtype: torch.dtype
    places: list[tuple[nn.Module, str]]
    plans: list[TargetPlan]
    name: str


def plan_targets(model: nn.Module, placement: Placement, report: LoadReport) -> list[Target]:
    """Plan every parameter of `model` that has no partition yet; nothing is read or allocated."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not is_partitioned(parameter):
                places.setdefault(id(parameter), []).append((module, name))
                parameters.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
    targets = []
    for key, (name, parameter) in parameters.items():
        dtype = placement.dtype_of(parameter)
        expression = _described(name, parameter)
        if expression.dtype != dtype:
            report.recast_parameters.append(name)
            if isinstance(expression, Cast):  # the loader's own: what the file holds is cast once, as stock does
                expression = expression.part
        plans = [plan_target(name, cast(expression, dtype), span) for span in placement.ranges(parameter)]
        if any(isinstance(leaf, Computed) and leaf.operation == UNINITIALISED for leaf in leaves(expression)):
            report.uninitialised_parameters.append(name)
        report.slow_paths += _slow_paths(name, parameter, expression, plans)
        targets.append(Target(parameter, dtype, places[key], plans, name))
    return sorted(targets, key=_first_byte)


def _described(name: str, parameter: nn.Parameter) -> Expression:
    if isinstance(parameter, SymbolicTensor):
        return kept_of(parameter) or parameter.expression
    if parameter.is_meta:
        raise UnsupportedError(f"{name}: transformers gave it no value, neither from the files nor by initialising it")
    return held(parameter)


def _slow_paths(
    name: str, parameter: nn.Parameter, expression: Expression, plans: list[TargetPlan]
) -> Iterator[SlowPath]:
    """Yield why, and at what cost, a parameter is not read straight into its partition."""
    if isinstance(parameter, SymbolicTensor) and kept_of(parameter) is not None:
        nbytes = parameter.numel() * parameter.dtype.itemsize
        yield SlowPath(name, "initialised on this rank: not in the checkpoint", nbytes)
    for leaf in leaves(expression):
        if isinstance(leaf, Computed) and leaf.operation != UNINITIALISED:
            nbytes = sum(numel(part) * part.dtype.itemsize for part in leaf.inputs)
            yield SlowPath(name, f"{leaf.operation} ran on whole tensors", nbytes)
    gathered = [over for plan in plans for copy in plan.copies if (over := gathered_nbytes(copy)) is not None]
    if gathered:
        yield SlowPath(name, "gathered from scattered bytes", sum(gathered))


def _first_byte(target: Target) -> tuple[str, int, str]:
    """Sort key: files are read front to back."""
    for plan in target.plans:
        for copy in plan.copies:
            if isinstance(copy.leaf, Source):
                return copy.leaf.path, copy.leaf.start, target.name
    return "", 0, target.name


def digest_of(model: nn.Module, targets: list[Target], placement: Placement) -> str:
    """Describe the whole model, not this rank's part: ranks that disagree here hold different files or arguments."""
    lines = [
        f"{_line(target.name, target.parameter)} -> {target.dtype} {type(placement.of(target.parameter)).__name__} "
        f"{len(target.plans)}"
        for target in sorted(targets, key=lambda target: target.name)
    ]
    return plan_digest(lines + [_line(name, buffer) for name, buffer in model.named_buffers()])


def _line(name: str, tensor: torch.Tensor) -> str:
    parts = [f"{name} {tuple(tensor.shape)} {tensor.dtype}"]
    if not isinstance(tensor, SymbolicTensor):
        return f"{parts[0]}; in memory"
    if kept_of(tensor) is not None:
        return f"{parts[0]}; initialised"
    for leaf in leaves(tensor.expression):
        parts.append(type(leaf).__name__)
        if isinstance(leaf, Source):
            parts.append(f"{os.path.basename(leaf.path)} {leaf.name} {leaf.start} {leaf.shape} {leaf.dtype}")
    return "; ".join(parts)


def fill_parameters(targets: list[Target], reader: Reader, placement: Placement, report: LoadReport) -> None:
    """Replace each parameter by one with memory of its own and start filling it."""
    for target in _consumed(targets):
        if placement.is_full:
            reader.finish()
            placement.settle()
        made, destinations = placement.make(target.parameter, target.dtype)
        for plan, destination in zip(target.plans, destinations, strict=True):
            reader.fill(plan.copies, destination.tensor[: plan.flat_range.numel])
            if isinstance(placement, Partial) and not is_partitioned(made):
                report.whole_bytes += destination.tensor.nbytes
            else:
                report.partition_bytes += destination.tensor.nbytes
        loader.copy_marks(target.parameter, made)
        for module, name in target.places:
            setattr(module, name, made)
        if isinstance(target.parameter, SymbolicTensor):
            forget(target.parameter)
        report.num_parameters += 1
        report.num_elements += target.parameter.numel()
        if target.dtype.is_floating_point:
            report.dtype = str(target.dtype)
        report.sample_memory()
    report.total_partition_bytes = report.partition_bytes * report.world_size


def _consumed(targets: list[Target]) -> Iterator[Target]:
    """Yield the targets and forget them: what a missing parameter was initialised with goes with it."""
    targets.reverse()
    while targets:
        yield targets.pop()


def fill_buffers(model: nn.Module, reader: Reader, placement: Placement, report: LoadReport) -> None:
    """Read the symbolic buffers whole, as an ordinary load holds them, and move all to where DeepSpeed runs.

    Those that DeepSpeed keeps in fp32 are read in fp32: upcasting them later would not give back what a cast took.
    """
    fp32 = {id(buffer) for buffer in placement.fp32_buffers(model)}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            whole = buffer
            if isinstance(buffer, SymbolicTensor):
                expression = _without_cast(buffer.expression) if id(buffer) in fp32 else buffer.expression
                whole = reader.read_whole(expression)
                sources = [leaf for leaf in leaves(expression) if isinstance(leaf, Source)]
                report.needed_bytes += sum(numel(leaf) * leaf.dtype.itemsize for leaf in sources)
            if id(buffer) in fp32:
                whole = whole.float()
            if not whole.is_meta:
                whole = whole.to(placement.device)
            if whole is not buffer:
                setattr(module, name, whole)


def _without_cast(expression: Expression) -> Expression:
    while isinstance(expression, Cast):
        expression = expression.part
    return expression
