"""What the engine of partial ZeRO-3 shows as its optimizer, in front of those of its two parts."""

from __future__ import annotations

from typing import Any

import torch

from lowmem_load.ds.engine import PartitionedPart
from lowmem_load.partial.replicated import ReplicatedPart


class PartialOptimizer:
    """What an engine shows as its optimizer: learning rates to read and write, and whether a step was skipped.

    Attributes:
        param_groups: the user's, else those of the ds_config's optimizer; both parts follow them.
    """

    def __init__(self, part: PartitionedPart, replicated: ReplicatedPart, leader: torch.optim.Optimizer) -> None:
        self._part, self._replicated, self._leader = part, replicated, leader
        self.defaults = leader.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups with their options; see the class."""
        return self._leader.param_groups

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because gradients of either part overflowed."""
        return self._part.overflowed

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1 unless fp16."""
        return self._part.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the replicated part's state; the partitioned part's is in the engine's checkpoints only."""
        return self._replicated.state_dict()
