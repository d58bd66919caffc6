"""Weights that are stored quantized: packed values as a symbolic parameter, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.planning.expression import Expression, Shape
from lowmem_load.planning.regions import FlatRange
from lowmem_load.symbolic.tensor import SymbolicTensor


@dataclass(frozen=True, slots=True, eq=False)
class Companion:
    """A tensor that goes with packed values, such as scales; without an expression it is made of those that have one.

    Every rank has it in full, since any rank may gather the weight. One `in_parts` only makes others: each rank
    computes a part of it, see `part_of_rank`.
    """

    shape: Shape
    dtype: torch.dtype
    expression: Expression | None
    in_parts: bool = False


def part_of_rank(num_elements: int, rank: int, world_size: int) -> FlatRange:
    """Return which elements of a companion in parts a rank computes."""
    size = -(-num_elements // world_size)
    return FlatRange(min(rank * size, num_elements), min((rank + 1) * size, num_elements))


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """How packed values become the parameter that their module expects.

    Attributes:
        method: the method with its settings, for reports and for the agreement of the ranks.
        companions: by the name that the method gives them.
        restore: called with the name of the parameter, the parameter that holds the packed values, the companions that
            have an expression and what is combined of those in parts, and the device of the model.
        combine: called with the companions in parts, whole.
        problem: why it cannot be packed. It is raised later: transformers catches errors where it is found.
    """

    method: str
    companions: Mapping[str, Companion]
    restore: Callable[[str, nn.Parameter, Mapping[str, Any], torch.device], None]
    problem: str | None = None
    combine: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]] = dict


class QuantizedTensor(SymbolicTensor):
    """The packed values of a weight, as a parameter."""

    quantized: Quantized

    @staticmethod
    def of(data: SymbolicTensor, packed: Expression, quantized: Quantized, **attributes: Any) -> QuantizedTensor:
        """Return the parameter for the packed values of `data`, with attributes that other code reads of it."""
        tensor = QuantizedTensor(packed, data.read_now)
        tensor._is_param = True  # isinstance(_, nn.Parameter) asks for it; nn.Parameter(tensor) would drop our class
        tensor.quantized = quantized
        vars(tensor).update(attributes)
        return tensor

    def to(self, *_: Any, **__: Any) -> QuantizedTensor:
        """Return itself: a loader places parameters by this call, and here the target decides."""
        return self
