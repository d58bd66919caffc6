"""Where the parameters of a model go: ZeRO-3 partitions, whole on every rank, or some here and some there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from lowmem_load.ds.partition import Destination, Partitioner
from lowmem_load.planning.copies import FlatRange
from lowmem_load.ranks.group import RankGroup


class Placement(Protocol):
    """Where parameters go.

    Attributes:
        device: of buffers and, where they are gathered, of whole parameters.
        is_full: whether `settle` must be called before another parameter is made.
    """

    device: torch.device

    @property
    def is_full(self) -> bool: ...  # noqa: D102

    def of(self, parameter: torch.Tensor) -> Placement:
        """Return the placement that a parameter has: another one where some go here and some there."""

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""

    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        """Return the flat ranges of a parameter that this rank holds, one for each destination."""

    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        """Return what replaces a described parameter, and the memory to be filled."""

    def fp32_buffers(self, model: nn.Module, /) -> list[torch.Tensor]:
        """Return the buffers that are kept in fp32."""

    def settle(self) -> None:
        """Move what was filled so far to where it stays, if that is elsewhere."""


class Partitioned(Placement):
    """Every parameter becomes a ZeRO-3 parameter in the dtype in which DeepSpeed will run."""

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module, ranks: RankGroup) -> None:
        self._partitioner = Partitioner(ds_config, ranks.group)
        self._ids = self._partitioner.reserve_ids(model)
        self.device = self._partitioner.device

    @override
    def of(self, parameter: torch.Tensor) -> Placement:
        return self

    @override
    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return self._partitioner.dtype if parameter.is_floating_point() else parameter.dtype

    @override
    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        return self._partitioner.ranges(parameter.numel())

    @override
    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        made = self._partitioner.new_parameter(
            parameter.shape, dtype, parameter.requires_grad, self._ids[id(parameter)]
        )
        return made, self._partitioner.allocate(made)

    @override
    def fp32_buffers(self, model: nn.Module) -> list[torch.Tensor]:
        return self._partitioner.fp32_buffers(model)

    @property
    @override
    def is_full(self) -> bool:
        return self._partitioner.is_full

    @override
    def settle(self) -> None:
        self._partitioner.settle()


class Whole(Placement):
    """Every parameter stays whole, as an ordinary load leaves it: in host memory for ZeRO stages 0, 1 and 2."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @override
    def of(self, parameter: torch.Tensor) -> Placement:
        return self

    @override
    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return parameter.dtype

    @override
    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        return [FlatRange(0, parameter.numel())]

    @override
    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        values = torch.empty(parameter.shape, dtype=dtype, device=self.device)
        made = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return made, [Destination(values.view(-1), FlatRange(0, values.numel()))]

    @override
    def fp32_buffers(self, _: nn.Module) -> list[torch.Tensor]:
        return []

    @property
    @override
    def is_full(self) -> bool:
        return False

    @override
    def settle(self) -> None:
        pass


class Partial(Placement):
    """Parameters of the chosen modules become ZeRO-3 parameters; the others stay whole on the same device."""

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module, ranks: RankGroup, chosen: set[int]) -> None:
        self._chosen = chosen
        self._partitioned = Partitioned(ds_config, model, ranks)
        self.device = self._partitioned.device
        self._whole = Whole(self.device)

    @override
    def of(self, parameter: torch.Tensor) -> Placement:
        return self._partitioned if id(parameter) in self._chosen else self._whole

    @override
    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return self.of(parameter).dtype_of(parameter)

    @override
    def ranges(self, parameter: torch.Tensor) -> list[FlatRange]:
        return self.of(parameter).ranges(parameter)

    @override
    def make(self, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[nn.Parameter, list[Destination]]:
        return self.of(parameter).make(parameter, dtype)

    @override
    def fp32_buffers(self, model: nn.Module) -> list[torch.Tensor]:
        return self._partitioned.fp32_buffers(model)

    @property
    @override
    def is_full(self) -> bool:
        return self._partitioned.is_full

    @override
    def settle(self) -> None:
        self._partitioned.settle()
