"""mxfp4 weights (gpt-oss), which transformers dequantizes while it loads.

A value is one of 16 numbers times one of 256 powers of two, so it is looked up in a table.

Source: transformers 5.24 `integrations/mxfp4.py`, `convert_moe_packed_tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.foreign_names import TRANSFORMERS
from lowmem_load.planning.expression import Elementwise, Expression, expand, hold, permute, reshape
from lowmem_load.quantized.format import QuantizedFormat
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

Dequantize = Callable[..., torch.Tensor]

NUM_CODES = 16
LOOKED_UP = 1 << 16  # elements at a time: their indexes stay in the processor's cache

_HALVES = hold(torch.tensor([0, 4], dtype=torch.uint8, device="cpu"))
"""Bits by which a byte is shifted right for its first and its second code."""


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
    num_bytes, columns = groups * nbytes, groups * nbytes * 2
    every = (experts, rows, columns)

    def repeated(part: Expression, *sizes: int) -> Expression:
        return reshape(expand(part, (experts, rows, *sizes)), every)

    parts = (
        repeated(reshape(blocks, (experts, rows, num_bytes, 1)), num_bytes, 2),
        repeated(reshape(scales, (experts, rows, groups, 1)), groups, 2 * nbytes),
        repeated(reshape(_HALVES, (1, 1, 1, 2)), num_bytes, 2),
    )
    values = Elementwise("mxfp4 dequantization", functools.partial(_look_up, table), parts, every, table.dtype)
    return permute(values, (0, 2, 1))


def _look_up(table: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    packed, scales, shifts = parts
    values = torch.empty(packed.numel(), dtype=table.dtype, device=packed.device)
    for start in range(0, packed.numel(), LOOKED_UP):
        some = slice(start, start + LOOKED_UP)
        codes = (packed[some] >> shifts[some]).bitwise_and_(NUM_CODES - 1)
        indexes = codes.int().add_(scales[some], alpha=NUM_CODES)
        torch.index_select(table, 0, indexes, out=values[some])
    return values


def _checked_table(ordinary: Dequantize, dtype: torch.dtype, read_now: ReadNow) -> torch.Tensor:
    every_scale = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 256, 1)
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu").expand(1, 256, 1, NUM_CODES)
    table = ordinary(codes, every_scale, dtype=dtype)[0, 0::2].t().reshape(-1)
    blocks = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8, device="cpu").mul_(37).view(2, 3, 5, 4)
    scales = torch.arange(110, 140, dtype=torch.uint8, device="cpu").view(2, 3, 5)
    ours = read_now(_described(hold(blocks), hold(scales), table), "a sample of mxfp4")
    theirs = ordinary(blocks, scales, dtype=dtype)
    if ours.shape != theirs.shape or not torch.equal(ours, theirs):
        raise IncompatibleVersionError(
            f"{foreign_names.MXFP4_DEQUANTIZE} lays weights out in another way than lowmem_load knows; "
            f"install transformers=={TRANSFORMERS.newest}"
        )
    return table
