"""fp8 weights with a scale for each block, which transformers dequantizes while it loads.

Source: transformers 5.24 `integrations/finegrained_fp8.py`, `Fp8Dequantize` (`_dequantize_one` since 5.8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.quantized.format import Patterns, QuantizedFormat
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.tensor import SymbolicTensor

Dequantize = Callable[..., torch.Tensor]


class FineGrainedFp8(QuantizedFormat):
    """fp8. See the module."""

    method = "fp8"
    config_class = "FineGrainedFP8Config"

    def handlers(self) -> Handlers:
        """Return what stands in for transformers' dequantization: of partial blocks, too."""
        patterns = Patterns()
        configs: dict[int, Any] = {}  # by id; kept, because quantizers of a composite model may have rules of their own

        def dequantize(
            ordinary: Dequantize, operation: Any, quantized: Any, scales: Any, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            if not (isinstance(quantized, SymbolicTensor) and isinstance(scales, SymbolicTensor)):
                return ordinary(operation, quantized, scales, *args, **kwargs)

            # transformers divides rows by scales: 192 rows in blocks of 128 would get the scales of blocks of 96. So a
            # partial last block is padded, dequantized by transformers, and cut again. The padding is never read.
            def padded(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
                padding = _padding(operation, quantized, scales)
                for dim, size in zip((-2, -1), padding, strict=True):
                    if size:
                        last = quantized.narrow(dim, quantized.shape[dim] - 1, 1)
                        sizes = *quantized.shape[:dim], size, *quantized.shape[dim:][1:]
                        quantized = torch.cat([quantized, last.expand(sizes)], dim)
                values = ordinary(operation, quantized, scales, *args, **kwargs)
                rows, columns = (size - added for size, added in zip(values.shape[-2:], padding, strict=True))
                return values[..., :rows, :columns] if any(padding) else values

            config = operation.hf_quantizer.quantization_config
            configs[id(config)] = config
            settings = type(operation), id(config), args, *sorted(kwargs.items())
            return patterns.applied(padded, (quantized, scales), settings)

        return {foreign_names.FP8_DEQUANTIZE: dequantize}


def _padding(operation: Any, quantized: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns that the last blocks lack; none if the scales are not one per block."""
    block = getattr(operation.hf_quantizer.quantization_config, "weight_block_size", None)
    if block is None or quantized.itemsize != 1 or not quantized.is_floating_point() or scales.dim() < 2:
        return 0, 0
    grid = tuple(-(-size // step) for size, step in zip(quantized.shape[-2:], block, strict=True))
    if grid != tuple(scales.shape[-2:]):
        return 0, 0
    rows, columns = (-size % step for size, step in zip(quantized.shape[-2:], block, strict=True))
    return rows, columns
