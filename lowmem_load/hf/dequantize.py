"""fp8 and mxfp4 weights that transformers dequantizes while it loads: described, so each rank reads its own ranges.

Source: transformers 5.24 `integrations/finegrained_fp8.py`, `Fp8Dequantize` (`_dequantize_one` since 5.8), and
`integrations/mxfp4.py`, `convert_moe_packed_tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.contract import TRANSFORMERS
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.planning.expression import (
    Elementwise,
    Expression,
    Instance,
    Placeholder,
    expand,
    hold,
    permute,
    reshape,
)
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

Dequantize = Callable[..., torch.Tensor]


def fp8_handlers() -> Handlers:
    """Return what stands in for transformers' dequantization of fp8: of partial blocks, too."""
    patterns = Patterns()
    known: dict[int, tuple[Any, str]] = {}  # by the id of a configuration, which it keeps: its text

    def rules(operation: Any) -> str:
        """Return what tells operations apart: one quantizer of a composite model may have other rules than another."""
        config = operation.hf_quantizer.quantization_config
        if id(config) not in known:
            known[id(config)] = config, str(vars(config))
        return f"{type(operation)} {known[id(config)][1]}"

    def dequantize(
        ordinary: Dequantize, operation: Any, quantized: Any, scales: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not (isinstance(quantized, SymbolicTensor) and isinstance(scales, SymbolicTensor)):
            return ordinary(operation, quantized, scales, *args, **kwargs)
        # transformers divides rows by scales: 192 rows in blocks of 128 would get the scales of blocks of 96. So a
        # partial last block is padded, dequantized by transformers, and cut again. The padding is never read.
        padding = _padding(operation, quantized, scales)

        def padded(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            for dim, size in zip((-2, -1), padding, strict=True):
                if size:
                    last = quantized.narrow(dim, quantized.shape[dim] - 1, 1)
                    sizes = *quantized.shape[:dim], size, *quantized.shape[dim:][1:]
                    quantized = torch.cat([quantized, last.expand(sizes)], dim)
            values = ordinary(operation, quantized, scales, *args, **kwargs)
            rows, columns = (size - added for size, added in zip(values.shape[-2:], padding, strict=True))
            return values[..., :rows, :columns] if any(padding) else values

        return patterns.applied(padded, (quantized, scales), (rules(operation), padding, args, *sorted(kwargs.items())))

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


def _no_values(expression: Expression, reason: str) -> torch.Tensor:
    raise _NeedsValuesError(reason)


# -- mxfp4 (gpt-oss): a value is one of 16 numbers times one of 256 powers of two, so it is looked up in a table -------

NUM_CODES = 16
LOOKED_UP = 1 << 16  # elements at a time: their indexes stay in the processor's cache

_HALVES = hold(torch.tensor([0, 4], dtype=torch.uint8, device="cpu"))
"""Bits by which a byte is shifted right for its first and its second code."""


def mxfp4_handlers() -> Handlers:
    """Return what stands in for transformers' dequantization of mxfp4."""
    table_of = functools.cache(_checked_table)

    def convert(
        ordinary: Dequantize, blocks: Any, scales: Any, *, dtype: torch.dtype = torch.bfloat16, **kwargs: Any
    ) -> torch.Tensor:
        symbolic = isinstance(blocks, SymbolicTensor) and isinstance(scales, SymbolicTensor)
        fits = blocks.dim() == 4 and blocks.shape[:-1] == scales.shape and blocks.dtype == scales.dtype == torch.uint8
        if not (symbolic and fits):
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
