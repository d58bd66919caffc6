"""The target of parameters that every rank holds whole: all under ZeRO stages 0 to 2, some under partial ZeRO-3.

They stay as an ordinary load leaves them, read without mmap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from lowmem_load.planning.load_plan import REPLICATED, TargetPlan
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.targets.target import Layout


class Whole:
    """Every parameter whole, on one device. A `Target`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:  # noqa: ARG002  the protocol's
        """See `Target`."""
        numel = parameter.numel()
        return Layout(REPLICATED, parameter.dtype, (FlatRange(0, numel),), (numel,), self.device.type == "cpu")

    def fp32_buffers(self, _: nn.Module, /) -> list[torch.Tensor]:
        """Return none: buffers keep the dtype that they have."""
        return []

    def check(self, _: nn.Module, /) -> None:
        """Do nothing."""

    def prepare(self, _: nn.Module, /) -> None:
        """Do nothing."""

    def files(self, _: Sequence[TargetPlan], /) -> Mapping[str, int]:
        """Return none: all stays in memory."""
        return {}

    def make(
        self,
        plan: TargetPlan,
        parameter: nn.Parameter,
        wait: Callable[[], None],  # noqa: ARG002  the protocol's
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """See `Target`."""
        values = torch.empty(plan.shape, dtype=plan.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=parameter.requires_grad), [values.view(-1)]

    def finish(self) -> None:
        """Do nothing."""
