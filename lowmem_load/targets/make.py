"""Which target a model gets under which settings. The only place that knows the concrete ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowmem_load.settings.settings import Settings
from lowmem_load.targets.choice import choose
from lowmem_load.targets.partial import Partial
from lowmem_load.targets.target import Target
from lowmem_load.targets.whole import Whole
from lowmem_load.targets.zero3 import Zero3

TargetMaker = Callable[[Settings, nn.Module], Target]
"""Makes the target of a model, whose parameters are there by name and shape, under resolved settings."""


def target_maker(rank: int, device: torch.device, group: Any = None) -> TargetMaker:
    """Return what makes targets for a rank.

    For planning, the type of `device` is enough. Parameters are cut up among the ranks of `group`; None stands for all.
    """

    def make(settings: Settings, model: nn.Module) -> Target:
        if settings.stage < 3:
            return Whole(torch.device("cpu"))
        if settings.partition is None:
            return Zero3(settings, rank, device, group)
        chosen = tuple(choose(model, settings.partition, must_match=settings.must_match))
        return Partial(chosen, Zero3(settings, rank, device, group, chosen), Whole(device))

    return make
