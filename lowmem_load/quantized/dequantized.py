"""The formats whose weights transformers dequantizes while it loads: fp8, mxfp4 and compressed-tensors."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.errors import IncompatibleVersionError, UnsupportedError
from lowmem_load.foreign_names import ForeignName
from lowmem_load.planning.expression import (
    Elementwise,
    Expression,
    Instance,
    Placeholder,
    expand,
    hold,
    permute,
    reshape,
    slice_dim,
)
from lowmem_load.quantized.format import QuantizedFormat
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

Unpack = Callable[..., torch.Tensor]

NUM_CODES = 16
"""Codes of 4 bits."""

_LOOKED_UP = 1 << 16
"""Codes that are looked up at a time: their indexes stay in the processor's cache."""


class FineGrainedFp8(QuantizedFormat):
    """fp8 weights with a scale for each block.

    Source: transformers 5.24 `integrations/finegrained_fp8.py`, `Fp8Dequantize` (`_dequantize_one` since 5.8).
    """

    method = "fp8"
    config_class = "FineGrainedFP8Config"

    def handlers(self) -> Handlers:
        """Return what stands in for transformers' dequantization: of partial blocks, too."""
        patterns = Patterns()
        configs: dict[int, Any] = {}  # by id; kept, because quantizers of a composite model may have rules of their own

        def dequantize(
            ordinary: Unpack, operation: Any, quantized: Any, scales: Any, *args: Any, **kwargs: Any
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


# -- formats of 4-bit codes --------------------------------------------------------------------------------------------


class Mxfp4(QuantizedFormat):
    """mxfp4 weights (gpt-oss). A value is one of 16 numbers times one of 256 powers of two, so a table has it.

    Source: transformers 5.24 `integrations/mxfp4.py`, `convert_moe_packed_tensors`.
    """

    method = "mxfp4"
    config_class = "Mxfp4Config"

    def handlers(self) -> Handlers:
        """Return what stands in for transformers' dequantization."""
        table_of = functools.cache(_mxfp4_table)

        def convert(
            ordinary: Unpack, blocks: Any, scales: Any, *args: Any, dtype: Any = torch.bfloat16, **kwargs: Any
        ) -> torch.Tensor:
            symbolic = isinstance(blocks, SymbolicTensor) and isinstance(scales, SymbolicTensor)
            are_bytes = blocks.dtype == scales.dtype == torch.uint8
            is_known = not args and kwargs.keys() <= {"rows_per_chunk"}
            if not (symbolic and are_bytes and is_known and blocks.dim() == 4 and blocks.shape[:-1] == scales.shape):
                return ordinary(blocks, scales, *args, dtype=dtype, **kwargs)
            table = table_of(ordinary, dtype, blocks.read_now)
            return SymbolicTensor(_described_mxfp4(blocks.expression, scales.expression, table), blocks.read_now)

        return {foreign_names.MXFP4_DEQUANTIZE: convert}


def _described_mxfp4(blocks: Expression, scales: Expression, table: torch.Tensor) -> Expression:
    """Return the weights (experts, columns, rows) of blocks (experts, rows, groups, bytes)."""
    experts, rows, groups, nbytes = blocks.shape
    packed = reshape(blocks, (experts, rows, groups * nbytes))
    return permute(values_of_codes("mxfp4 dequantization", packed, table, scales), (0, 2, 1))


def _mxfp4_table(ordinary: Unpack, dtype: torch.dtype, read_now: ReadNow) -> torch.Tensor:
    every_scale = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 256, 1)
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu").expand(1, 256, 1, NUM_CODES)
    table = ordinary(codes, every_scale, dtype=dtype)[0, 0::2].t().reshape(-1)
    blocks = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8, device="cpu").mul_(37).view(2, 3, 5, 4)
    scales = torch.arange(110, 140, dtype=torch.uint8, device="cpu").view(2, 3, 5)
    theirs = ordinary(blocks, scales, dtype=dtype)
    check_sample(foreign_names.MXFP4_DEQUANTIZE, _described_mxfp4(hold(blocks), hold(scales), table), theirs, read_now)
    return table


