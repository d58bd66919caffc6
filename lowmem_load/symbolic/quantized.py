"""A weight that is stored quantized: a tensor that stands for its packed values, and what goes with them.

[Note: companions] Packed values alone mean nothing: scales and code books go with them, whole on every rank, since any
rank may gather the weight. Some methods have them in the file; others make them in the moment in which they pack.
"""

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
    """One of the tensors that go with packed values; `expression` is None for one that comes with the packing."""

    shape: Shape
    dtype: torch.dtype
    expression: Expression | None


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """How packed values become the parameter that their module expects.

    Attributes:
        method: the method with its settings, for reports and for agreement.
        companions: by the name that the method gives them. See [Note: companions].
        restore: called with the name of the parameter, the parameter that was made of the packed values, those
            companions that have an expression, and the device of the model.
        problem: why it cannot be packed. Not raised when it is found, for loaders collect what is raised then.
    """

    method: str
    companions: Mapping[str, Companion]
    restore: Callable[[str, nn.Parameter, Mapping[str, torch.Tensor], torch.device], None]
    problem: str | None = None


class QuantizedTensor(SymbolicTensor):
    """The packed values of a weight. It is a parameter already, and its module's attributes of it may be read.

    Attributes:
        quantized: what it becomes.
    """

    quantized: Quantized

    @staticmethod
    def of(data: SymbolicTensor, packed: Expression, quantized: Quantized, **attributes: Any) -> QuantizedTensor:
        """Return the described parameter.

        Other code reads `attributes` of such a parameter.
        """
        tensor = QuantizedTensor(packed, data.read_now)
        tensor._is_param = True  # what isinstance(_, nn.Parameter) asks; torch's Parameter would take a copy without us
        tensor.quantized = quantized
        vars(tensor).update(attributes)
        return tensor

    def to(self, *_: Any, **__: Any) -> QuantizedTensor:
        """Return itself: a loader places parameters so, and here that is the target's decision."""
        return self
