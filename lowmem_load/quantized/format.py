"""What a quantized format is: how its weights are described, packed or dequantized, and what goes with packed values.

[Note: formats] transformers' loader runs on symbolic tensors. The functions by which it, or the package of a format,
packs or unpacks weights are replaced by those of `QuantizedFormat.handlers`. They return expressions, from which each
rank computes its region out of bytes of the files.

- Weights that are *dequantized* while they load come out as ordinary symbolic tensors: nothing else is to be done.
- Weights that *stay packed* come out as `QuantizedTensor`s. Their `Packing` has the companions, such as scales, and
  makes the parameter that the module expects, once the packed values are in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.foreign_names import ForeignName
from lowmem_load.planning.expression import (
    Elementwise,
    Expression,
    Instance,
    Placeholder,
    Shape,
    expand,
    hold,
    numel,
    reshape,
)
from lowmem_load.planning.load_plan import CompanionPlan
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import partition_range
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor


class QuantizedFormat:
    """A format. See [Note: formats]. This class itself stands for one that is not known, and does nothing.

    Attributes:
        method: its `quant_method` in a config.json.
        config_class: transformers' class of configuration by which it is dequantized while it loads; "" if it is not.
        stays_packed: whether its weights are packed in memory, too.
    """

    method: str = ""
    config_class: str = ""
    stays_packed: bool = False

    def recognizes(self, quantization: Any) -> bool:
        """Return whether a quantization config, an object or as in a config.json, is one of this format."""
        return method_of(quantization) == self.method

    def handlers(self) -> Handlers:
        """Return what describes parameters and companions while transformers' loader runs; see [Note: formats]."""
        return {}

    def refusals(self, quantizer: Any) -> Handlers:
        """Return what refuses, in loads for partitions, models of which each rank would hold the whole."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Companion:
    """A tensor that goes with packed values, such as scales; without an expression it is made of those that have one.

    Every rank has it in full, since any rank may gather the weight. One `in_parts` only makes others: each rank
    computes a part of it, as of a ZeRO-3 parameter.
    """

    shape: Shape
    dtype: torch.dtype
    expression: Expression | None
    in_parts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How packed values become the parameter that their module expects.

    Attributes:
        method: the method with its settings, for reports and for the agreement of the ranks.
        companions: by the name that the method gives them.
        restore: called with the name of the parameter, the parameter that holds the packed values, the companions that
            have an expression and what is combined of those in parts, and the device of the model.
        combine: called with the companions in parts, whole.
        problem: why it cannot be packed. It is raised later: transformers catches errors where it is found.
        storage_option: the option by which a user chooses the dtype of the packed values.
    """

    method: str
    companions: Mapping[str, Companion]
    restore: Callable[[str, nn.Parameter, Mapping[str, Any], torch.device], None]
    problem: str | None = None
    combine: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]] = dict
    storage_option: str = ""


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


def packed_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, Packing]]:
    """Return the packed parameters of a described model by name, and how they are packed."""
    named = nn.Module.named_parameters(model)
    return {name: (parameter, packing) for name, parameter in named if (packing := packing_of(parameter)) is not None}


def plan_companions(
    planner: Planner, name: str, parameter: object, rank: int, world_size: int
) -> tuple[CompanionPlan, ...]:
    """Return the plans of what goes with the packed values of a parameter; none if it is not packed."""
    plans = []
    packing = packing_of(parameter)
    for key, companion in packing.companions.items() if packing is not None else ():
        fill = None
        if companion.expression is not None:
            place = (rank, world_size) if companion.in_parts else (0, 1)
            part = partition_range(numel(companion.expression), *place)
            fill = planner.plan_fill(f"{name}.{key}", companion.expression, part)
        plans.append(CompanionPlan(key, companion.shape, companion.dtype, fill, companion.in_parts))
    return tuple(plans)


# -- weights that are dequantized --------------------------------------------------------------------------------------


