"""The plans of a load, for any of its ranks, without the load: describe once, plan for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lowmem_load.describe.initialise import INITIALISED
from lowmem_load.ds import zero_init
from lowmem_load.errors import UnsupportedError
from lowmem_load.hf import loader
from lowmem_load.phases import host_memory
from lowmem_load.planning.alike import Alike
from lowmem_load.planning.load_plan import HeldValue, LoadPlan
from lowmem_load.read.executor import Executor
from lowmem_load.read.mounts import read_cost
from lowmem_load.read.source import LocalFile, Opener
from lowmem_load.settings.settings import Settings
from lowmem_load.stages.defaults import on_host
from lowmem_load.stages.describe import Described, describe
from lowmem_load.stages.plan import make_plan
from lowmem_load.stages.sharing import shares_reads
from lowmem_load.stages.streamable import check_described, is_left_alone, refuse_device_map
from lowmem_load.targets.make import TargetMaker


def plan_only(
    call: loader.Call,
    settings: Settings,
    target_maker_of: Callable[[int], TargetMaker],
    ranks: Sequence[int],
    open_source: Opener = LocalFile,
    alike: Alike | None = None,
) -> list[LoadPlan]:
    """Return the plan of a load for each of some ranks, without loading. Local: no process group, no DeepSpeed engine.

    The model is described once, unless it keeps initial values: each rank has its own part of those. `alike`: see
    `make_plan`.
    """
    refuse_device_map(call, settings)
    if is_left_alone(call, settings):
        raise UnsupportedError(f"{call.name}: transformers places this model by itself, so there is nothing to plan")
    state, before = torch.get_rng_state(), host_memory().anonymous_bytes
    plans: list[LoadPlan] = []
    try:
        with zero_init.set_aside(), on_host(), Executor(open_source=open_source) as executor:
            described: Described | None = None
            for rank in ranks:
                make_target = target_maker_of(rank)
                if described is None:
                    described = describe(call, settings, make_target, executor, holds_values=False)
                else:
                    described = replace(described, target=make_target(described.settings, described.model))
                check_described(described)
                plan = make_plan(described, rank, read_cost(described.paths), shares_reads(), alike).plan
                if not plans:
                    grown_bytes = max(0, host_memory().anonymous_bytes - before)
                plans.append(replace(plan, planning_bytes=grown_bytes))
                if any(isinstance(value, HeldValue) and value.origin == INITIALISED for value in plan.values):
                    described = None
        return plans
    finally:
        torch.set_rng_state(state)
