"""Described models and plans for any rank, without a load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from lowmem_load.config.settings import Settings
from lowmem_load.ds import zero_init
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf import loader
from lowmem_load.io.executor import Executor
from lowmem_load.io.mounts import read_cost
from lowmem_load.io.source import LocalFile, Opener
from lowmem_load.phases import host_memory
from lowmem_load.pipeline.checks import check_described, is_left_alone, refuse_device_map
from lowmem_load.pipeline.describe import Described, describe, on_host
from lowmem_load.pipeline.make_plan import make_plan
from lowmem_load.pipeline.share_reads import shares_reads
from lowmem_load.planning.load_plan import HeldValue, LoadPlan
from lowmem_load.symbolic.initialise import INITIALISED
from lowmem_load.targets.make_target import TargetMaker


def describe_only(
    call: loader.Call, settings: Settings, make_target: TargetMaker, open_source: Opener = LocalFile
) -> Described:
    """Return the described model of a load, without loading. Local."""
    with _describing(call, settings, open_source) as executor:
        described = describe(call, settings, make_target, executor, holds_values=False)
        check_described(described)
        return described


def plan_only(
    call: loader.Call,
    settings: Settings,
    target_maker_of: Callable[[int], TargetMaker],
    ranks: Sequence[int],
    open_source: Opener = LocalFile,
) -> list[LoadPlan]:
    """Return the plan of a load for each of some ranks, without loading. Local."""
    before, plans = host_memory().anonymous_bytes, list[LoadPlan]()
    with _describing(call, settings, open_source) as executor:
        described: Described | None = None  # once, unless it keeps initial values, of which each rank has its own part
        for rank in ranks:
            make_target = target_maker_of(rank)
            if described is None:
                described = describe(call, settings, make_target, executor, holds_values=False)
            else:
                described = replace(described, target=make_target(described.settings, described.model))
            check_described(described)
            plan = make_plan(described, rank, read_cost([file.path for file in described.files]), shares_reads()).plan
            if not plans:
                grown_bytes = max(0, host_memory().anonymous_bytes - before)
            plans.append(replace(plan, planning_bytes=grown_bytes))
            if any(isinstance(value, HeldValue) and value.origin == INITIALISED for value in plan.values):
                described = None
    return plans


@contextlib.contextmanager
def _describing(call: loader.Call, settings: Settings, open_source: Opener) -> Iterator[Executor]:
    """Yield an executor with which models are described on the host. torch's random state stays as it was."""
    refuse_device_map(call, settings)
    if is_left_alone(call, settings):
        raise UnsupportedError(f"{call.name}: transformers places this model by itself, so there is nothing to plan")
    state = torch.get_rng_state()
    try:
        with zero_init.set_aside(), on_host(), Executor(open_source=open_source) as executor:
            yield executor
    finally:
        torch.set_rng_state(state)
