"""What a launcher has said in the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lowmem_load.doctor.finding import NOTE, OK, PROBLEM, Finding
from lowmem_load.errors import ConfigError
from lowmem_load.ranks.environment import LAUNCHER_NAMES, alone, launched

SETTINGS = "LOWMEM_LOAD_"
"""What our own variables of the environment begin with."""


def check_launcher() -> Iterator[Finding]:
    """Yield whether the launcher's variables are complete; none at all is a lone process."""
    there = [name for name in LAUNCHER_NAMES if os.environ.get(name)]
    try:
        launched(None, None) if there else alone(None, None)
    except ConfigError as error:
        yield Finding(
            "launcher", PROBLEM, str(error), "start with torchrun, deepspeed or accelerate launch, or unset them"
        )
    else:
        if there:
            rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
            yield Finding("launcher", OK, f"this is rank {rank} of {size}")
        else:
            yield Finding("launcher", OK, "none: this would be a process of its own")
    ours = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    if ours:
        yield Finding("settings", NOTE, ", ".join(f"{name}={value}" for name, value in ours.items()))
    accelerator = os.environ.get("DS_ACCELERATOR")
    if accelerator:
        yield Finding("settings", NOTE, f"DS_ACCELERATOR={accelerator}: DeepSpeed will not look for another")
