"""fp8 weights with a scale for each block, of which the last may be partial. Part of the transformers seam.

A checkpoint in blocks of 128 rows has five scales for 576 rows (`kv_a_proj_with_mqa` of DeepSeek-V3): the last block is
half a one. transformers divides the rows by the number of scales. Where that does not come out even it raises; where it
does (192 rows, two scales), blocks of 96 rows would get each other's scales without an error. So a weight whose scales
are as many as the blocks of its configuration is completed to whole blocks, dequantized by transformers' own
function, and cut again. What completes it is never read: no element that remains is made of it.

The weights of experts have few shapes. transformers' function runs once for each shape, and gives a pattern with slots.
Each weight is an instance of a pattern. Without patterns DeepSeek-V3 takes three times as long to describe.

Source: transformers 5.23 `integrations/finegrained_fp8.py`, `Fp8Dequantize`; `_dequantize_one` since 5.8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_load.hf.replaced import Replacement
from lowmem_load.planning.expression import Expression, Instance, Slot
from lowmem_load.symbolic.tensor import SymbolicTensor

MODULE = "transformers.integrations.finegrained_fp8"


def replacements() -> list[Replacement]:
    """Return what stands in for transformers' dequantization while a model is described."""
    owner = importlib.import_module(MODULE).Fp8Dequantize
    if not hasattr(owner, "_dequantize_one"):  # it refuses weights whose blocks are not whole, then
        return []

    patterns = Patterns()

    def dequantize(
        ordinary: Callable[..., torch.Tensor], operation: Any, quantized: Any, scales: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not (isinstance(quantized, SymbolicTensor) and isinstance(scales, SymbolicTensor)):
            return ordinary(operation, quantized, scales, **kwargs)
        missing = _missing(operation, quantized, scales)

        def completed(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            for dim, size in zip((-2, -1), missing, strict=True):
                if size:
                    quantized = torch.cat([quantized, _repeated_last(quantized, dim, size)], dim)
            whole = ordinary(operation, quantized, scales, **kwargs)
            rows, columns = (size - lacking for size, lacking in zip(whole.shape[-2:], missing, strict=True))
            return whole[..., :rows, :columns] if any(missing) else whole

        return patterns.applied(completed, (quantized, scales), (missing, *sorted(kwargs.items())))

    return [(owner, "_dequantize_one", dequantize)]


def _repeated_last(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return the last row, or column, `size` times; nothing is read of it in the end."""
    sizes = list(tensor.shape)
    sizes[dim] = size
    return tensor.narrow(dim, tensor.shape[dim] - 1, 1).expand(sizes)


def _missing(operation: Any, quantized: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Return how many rows and columns the last blocks of a weight lack; none where its scales are no such blocks'."""
    block = getattr(operation.hf_quantizer.quantization_config, "weight_block_size", None)
    if block is None or quantized.itemsize != 1 or not quantized.is_floating_point() or scales.dim() < 2:
        return 0, 0
    grid = tuple(-(-size // each) for size, each in zip(quantized.shape[-2:], block, strict=True))
    if grid != tuple(scales.shape[-2:]):
        return 0, 0
    rows, columns = (-size % each for size, each in zip(quantized.shape[-2:], block, strict=True))
    return rows, columns


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
        return SymbolicTensor(Instance(found.expression, found.slots, inputs), tensors[0].read_now, found.meta)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a function gives of `slots`: one expression for all instances, and a meta tensor like the result."""

    expression: Expression
    slots: tuple[Slot, ...]
    meta: torch.Tensor


def _pattern(function: Callable[..., torch.Tensor], tensors: Sequence[SymbolicTensor]) -> _Pattern | None:
    slots = tuple(Slot(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    metas = [tensor.meta for tensor in tensors]
    try:
        result: Any = function(*(SymbolicTensor(slot, _read, meta) for slot, meta in zip(slots, metas, strict=True)))
    except _NeedsValuesError:
        return None
    return _Pattern(result.expression, slots, result.meta)


class _NeedsValuesError(Exception):
    """A function asked for the value of a slot."""


def _read(expression: Expression, reason: str) -> torch.Tensor:
    raise _NeedsValuesError(reason)
