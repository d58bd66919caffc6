"""The digest of a checkpoint's model, made of one parameter at a time: none stays in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf import loader
from lowmem_load.integrity.model import ModelDigest, Part, digest_of, distinct
from lowmem_load.integrity.sums import Keys
from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.read.executor import Executor
from lowmem_load.settings.settings import Settings
from lowmem_load.stages.describe import describe
from lowmem_load.stages.execute import execute
from lowmem_load.stages.plan import make_plan
from lowmem_load.stages.read_cost import read_cost
from lowmem_load.targets.whole import Whole


class _Summed(Whole):
    """Adds up each parameter once it is filled, and gives its memory back before the next but one is made."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(torch.device("cpu"))
        self.parts: list[Part] = []
        self._keys = keys
        self._filled: tuple[tuple[str, ...], nn.Parameter] | None = None

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """See `Target`."""
        if plan.companions:
            raise UnsupportedError(
                f"{plan.name}: is held packed ({plan.dtype}), and a packed model has no digest here; use model_digest "
                "of the loaded model"
            )
        wait()
        self.finish()
        made, memory = super().make(plan, parameter, wait)
        self._filled = plan.names, made
        return made, memory

    def finish(self) -> None:
        """Add up what was filled last."""
        if self._filled is not None:
            names, parameter = self._filled
            part = Part(list(names), parameter)
            part.take(self._keys)
            self.parts.append(part)
            parameter.data = torch.empty(0, dtype=parameter.dtype)
            self._filled = None


def digest_only(call: loader.Call, settings: Settings, keys: Keys) -> ModelDigest:
    """Return the digest of what a `from_pretrained` would load. Local; the random state is the caller's afterwards."""
    state = torch.get_rng_state()
    target = _Summed(keys)
    try:
        with Executor() as executor:
            described = describe(call, settings, lambda *_: target, executor, holds_values=True)
            planned = make_plan(described, 0, read_cost(described.paths))
            execute(planned, target, executor)
    finally:
        torch.set_rng_state(state)
    buffers = [
        Part(names, tensor) for names, tensor in distinct(described.model) if not isinstance(tensor, nn.Parameter)
    ]
    for buffer in buffers:
        buffer.take(keys)
    return digest_of([*target.parts, *buffers])
