"""What one rank reads of a ZeRO checkpoint to resume from it: each element of its partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowmem_load.errors import CheckpointError, ConfigError, listed
from lowmem_load.planning.expression import cast
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.planning.reads import Fill
from lowmem_load.resume.zero_checkpoint import FP32, Checkpoint, SavedParameter, differences_of

if TYPE_CHECKING:
    from lowmem_load.ds.engine_states import HeldParameter, Zero3State


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `load_checkpoint` is asked to load; see its arguments."""

    tag: str | None
    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    trusted: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A run of memory: this rank's elements of one parameter (`FP32`), or of a moment of it.

    Without a `fill` the checkpoint lacks the parameter: its values stay, moments become zero.
    """

    held: HeldParameter
    key: str
    fill: Fill | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read, and small values that were read already.

    Attributes:
        sub_groups, scalars: parts, and other values of the optimizer, of each of its sub-groups.
        moments: keys of the moments.
        frozen, buffers: parts of frozen parameters, and how each buffer is filled.
        param_groups: hyperparameters of each of the optimizer's groups.
        scheduler: state of the lr scheduler; None if it is not loaded.
        client_state: of the user.
        planner, total_bytes: of the fills.
    """

    sub_groups: Sequence[Sequence[Part]]
    scalars: Sequence[Mapping[str, Any]]
    moments: tuple[str, ...]
    frozen: Sequence[Part]
    buffers: Mapping[str, Fill]
    param_groups: Sequence[Mapping[str, Any]]
    scheduler: Any
    client_state: dict[str, Any]
    planner: Planner
    total_bytes: int


def make_plan(checkpoint: Checkpoint, state: Zero3State, wanted: Wanted, rank: int, *, has_scheduler: bool) -> Plan:
    """Return what a rank reads, and check the checkpoint against the engine.

    The client state and the scheduler are those of `rank`.
    """
    trained = [one for group in state.sub_groups for one in group]
    saved = _matched(checkpoint, [*trained, *state.frozen], state, wanted)
    planner = Planner()
    moments: tuple[str, ...] = ()
    scalars: list[Mapping[str, Any]] = [{} for _ in state.sub_groups]
    param_groups: list[dict[str, Any]] = []
    if wanted.optimizer:
        param_groups = checkpoint.param_groups
        # Before the optimizer's first step there are no moments.
        moments = next((tuple(sorted({*saved[one.name].pieces} - {FP32})) for one in trained if one.name in saved), ())
        state.check_groups(param_groups, frozenset(moments))
        scalars = [
            _scalars_of(number, [saved[one.name] for one in group if one.name in saved], state, param_groups)
            for number, group in enumerate(state.sub_groups)
        ]
    parts = []
    for number, group in enumerate(state.sub_groups):
        where, keys = state.master_of(number), (FP32, *moments)
        parts.append([_part(planner, one, key, saved.get(one.name), *where) for key in keys for one in group])
    frozen = [_part(planner, one, FP32, saved.get(one.name), *state.partition_of(one)) for one in state.frozen]
    buffers = {}
    for name, buffer in state.buffers.items():
        if name in checkpoint.replicated:
            whole = FlatRange(0, buffer.numel())
            values = cast(checkpoint.replicated[name].pieces[FP32].part(whole), buffer.dtype)
            buffers[name] = planner.plan_fill(name, values, whole, on_host=True)
    scheduler = None
    if wanted.scheduler and has_scheduler:
        scheduler = checkpoint.state("lr_scheduler", rank, trusted=wanted.trusted)
        if scheduler is None:
            raise CheckpointError(
                f"{checkpoint.folder}: was saved without an lr scheduler; pass load_lr_scheduler_states=False"
            )
    fills = [part.fill for part in (*(part for group in parts for part in group), *frozen) if part.fill is not None]
    total = planner.costs([*fills, *buffers.values()]).needed_bytes
    client_state = checkpoint.client_state(rank, trusted=wanted.trusted)
    return Plan(parts, scalars, moments, frozen, buffers, param_groups, scheduler, client_state, planner, total)


def _matched(
    checkpoint: Checkpoint, held: Sequence[HeldParameter], state: Zero3State, wanted: Wanted
) -> dict[str, SavedParameter]:
    """Return the saved parameters that the engine has, by name."""
    expected = {one.name: tuple(one.shape) for one in held}
    frozen = {one.name for one in state.frozen}
    optional = frozen if checkpoint.lacks_frozen else frozenset()
    saved = {name: one for name, one in checkpoint.parameters.items() if name in expected}
    if wanted.optimizer:
        differ = [name for name, one in saved.items() if (one.group is None) != (name in frozen)]
        if differ:
            raise CheckpointError(
                f"{checkpoint.folder}: {listed(sorted(differ))}: trained only in the checkpoint or only in the engine, "
                "so the optimizer's states do not match; pass load_optimizer_states=False"
            )
    expected.update((name, tuple(buffer.shape)) for name, buffer in state.buffers.items())
    found = {name: one.shape for name, one in {**checkpoint.replicated, **saved}.items() if name in expected}
    wanted_shapes = {
        name: shape for name, shape in expected.items() if name in found or (wanted.strict and name not in optional)
    }
    unknown = set(checkpoint.of_module) - set(expected) if wanted.strict else ()
    differences = differences_of(found, wanted_shapes, unknown, "engine")
    if differences:
        raise CheckpointError(f"{checkpoint.folder}: is a checkpoint of another model: {differences}")
    return saved


def _scalars_of(
    number: int, group: Sequence[SavedParameter], state: Zero3State, param_groups: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the other values that the optimizer saved for the parameters that form a sub-group now."""
    owner = {sub: index for index, each in enumerate(param_groups) for sub in each.get("params", ())}
    for one in group:
        if owner.get(one.group) != state.group_of(number):
            raise ConfigError(
                f"{one.name}: is in group {state.group_of(number)} of the optimizer, and was in group "
                f"{owner.get(one.group)} when the checkpoint was saved"
            )
        if repr(one.scalars) != repr(group[0].scalars):
            raise ConfigError(f"sub-group {number}: its parameters have made different numbers of steps")
    return group[0].scalars if group else {}


def _part(
    planner: Planner, held: HeldParameter, key: str, saved: SavedParameter | None, dtype: torch.dtype, on_host: bool
) -> Part:
    if saved is None:
        return Part(held, key, None)
    values, numel = cast(saved.pieces[key].part(held.mine), dtype), held.mine.numel
    return Part(held, key, planner.plan_fill(f"{held.name} ({key})", values, FlatRange(0, numel), on_host=on_host))
