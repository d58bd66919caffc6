"""mxfp4 weights (gpt-oss) that transformers dequantizes on load: described, so that each rank reads its own ranges.

transformers' own function writes into memory that it makes, which symbolic tensors cannot follow: it would run at once,
on whole tensors, on every rank. Part of the transformers seam, see `loader.py`.

[Note: a table of values] An mxfp4 value is one of 16 numbers times one of 256 powers of two. So transformers' function
is asked for all 4096 once, and an element is looked up by its code and scale: nothing of its arithmetic is repeated
here, only where it puts which element, which is compared with what it does to a sample.

Source: transformers 5.23 `integrations/mxfp4.py`, `convert_moe_packed_tensors`; since 4.55.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowmem_load.contract import TRANSFORMERS, require
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.hf.replaced import Replacement
from lowmem_load.planning.expression import Elementwise, Expression, expand, held, permute, reshape
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

MODULE = "transformers.integrations.mxfp4"
NUM_CODES = 16

LOOKED_UP = 1 << 16
"""Elements that are looked up at a time: their indexes stay in the processor's cache."""

_HALVES = held(torch.tensor([0, 4], dtype=torch.uint8, device="cpu"))
"""By how many bits a byte is shifted right for the first and for the second of its two codes."""

Convert = Callable[..., torch.Tensor]


def replacements() -> list[Replacement]:
    """Return what stands in for transformers' dequantization while a model is described.

    Raises:
        IncompatibleVersionError: transformers does it in another way.
    """
    require(TRANSFORMERS, {MODULE: ("convert_moe_packed_tensors",)})
    table_of = functools.cache(_checked_table)

    def convert(
        ordinary: Convert, blocks: Any, scales: Any, *, dtype: torch.dtype = torch.bfloat16, **kwargs: Any
    ) -> torch.Tensor:
        symbolic = isinstance(blocks, SymbolicTensor) and isinstance(scales, SymbolicTensor)
        fits = blocks.dim() == 4 and blocks.shape[:-1] == scales.shape and blocks.dtype == scales.dtype == torch.uint8
        if not (symbolic and fits):
            return ordinary(blocks, scales, dtype=dtype, **kwargs)
        table = table_of(ordinary, dtype, blocks.read_now)
        return SymbolicTensor(_described(blocks.expression, scales.expression, table), blocks.read_now)

    return [(importlib.import_module(MODULE), "convert_moe_packed_tensors", convert)]


def _described(blocks: Expression, scales: Expression, table: torch.Tensor) -> Expression:
    """Return the weights (experts, columns, rows) of blocks (experts, rows, groups, bytes)."""
    experts, rows, groups, nbytes = blocks.shape
    num_bytes, columns = groups * nbytes, groups * nbytes * 2
    every = (experts, rows, columns)
    parts = (
        _repeated(reshape(blocks, (experts, rows, num_bytes, 1)), (experts, rows, num_bytes, 2), every),
        _repeated(reshape(scales, (experts, rows, groups, 1)), (experts, rows, groups, 2 * nbytes), every),
        _repeated(reshape(_HALVES, (1, 1, 1, 2)), (experts, rows, num_bytes, 2), every),
    )
    values = Elementwise("mxfp4 dequantization", functools.partial(_look_up, table), parts, every, table.dtype)
    return permute(values, (0, 2, 1))


def _repeated(part: Expression, shape: tuple[int, ...], flat: tuple[int, ...]) -> Expression:
    return reshape(expand(part, shape), flat)


def _look_up(table: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    packed, scales, shifts = parts
    values = torch.empty(packed.numel(), dtype=table.dtype, device=packed.device)
    for start in range(0, packed.numel(), LOOKED_UP):
        some = slice(start, start + LOOKED_UP)
        codes = (packed[some] >> shifts[some]).bitwise_and_(NUM_CODES - 1)
        indexes = codes.int().add_(scales[some], alpha=NUM_CODES)
        torch.index_select(table, 0, indexes, out=values[some])
    return values


def _checked_table(ordinary: Convert, dtype: torch.dtype, read_now: ReadNow) -> torch.Tensor:
    """Return transformers' value of each scale and code. See [Note: a table of values]."""
    every_scale = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 256, 1)
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu").expand(1, 256, 1, NUM_CODES)
    table = ordinary(codes, every_scale, dtype=dtype)[0, 0::2].t().reshape(-1)
    blocks = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8, device="cpu").mul_(37).view(2, 3, 5, 4)
    scales = torch.arange(110, 140, dtype=torch.uint8, device="cpu").view(2, 3, 5)
    ours = read_now(_described(held(blocks), held(scales), table), "a sample of mxfp4")
    theirs = ordinary(blocks, scales, dtype=dtype)
    if ours.shape != theirs.shape or not torch.equal(ours, theirs):
        raise IncompatibleVersionError(
            f"{MODULE}.convert_moe_packed_tensors lays weights out in another way than lowmem_load knows; install "
            f"transformers=={TRANSFORMERS.newest}"
        )
    return table
