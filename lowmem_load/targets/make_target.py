"""Chooses the target of a model by its settings. The only module that knows the concrete targets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.planning.load_plan import REPLICATED, TargetPlan
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.targets.partition_choice import check_ties, choose, is_below
from lowmem_load.targets.target import Layout, Target
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
        return Partial(chosen, Zero3(settings, rank, device, group, chosen), Replicated(device))

    return make


class Replicated(Target):
    """Every rank holds every parameter in full, as an ordinary load does: ZeRO stages 0 to 2."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:  # noqa: ARG002  the base class's
        """See `Target`."""
        numel = parameter.numel()
        return Layout(REPLICATED, parameter.dtype, (FlatRange(0, numel),), (numel,), self.device.type == "cpu")

    def make(
        self,
        plan: TargetPlan,
        parameter: nn.Parameter,
        wait: Callable[[], None],  # noqa: ARG002  the base class's
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """See `Target`."""
        values = torch.empty(plan.shape, dtype=plan.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=parameter.requires_grad), [values.view(-1)]


class Partial(Target):
    """Partial ZeRO-3: parameters of the chosen modules, and all buffers, go to `inside`, others to `outside`."""

    def __init__(self, chosen: Collection[str], inside: Target, outside: Target) -> None:
        self._chosen, self._inside, self._outside = chosen, inside, outside
        self.device = inside.device

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """See `Target`."""
        return self._of(name).layout(name, parameter)

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
        """See `Target`."""
        return self._inside.fp32_buffers(model)

    def check(self, model: nn.Module, /) -> None:
        """See `Target`."""
        check_ties(model, {name: model.get_submodule(name) for name in self._chosen})

    def prepare(self, model: nn.Module, /) -> None:
        """See `Target`."""
        self._inside.prepare(model)
        self._outside.prepare(model)
        self.device = self._inside.device  # preparing gives it its index

    def files(self, plans: Sequence[TargetPlan], /) -> Mapping[str, int]:
        """See `Target`."""
        inside = [plan for plan in plans if is_below(plan.name, self._chosen)]
        outside = [plan for plan in plans if not is_below(plan.name, self._chosen)]
        return {**self._inside.files(inside), **self._outside.files(outside)}

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """See `Target`."""
        return self._of(plan.name).make(plan, parameter, wait)

    def finish(self) -> None:
        """See `Target`."""
        self._inside.finish()
        self._outside.finish()

    def _of(self, name: str) -> Target:
        return self._inside if is_below(name, self._chosen) else self._outside