class Patterns:
    """Results of functions on tensors of which only shape, strides and dtype are known.

    The weights of experts have few shapes. Without this DeepSeek-V3 takes three times as long to describe.
    """

    def __init__(self) -> None:
        # The expression that all instances share, its placeholders, and a meta tensor like it; None if it needs values.
        self._known: dict[Hashable, tuple[Expression, tuple[Placeholder, ...], torch.Tensor] | None] = {}

    def applied(
        self, function: Callable[..., torch.Tensor], tensors: Sequence[SymbolicTensor], settings: Hashable
    ) -> torch.Tensor:
        """Return `function(*tensors)`. A function that asks for values is called each time."""
        kind = (settings, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))
        if kind not in self._known:
            placeholders = tuple(Placeholder(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            pairs = zip(placeholders, tensors, strict=True)
            symbols = [SymbolicTensor(place, _no_values, like.meta) for place, like in pairs]
            try:
                result: Any = function(*symbols)
                self._known[kind] = result.expression, placeholders, result.meta
            except _NeedsValuesError:
                self._known[kind] = None
        pattern = self._known[kind]
        if pattern is None:
            return function(*tensors)
        expression, placeholders, meta = pattern
        inputs = tuple(tensor.expression for tensor in tensors)
        return SymbolicTensor(Instance(expression, placeholders, inputs), tensors[0].read_now, meta)


class _NeedsValuesError(Exception):
    pass


def _no_values(_: Expression, reason: str) -> torch.Tensor:
    raise _NeedsValuesError(reason)


NUM_CODES = 16
"""Codes of 4 bits."""

_LOOKED_UP = 1 << 16
"""Codes that are looked up at a time: their indexes stay in the processor's cache."""


def values_of_codes(
    method: str, packed: Expression, table: torch.Tensor, scales: Expression | None = None
) -> Expression:
    """Return what a table has for the 4-bit codes in each element of the last dim, the lowest bits first.

    With `scales`, which are bytes, the table has 16 values for each of 256. Each goes with an equal part of that dim.
    """
    *outer, last = packed.shape
    num_each = packed.dtype.itemsize * 2
    every = (*outer, last * num_each)

    def repeated(part: Expression, *sizes: int) -> Expression:
        return reshape(expand(part, (*outer, *sizes)), every)

    bits = hold(4 * torch.arange(num_each, dtype=packed.dtype, device="cpu"))
    shifts = reshape(bits, (1,) * len(packed.shape) + (num_each,))
    parts = [repeated(reshape(packed, (*packed.shape, 1)), last, num_each), repeated(shifts, last, num_each)]
    if scales is not None:
        num_scales = scales.shape[-1]
        parts.append(repeated(reshape(scales, (*scales.shape, 1)), num_scales, every[-1] // num_scales))
    return Elementwise(method, functools.partial(_look_up, table), tuple(parts), every, table.dtype)


def _look_up(table: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    packed, shifts, *scales = parts
    values = torch.empty(packed.numel(), dtype=table.dtype, device=packed.device)
    table = table.to(packed.device)
    for start in range(0, packed.numel(), _LOOKED_UP):
        some = slice(start, start + _LOOKED_UP)
        indexes = (packed[some] >> shifts[some]).bitwise_and_(NUM_CODES - 1).int()
        for each in scales:
            indexes.add_(each[some], alpha=NUM_CODES)
        torch.index_select(table, 0, indexes, out=values[some])
    return values


def check_sample(name: ForeignName, ours: Expression, theirs: torch.Tensor, read_now: ReadNow) -> None:
    """Raise IncompatibleVersionError unless a description has the values that the function itself returns."""
    values = read_now(ours, "")
    if (values.shape, values.dtype) != (theirs.shape, theirs.dtype) or not torch.equal(values, theirs):
        raise IncompatibleVersionError(
            f"{name} unpacks codes in another way than lowmem_load knows; install "
            f"{name.releases.package}=={name.releases.newest}"
        )
