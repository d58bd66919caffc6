"""Functions that many tensors of equal shapes go through, described once: dequantizing the weights of experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_load.describe.tensor import SymbolicTensor
from lowmem_load.planning.expression import Expression, Instance, Slot


class Patterns:
    """What functions give of tensors of which only shapes, strides and dtypes are known, by these."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Pattern | None] = {}

    def applied(
        self, function: Callable[..., torch.Tensor], tensors: Sequence[SymbolicTensor], settings: Hashable
    ) -> torch.Tensor:
        """Return what `function` gives of tensors. One that asks for their values is called with them each time.

        Args:
            function: takes the tensors; must give the same operations on any of the same shapes, strides and dtypes.
            tensors: its arguments.
            settings: what besides the arguments the result depends on.
        """
        kind = (settings, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))
        if kind not in self._known:
            self._known[kind] = _pattern(function, tensors)
        found = self._known[kind]
        if found is None:
            return function(*tensors)
        inputs = tuple(tensor.expression for tensor in tensors)
        return SymbolicTensor(Instance(found.expression, found.slots, inputs), tensors[0].read_now, found.twin)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a function gives of `slots`: one expression for all instances, and a meta tensor like the result."""

    expression: Expression
    slots: tuple[Slot, ...]
    twin: torch.Tensor


def _pattern(function: Callable[..., torch.Tensor], tensors: Sequence[SymbolicTensor]) -> _Pattern | None:
    slots = tuple(Slot(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    twins = [tensor.twin for tensor in tensors]
    try:
        result: Any = function(*(SymbolicTensor(slot, _read, twin) for slot, twin in zip(slots, twins, strict=True)))
    except _NeedsValuesError:
        return None
    return _Pattern(result.expression, slots, result.twin)


class _NeedsValuesError(Exception):
    """A function asked for the value of a slot."""


def _read(expression: Expression, reason: str) -> torch.Tensor:
    raise _NeedsValuesError(reason)
