"""Weights that are stored quantized: packed values as a symbolic parameter, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.planning.expression import Expression, Shape
from lowmem_load.symbolic.tensor import SymbolicTensor


@dataclass(frozen=True, slots=True, eq=False)
class Companion:
    """A tensor that goes with packed values, such as scales; without an expression it is made when they are packed.

    Every rank has it in full, since any rank may gather the weight.
    """

    shape: Shape
    dtype: torch.dtype
    expression: Expression | None


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """How packed values become the parameter that their module expects.

    Attributes:
        method: the method with its settings, for reports and for the agreement of the ranks.
        companions: by the name that the method gives them.
        restore: called with the name of the parameter, the parameter that holds the packed values, the companions that
            have an expression, and the device of the model.
        problem: why it cannot be packed. It is raised later: transformers catches errors where it is found.
    """

    method: str
    companions: Mapping[str, Companion]
    restore: Callable[[str, nn.Parameter, Mapping[str, torch.Tensor], torch.device], None]
    problem: str | None = None


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
