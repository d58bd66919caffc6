"""Checkpoints that engines load under `install`: those of another number of ranks, which DeepSpeed refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowmem_load.ds.engine_states import is_plain_zero3, wants_universal
from lowmem_load.resume.load_checkpoint import load_checkpoint
from lowmem_load.resume.open_checkpoint import saved_by
from lowmem_load.saving.model_digest import unwrapped
from lowmem_load.saving.save import ranks_of


def load_of_engine(engine: Any, given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]] | None:
    """Do what `engine.load_checkpoint` would, where that refuses the number of ranks; return None for all else.

    Collective: all ranks, as that is.
    """
    if not is_plain_zero3(engine) or wants_universal(engine) or given["custom_load_fn"] is not None:
        return None
    ranks = ranks_of(unwrapped(engine))
    # Ranks that see files of their own node only, or none, must not go different ways.
    with ranks.step("finding the checkpoint") as step:
        step.payload = saved_by(given["load_dir"], given["tag"])
    found = set(step.payloads)
    if len(found) > 1 or found <= {None, ranks.world_size}:
        return None
    return load_checkpoint(engine, **{name: value for name, value in given.items() if name != "custom_load_fn"})
