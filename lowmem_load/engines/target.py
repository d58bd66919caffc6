"""What a target is: it says which elements of each parameter a rank owns, and makes the memory for them.

To add one, derive a class from `Target` next to what knows the engine (as in `engines/zero3_target.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from lowmem_load.planning.load_plan import REPLICATED, TargetPlan
from lowmem_load.planning.regions import FlatRange, Region


class Layout(NamedTuple):
    """The elements of one parameter that one rank owns."""

    kind: str
    """What becomes of the parameter; `planning.load_plan.REPLICATED` for one that every rank has in full."""
    dtype: torch.dtype
    regions: tuple[Region, ...]
    """Elements of the parameter, one region for each piece of memory."""
    numels: tuple[int, ...]
    """Elements to allocate for each region, padding included."""
    on_host: bool
    keeps_casts: bool = False
    """Whether values go through the dtype of the ordinary load if `dtype` is another one."""
    holders: Sequence[Sequence[int]] = ()
    """For each region the ranks that own the same, this one included; none if that is not known."""


class HostBytes(NamedTuple):
    """Host memory that a target needs on a rank, bytes."""

    new: int = 0
    """That it will allocate, and keep."""
    untouched: int = 0
    """That is allocated, and has no pages yet."""


Made: TypeAlias = tuple[nn.Parameter, list[torch.Tensor]]
"""A parameter, and flat memory for each of its destinations."""


class Target(ABC):
    """Where the parameters of one model go on one rank. Buffers live on `device`."""

    device: torch.device

    @abstractmethod
    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """Return what this rank owns of a parameter. Pure: called for any rank, in processes that import no engine."""

    def fp32_buffers(self, _: nn.Module, /) -> list[torch.Tensor]:
        """Return the buffers that stay in fp32 whatever the model's dtype is; by default none."""
        return []

    def check(self, _: nn.Module, /) -> None:  # noqa: B027  most targets have nothing to check
        """Raise a ConfigError if a setting contradicts the model. Pure."""

    def host_bytes(self, plans: Sequence[TargetPlan], /) -> HostBytes:
        """Return the host memory that `prepare` and `make` will need for these plans, or less. Pure."""
        return HostBytes(sum(plan.held_bytes for plan in plans) if self.device.type == "cpu" else 0)

    def prepare(self, _: nn.Module, /) -> None:  # noqa: B027  most targets have nothing to prepare
        """Prepare to make memory for the parameters of the model: once, after planning, before any weight is read."""

    def files(self, _: Sequence[TargetPlan], /) -> Mapping[str, int]:
        """Return the bytes that `make` and `finish` will write to files, by folder. Called after `prepare`."""
        return {}

    @abstractmethod
    def make(self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]) -> Made:
        """Return the parameter that replaces a described one, with the memory for its plan.

        Padding is zeroed. `wait` returns once all memory made so far is filled. A target that must move that memory
        before it can make more calls it first.
        """

    def finish(self) -> None:  # noqa: B027  most targets have nothing to finish
        """Finish after all memory is filled, such as by moving the values to where they stay."""


class Replicated(Target):
    """Every rank has every parameter in full, as after an ordinary load: ZeRO stages 0 to 2."""

    def __init__(self, device: torch.device, world_size: int = 1) -> None:
        self.device, self._holders = device, (range(world_size),)

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """See `Target`."""
        numel = parameter.numel()
        on_host, full = self.device.type == "cpu", (FlatRange(0, numel),)
        return Layout(REPLICATED, parameter.dtype, full, (numel,), on_host, holders=self._holders)

    def make(self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]) -> Made:
        """See `Target`."""
        values = torch.empty(plan.shape, dtype=plan.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=parameter.requires_grad), [values.view(-1)]
