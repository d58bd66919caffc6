"""What a quantized format is: how its weights are described, packed or dequantized, and what goes with packed values.

[Note: formats] transformers' loader runs on symbolic tensors. The functions by which it, or the package of a format,
packs or unpacks weights are replaced by those of `QuantizedFormat.handlers`. They return expressions, from which each
rank computes its region out of bytes of the files.

- Weights that are *dequantized* while they load come out as ordinary symbolic tensors, for which nothing else is done.
- Weights that *stay packed* come out as `QuantizedTensor`s. Their `Packing` has the companions, such as scales, and
  makes the parameter that the module expects, once the packed values are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowmem_load.planning.expression import Expression, Shape, numel
from lowmem_load.planning.load_plan import CompanionPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import partition_range
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.tensor import SymbolicTensor


class QuantizedFormat:
    """A format. See [Note: formats]. This class itself stands for one that is not known, and does nothing."""

    method: str = ""  # its `quant_method` in a config.json
    config_class: str = ""  # transformers' class of configuration by which it is dequantized while it loads, if it is
    stays_packed: bool = False  # whether its weights are packed in memory, too

    def recognizes(self, quantization: Any) -> bool:
        """Return whether a quantization config, an object or as in a config.json, is one of this format."""
        return method_of(quantization) == self.method

    def handlers(self) -> Handlers:
        """Return what describes parameters and companions while transformers' loader runs; see [Note: formats]."""
        return {}

    def refusals(self, quantizer: Any) -> Handlers:
        """Return what refuses, in loads for partitions, models that each rank would need in full."""
        return {}

    # Those below are called for formats that stay packed.

    def check(self, name: str, model: nn.Module) -> None:
        """Raise for a described model with weights that are not packed, or that cannot be."""

    def pack_skeleton(self, model: nn.Module) -> None:
        """Give the modules of a model on the meta device weights of the shape and dtype of packed ones."""

    def hand_over(self, loaded: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Give modules, by their names in a loaded model, what its own have besides their weights."""


def method_of(quantization: Any, default: str | None = None) -> str:
    """Return the method of a quantization config, which is an object or as in a config.json."""
    method = fields_of(quantization).get("quant_method", default or type(quantization).__name__)
    return str(getattr(method, "value", method))


def fields_of(quantization: Any) -> Mapping[str, Any]:
    """Return the values of a quantization config, which is an object or as in a config.json."""
    return quantization if isinstance(quantization, Mapping) else getattr(quantization, "__dict__", {})


# -- weights that stay packed ------------------------------------------------------------------------------------------


Kinds = dict[str, tuple[Shape, torch.dtype]]
"""The shapes and dtypes of tensors, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How packed values become the parameter that their module expects.

    `restore` is called with the name of the parameter, the parameter of packed values, the companions and what is
    combined, and the device of the model. `problem` says why a weight cannot be packed. It is raised later, because
    transformers catches errors where it is found.
    """

    method: str  # with its settings, for reports and for the agreement of the ranks
    companions: Mapping[str, Expression]  # such as scales. Every rank reads them in full: it may gather the weight
    restore: Callable[[str, nn.Parameter, Mapping[str, Any], torch.device], None]
    in_parts: Mapping[str, Expression] = field(default_factory=dict)  # what ranks compute together, each a part
    combine: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]] = dict  # makes of these what every rank keeps
    combined: Kinds = field(default_factory=dict)  # the tensors in what it makes
    problem: str | None = None
    storage_option: str = ""  # by which a user chooses the dtype of the packed values


class QuantizedTensor(SymbolicTensor):
    """The packed values of a weight, as a parameter."""

    packing: Packing

    @staticmethod
    def of(data: SymbolicTensor, packed: Expression, packing: Packing, **attributes: Any) -> QuantizedTensor:
        """Return the parameter for the packed values of `data`, with attributes that other code reads of it."""
        tensor = QuantizedTensor(packed, data.read_now)
        tensor._is_param = True  # isinstance(_, nn.Parameter) asks for it; nn.Parameter(tensor) would drop our class
        tensor.packing = packing
        vars(tensor).update(attributes)
        return tensor

    def to(self, *_: Any, **__: Any) -> QuantizedTensor:
        """Return itself: a loader places parameters by this call, and here the target decides."""
        return self


def packing_of(parameter: object) -> Packing | None:
    """Return how a described parameter is packed; None if it is not."""
    return parameter.packing if isinstance(parameter, QuantizedTensor) else None


def packed_parameters(model: nn.Module) -> dict[str, QuantizedTensor]:
    """Return the packed parameters of a described model by name."""
    named = nn.Module.named_parameters(model)
    return {name: parameter for name, parameter in named if isinstance(parameter, QuantizedTensor)}


def plan_companions(
    planner: Planner, name: str, parameter: object, rank: int, world_size: int
) -> tuple[CompanionPlan, ...]:
    """Return the plans of what goes with the packed values of a parameter; none if it is not packed."""
    if (packing := packing_of(parameter)) is None:
        return ()
    plans = [CompanionPlan(key, *kind, None) for key, kind in packing.combined.items()]
    for expressions, place in ((packing.companions, (0, 1)), (packing.in_parts, (rank, world_size))):
        for key, expression in expressions.items():
            fill = planner.plan_fill(f"{name}.{key}", expression, partition_range(numel(expression), *place))
            in_parts = expressions is packing.in_parts
            plans.append(CompanionPlan(key, expression.shape, expression.dtype, fill, in_parts))
    return tuple(plans)
