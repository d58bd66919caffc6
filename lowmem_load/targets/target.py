"""What a target is: it says what a rank holds of each parameter, and makes the memory for it. A new one is one module.

[Note: layout and memory] `layout` is pure: it is asked for any rank of any world, in processes that allocate nothing
and import no engine. A flat range is a ZeRO-3 partition; a DTensor that is sharded along a dim, as FSDP2's, is a
rectangle. Memory is made later, for one parameter at a time, by `make`, whose plan says how it will be filled. A save
asks for the same layout and reads the memory instead of filling it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from lowmem_load.planning.load_plan import TargetPlan
from lowmem_load.planning.ranges import Region


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank holds of one parameter.

    Attributes:
        kind: what becomes of the parameter; `planning.load_plan.REPLICATED` for one that is whole on every rank.
        dtype: in which it is stored.
        regions: elements of the parameter, one region for each piece of memory.
        numels: elements that are allocated for each, padding behind the region included.
        on_host: whether the memory is host memory.
    """

    kind: str
    dtype: torch.dtype
    regions: tuple[Region, ...]
    numels: tuple[int, ...]
    on_host: bool


class Target(Protocol):
    """Where the parameters of one model go on one rank."""

    @property
    def device(self) -> torch.device:
        """Where buffers live."""

    def layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """Return what this rank holds of a parameter, given by name, shape and dtype. Pure."""

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
        """Return the buffers that are kept in fp32 whatever the model's dtype is."""

    def check(self, model: nn.Module, /) -> None:
        """Raise for what cannot be done with this model, as far as arithmetic tells. Pure.

        Raises:
            ConfigError: a setting contradicts the model.
        """

    def prepare(self, model: nn.Module, /) -> None:
        """Get ready to make memory for the parameters of `model`: once, after planning, before anything is read.

        Raises:
            ConfigError, UnsupportedError: a setting cannot be followed.
        """

    def files(self, plans: Sequence[TargetPlan], /) -> Mapping[str, int]:
        """Return what `make` and `finish` will write to files for these, in bytes, by folder. Prepared."""

    def make(
        self, plan: TargetPlan, parameter: nn.Parameter, wait: Callable[[], None]
    ) -> tuple[nn.Parameter, list[torch.Tensor]]:
        """Return what replaces a described parameter, and flat memory for each destination of its plan, to be filled.

        Padding is zeroed. `wait` returns when all memory made so far is filled; call it where that must be moved on
        before there is room for more.
        """

    def finish(self) -> None:
        """Do what is left when all memory is filled.

        Raises:
            LowMemLoadError: it could not be brought to where it stays.
        """