class CompressedTensors(QuantizedFormat):
    """compressed-tensors: fp8, int4 (pack-quantized) and NVFP4 (nvfp4-pack-quantized).

    What the package computes with scales is described as it runs. Only its unpacking of 4-bit codes would need full
    weights: it is replaced by a table of the 16 codes, which is checked against it.

    Source: compressed-tensors 0.20.1 `compressors/{nvfp4,pack_quantized}/helpers.py`; transformers 5.17 to 5.24
    `integrations/compressed_tensors.py`.
    """

    method = "compressed-tensors"
    config_class = "CompressedTensorsConfig"

    def handlers(self) -> Handlers:
        """Return what stands in for the unpacking of 4-bit codes."""
        if importlib.util.find_spec("compressed_tensors") is None:  # transformers is about to say so
            return {}
        fp4_table, int4_table = functools.cache(_fp4_table), functools.cache(_int4_table)

        def unpack_fp4(
            ordinary: Unpack, a: Any, m: int, n: int, dtype: Any = torch.bfloat16, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            if not isinstance(a, SymbolicTensor) or (a.dim(), a.dtype) != (2, torch.uint8) or args or kwargs:
                return ordinary(a, m, n, dtype, *args, **kwargs)
            return SymbolicTensor(_unpacked(a.expression, fp4_table(ordinary, dtype, a.read_now)), a.read_now)

        def unpack_int4(
            ordinary: Unpack, value: Any, num_bits: int, shape: Any, packed_dim: int = 1, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            kind = (4, 1, 2, torch.int32)
            is_known = isinstance(value, SymbolicTensor) and not args and not kwargs
            if not is_known or (num_bits, packed_dim, value.dim(), value.dtype) != kind:
                return ordinary(value, num_bits, shape, packed_dim, *args, **kwargs)
            whole = _unpacked(value.expression, int4_table(ordinary, value.read_now))  # rows fill whole words
            return SymbolicTensor(slice_dim(whole, 1, 0, 1, int(shape[1])), value.read_now)

        return {foreign_names.UNPACK_FP4: unpack_fp4, foreign_names.UNPACK_INT4: unpack_int4}

    def refusals(self, quantizer: Any) -> Handlers:
        """See `QuantizedFormat`."""
        if not hasattr(quantizer, "update_weight_conversions"):
            return {}
        return {foreign_names.UPDATE_CONVERSIONS.of(type(quantizer)): _refuse_stacked}


def _unpacked(packed: Expression, table: torch.Tensor) -> Expression:
    return values_of_codes("unpacking of 4-bit codes", packed, table)


def _fp4_table(ordinary: Unpack, dtype: torch.dtype | None, read_now: ReadNow) -> torch.Tensor:
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu")
    table = ordinary(codes[None], 1, 2 * NUM_CODES, dtype)[0, 0::2].contiguous()
    sample = torch.arange(256, dtype=torch.uint8, device="cpu").view(8, 32)
    theirs = ordinary(sample, 8, 64, dtype)
    check_sample(foreign_names.UNPACK_FP4, _unpacked(hold(sample), table), theirs, read_now)
    return table


def _int4_table(ordinary: Unpack, read_now: ReadNow) -> torch.Tensor:
    table = torch.arange(-8, 8, dtype=torch.int8, device="cpu")
    sample = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int32).view(4, 16)
    theirs = ordinary(sample, 4, (4, 128))
    check_sample(foreign_names.UNPACK_INT4, _unpacked(hold(sample), table), theirs, read_now)
    return table


def _refuse_stacked(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse experts that are dequantized into one tensor: each rank would need the full model."""
    conversions = ordinary(*args, **kwargs)
    for conversion in conversions:
        first, *others = getattr(conversion, "operations", None) or [None]
        if others and type(first).__name__ in ("CompressedTensorsDequantize", "DecompressExperts"):  # 5.17 to 5.24
            raise dequantized_whole("compressed-tensors")
    return conversions


def dequantized_whole(method: str) -> UnsupportedError:
    """Return the error for experts that transformers dequantizes in full on every rank."""
    return UnsupportedError(
        f"quantization {method!r}: transformers dequantizes the experts of this model in full on every rank; load a "
        "dequantized or an fp8 checkpoint (quant_method 'fp8'), or use ZeRO stage 0, 1 or 2"
    )


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
