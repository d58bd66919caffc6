"""What one rank reads of a checkpoint of ZeRO-3 to go on from it: each element of its partitions, proved."""

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
from lowmem_load.resume.zero_checkpoint import Checkpoint
from lowmem_load.resume.zero_layout import FP32, Pieces, SavedParameter

if TYPE_CHECKING:
    from lowmem_load.ds.engine_states import HeldParameter, Zero3State


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for."""

    folder: str
    tag: str | None
    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    trusted: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One run of memory: the elements of one parameter, or of a moment of it, that this rank has.

    Attributes:
        held: the parameter.
        key: `FP32`, or that of a moment.
        fill: how it is filled; None for a parameter that the checkpoint lacks: its values stay, its moments are zero.
    """

    held: HeldParameter
    key: str
    fill: Fill | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is read, and what was read already: small values."""

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
    """Return what a rank reads; checks the checkpoint against the engine.

    `rank` is the one whose model states are taken.

    Raises:
        CheckpointError: it is of another model, or holds objects.
        ConfigError: it goes with another optimizer.
    """
    trained = [one for group in state.sub_groups for one in group]
    saved = _matched(checkpoint, [*trained, *state.frozen], state, wanted)
    planner = Planner()
    moments: tuple[str, ...] = ()
    scalars: list[Mapping[str, Any]] = [{} for _ in state.sub_groups]
    param_groups: list[dict[str, Any]] = []
    if wanted.optimizer:
        param_groups = checkpoint.param_groups
        moments = _moments(saved, trained)
        state.check_groups(param_groups, frozenset(moments))
        scalars = [
            _scalars_of(number, group, saved, state.group_of(number), param_groups)
            for number, group in enumerate(state.sub_groups)
        ]
    parts = [
        [_part(planner, one, key, saved, *state.master_of(number)) for key in (FP32, *moments) for one in group]
        for number, group in enumerate(state.sub_groups)
    ]
    frozen = [_part(planner, one, FP32, saved, *state.partition_of(one)) for one in state.frozen]
    buffers = {
        name: _fill_of(
            planner, name, checkpoint.replicated[name].pieces[FP32], FlatRange(0, buffer.numel()), buffer.dtype
        )
        for name, buffer in state.buffers.items()
        if name in checkpoint.replicated
    }
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
    """Return the saved parameters by name.

    Raises:
        CheckpointError: they are not those of the engine.
    """
    names = {one.name: one for one in held}
    saved = {name: one for name, one in checkpoint.parameters.items() if name in names}
    frozen = {one.name for one in state.frozen}
    missing = sorted(name for name in names if name not in saved and not (checkpoint.lacks_frozen and name in frozen))
    missing += sorted(name for name in state.buffers if name not in checkpoint.replicated)
    unknown = sorted(set(checkpoint.of_module) - set(names))
    pairs = [(name, one.shape, names[name].shape) for name, one in saved.items()]
    pairs += [
        (name, checkpoint.replicated[name].shape, tuple(buffer.shape))
        for name, buffer in state.buffers.items()
        if name in checkpoint.replicated
    ]
    shapes = [f"{name} is {found}, not {expected}" for name, found, expected in pairs if found != expected]
    if wanted.optimizer:
        differ = [name for name, one in saved.items() if (one.group is None) != (name in frozen)]
        if differ:
            raise CheckpointError(
                f"{checkpoint.folder}: {listed(sorted(differ))}: trained in only one of the checkpoint and the "
                "engine, so the optimizer's states do not go together; pass load_optimizer_states=False"
            )
    lists = {"missing": missing, "not in the engine": unknown} if wanted.strict else {}
    lists = {**lists, "of another shape": shapes}
    told = "; ".join(f"{what}: {', '.join(each[:4])} ({len(each)})" for what, each in lists.items() if each)
    if told:
        raise CheckpointError(f"{checkpoint.folder}: is a checkpoint of another model: {told}")
    return saved


def _moments(saved: Mapping[str, SavedParameter], trained: Sequence[HeldParameter]) -> tuple[str, ...]:
    """Return the keys of the optimizer's moments; before its first step it has none."""
    found = {tuple(sorted(set(saved[one.name].pieces) - {FP32})) for one in trained if one.name in saved}
    return next(iter(found), ())


def _scalars_of(
    number: int,
    group: Sequence[HeldParameter],
    saved: Mapping[str, SavedParameter],
    group_id: int,
    param_groups: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Return what the optimizer has kept, besides tensors, for the parameters that form a sub-group now.

    Raises:
        ConfigError: they were not in the same group of the optimizer, or had not made the same steps.
    """
    found: list[Mapping[str, Any]] = []
    owner = {sub: index for index, each in enumerate(param_groups) for sub in each.get("params", ())}
    for one in group:
        if one.name not in saved:
            continue
        before = saved[one.name]
        if owner.get(before.group) != group_id:
            raise ConfigError(
                f"{one.name}: is in group {group_id} of the optimizer, and was in group {owner.get(before.group)} when "
                "the checkpoint was saved"
            )
        found.append(before.scalars)
    if any(repr(scalars) != repr(found[0]) for scalars in found):
        raise ConfigError(f"sub-group {number}: its parameters have made different numbers of steps")
    return found[0] if found else {}


def _part(
    planner: Planner,
    held: HeldParameter,
    key: str,
    saved: Mapping[str, SavedParameter],
    dtype: torch.dtype,
    on_host: bool,
) -> Part:
    if held.name not in saved:
        return Part(held, key, None)
    pieces = saved[held.name].pieces[key]
    return Part(held, key, _fill_of(planner, f"{held.name} ({key})", pieces, held.mine, dtype, on_host=on_host))


def _fill_of(
    planner: Planner, name: str, pieces: Pieces, mine: FlatRange, dtype: torch.dtype, *, on_host: bool = True
) -> Fill:
    return planner.plan_fill(name, cast(pieces.part(mine), dtype), FlatRange(0, mine.numel), on_host=on_host)
