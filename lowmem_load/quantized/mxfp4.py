"""mxfp4 weights (gpt-oss), which transformers dequantizes while it loads.

A value is one of 16 numbers times one of 256 powers of two, so it is looked up in a table.

Source: transformers 5.24 `integrations/mxfp4.py`, `convert_moe_packed_tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.planning.expression import Expression, hold, permute, reshape
from lowmem_load.quantized.format import NUM_CODES, QuantizedFormat, check_sample, values_of_codes
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

Dequantize = Callable[..., torch.Tensor]


class Mxfp4(QuantizedFormat):
    """mxfp4. See the module."""

    method = "mxfp4"
    config_class = "Mxfp4Config"

    def handlers(self) -> Handlers:
        """Return what stands in for transformers' dequantization."""
        table_of = functools.cache(_checked_table)

        def convert(
            ordinary: Dequantize, blocks: Any, scales: Any, *, dtype: torch.dtype = torch.bfloat16, **kwargs: Any
        ) -> torch.Tensor:
            symbolic = isinstance(blocks, SymbolicTensor) and isinstance(scales, SymbolicTensor)
            are_bytes = blocks.dtype == scales.dtype == torch.uint8
            if not (symbolic and are_bytes and blocks.dim() == 4 and blocks.shape[:-1] == scales.shape):
                return ordinary(blocks, scales, dtype=dtype, **kwargs)
            table = table_of(ordinary, dtype, blocks.read_now)
            return SymbolicTensor(_described(blocks.expression, scales.expression, table), blocks.read_now)

        return {foreign_names.MXFP4_DEQUANTIZE: convert}


def _described(blocks: Expression, scales: Expression, table: torch.Tensor) -> Expression:
    """Return the weights (experts, columns, rows) of blocks (experts, rows, groups, bytes)."""
    experts, rows, groups, nbytes = blocks.shape
    packed = reshape(blocks, (experts, rows, groups * nbytes))
    return permute(values_of_codes("mxfp4 dequantization", packed, table, scales), (0, 2, 1))


def _checked_table(ordinary: Dequantize, dtype: torch.dtype, read_now: ReadNow) -> torch.Tensor:
    every_scale = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 256, 1)
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu").expand(1, 256, 1, NUM_CODES)
    table = ordinary(codes, every_scale, dtype=dtype)[0, 0::2].t().reshape(-1)
    blocks = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8, device="cpu").mul_(37).view(2, 3, 5, 4)
    scales = torch.arange(110, 140, dtype=torch.uint8, device="cpu").view(2, 3, 5)
    theirs = ordinary(blocks, scales, dtype=dtype)
    check_sample(foreign_names.MXFP4_DEQUANTIZE, _described(hold(blocks), hold(scales), table), theirs, read_now)
    return table
