"""Chooses the target of a model by its settings. The only module that knows the concrete targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.targets.partition_choice import choose
from lowmem_load.targets.target import Replicated, Target
from lowmem_load.targets.zero3 import Zero3

TargetMaker = Callable[[Settings, nn.Module], Target]
"""Makes the target of a model under resolved settings. The model's parameters need only names and shapes."""


def target_maker(rank: int, device: torch.device, group: Any = None) -> TargetMaker:
    """Return a function that makes targets for a rank of the partition group; for planning the device needs no index.

    `group` of torch.distributed has the ranks among which parameters are partitioned; None means all.
    """

    def make(settings: Settings, model: nn.Module) -> Target:
        if settings.stage < 3:
            return Replicated(torch.device("cpu"))
        if settings.partition is None:
            return Zero3(settings, rank, device, group)
        chosen = tuple(choose(model, settings.partition, must_match=settings.must_match))
        return Zero3(settings, rank, device, group, chosen)

    return make
