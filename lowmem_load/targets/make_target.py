"""Which target a model gets under which settings; under partial ZeRO-3 it is made of two others.

The only place that knows the concrete ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowmem_load.config.settings import Settings
from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.targets.partition_choice import check_ties, choose, is_below
from lowmem_load.targets.target import Layout, Target
from lowmem_load.targets.whole_target import Whole
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


class Partial:
    """Sends parameters to one of two targets, by name. A `Target`.

    `chosen` are names of modules: [Note: chosen modules] in `targets/partition_choice.py`. `inside` is the target of
    the parameters below them and of all buffers, `outside` that of the others.
    """

    def __init__(self, chosen: Collection[str], inside: Target, outside: Target) -> None:
        self._chosen, self._inside, self._outside = chosen, inside, outside

    @property
    def device(self) -> torch.device:
        """Where buffers live."""
        return self._inside.device

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """See `Target`."""
        return self._of(name).layout(name, parameter)

    def fp32_buffers(self, model: nn.Module) -> list[torch.Tensor]:
        """See `Target`."""
        return self._inside.fp32_buffers(model)

    def check(self, model: nn.Module) -> None:
        """See `Target`.

        Raises:
            ConfigError: a parameter is shared by a chosen and another module.
        """
        check_ties(model, {name: model.get_submodule(name) for name in self._chosen})

    def prepare(self, model: nn.Module) -> None:
        """See `Target`."""
        self._inside.prepare(model)
        self._outside.prepare(model)

    def files(self, plans: Sequence[TargetPlan]) -> Mapping[str, int]:
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
