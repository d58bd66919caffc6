"""What a target is: it says what a rank holds of each parameter, and makes the memory for it.

To add one, derive a class from `Target` in a module (or folder) of its own and choose it in `targets/make_target.py`.

[Note: layout and memory] `layout` is pure: it is called for any rank of any world size, in processes that allocate
nothing and import no engine. A ZeRO-3 partition is a flat range; a DTensor that is sharded along a dim, as FSDP2's are,
is a rectangle. Memory is made later, one parameter at a time, by `make`; the plan says how it will be filled. A save
uses the same layout, and reads the memory instead of filling it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.planning.ranges import Region


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank holds of one parameter.

    Attributes:
        kind: what becomes of the parameter; `planning.load_plan.REPLICATED` for one that every rank holds in full.
        dtype: storage dtype.
        regions: elements of the parameter, one region for each piece of memory.
        numels: elements to allocate for each region, padding included.
        on_host: whether the memory is host memory.
    """

    kind: str
    dtype: torch.dtype
    regions: tuple[Region, ...]
    numels: tuple[int, ...]
    on_host: bool


class Target(ABC):
    """Where the parameters of one model go on one rank.

    Attributes:
        device: where buffers live.
    """

    device: torch.device

    @abstractmethod
    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """Return what this rank holds of a parameter, given by name, shape and dtype. Pure."""

    def fp32_buffers(self, _: nn.Module, /) -> list[torch.Tensor]:
        """Return the buffers that stay in fp32 whatever the model's dtype is; by default none."""
        return []

    def check(self, _: nn.Module, /) -> None:  # noqa: B027  most targets have nothing to check
        """Raise if this target cannot hold the model. Pure.

        Raises:
            ConfigError: a setting contradicts the model.
        """

    def prepare(self, _: nn.Module, /) -> None:  # noqa: B027  most targets have nothing to prepare
        """Prepare to make memory for the parameters of the model: once, after planning, before any weight is read.

        Raises:
            ConfigError, UnsupportedError: a setting cannot be followed.
        """

    def files(self, _: Sequence[TargetPlan], /) -> Mapping[str, int]:
        """Return the bytes that `make` and `finish` will write to files, by folder. Called after `prepare`."""
        return {}

    @abstractmethod
    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """Return the parameter that replaces a described one, and flat memory for each destination of its plan.

        Padding is zeroed. `wait` returns once all memory made so far is filled. A target that must move that memory
        before it can make more calls it first.
        """

    def finish(self) -> None:  # noqa: B027  most targets have nothing to finish
        """Finish after all memory is filled.

        Raises:
            LowMemLoadError: the values cannot be moved to where they stay.
        """
