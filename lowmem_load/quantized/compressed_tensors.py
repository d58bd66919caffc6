"""compressed-tensors, dequantized while it loads: fp8, int4 (pack-quantized) and NVFP4 (nvfp4-pack-quantized).

What the package computes with scales is described as it runs. Only its unpacking of 4-bit codes would need whole
weights: it is replaced by a table of the 16 codes, which is checked against it.

Source: compressed-tensors 0.20.1 `compressors/{nvfp4,pack_quantized}/helpers.py`; transformers 5.17 to 5.24
`integrations/compressed_tensors.py`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from lowmem_load import foreign_names
from lowmem_load.errors import UnsupportedError
from lowmem_load.planning.expression import Expression, hold, slice_dim
from lowmem_load.quantized.format import NUM_CODES, QuantizedFormat, check_sample, values_of_codes
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.initialise import ReadNow
from lowmem_load.symbolic.tensor import SymbolicTensor

Unpack = Callable[..., torch.Tensor]


class CompressedTensors(QuantizedFormat):
    """compressed-tensors. See the module."""

    method = "compressed-tensors"
    config_class = "CompressedTensorsConfig"

    def handlers(self) -> Handlers:
        """Return what stands in for the unpacking of 4-bit codes."""
        if importlib.util.find_spec("compressed_tensors") is None:  # transformers is about to say so
            return {}
        fp4_table, int4_table = functools.cache(_fp4_table), functools.cache(_int4_table)

        def unpack_fp4(
            ordinary: Unpack, packed: Any, rows: int, columns: int, dtype: torch.dtype | None = torch.bfloat16
        ) -> torch.Tensor:
            if not isinstance(packed, SymbolicTensor) or (packed.dim(), packed.dtype) != (2, torch.uint8):
                return ordinary(packed, rows, columns, dtype)
            table = fp4_table(ordinary, dtype, packed.read_now)
            return SymbolicTensor(_described(packed.expression, table), packed.read_now)

        def unpack_int4(ordinary: Unpack, packed: Any, num_bits: int, shape: Any, packed_dim: int = 1) -> torch.Tensor:
            kind = (4, 1, 2, torch.int32)
            if not isinstance(packed, SymbolicTensor) or (num_bits, packed_dim, packed.dim(), packed.dtype) != kind:
                return ordinary(packed, num_bits, shape, packed_dim)
            whole = _described(packed.expression, int4_table(ordinary, packed.read_now))  # rows fill whole words
            return SymbolicTensor(slice_dim(whole, 1, 0, 1, int(shape[1])), packed.read_now)

        return {foreign_names.UNPACK_FP4: unpack_fp4, foreign_names.UNPACK_INT4: unpack_int4}

    def refusals(self, quantizer: Any) -> Handlers:
        """See `QuantizedFormat`."""
        if not hasattr(quantizer, "update_weight_conversions"):
            return {}
        return {foreign_names.UPDATE_CONVERSIONS.of(type(quantizer)): _refuse_stacked}


def _described(packed: Expression, table: torch.Tensor) -> Expression:
    return values_of_codes("unpacking of 4-bit codes", packed, table)


def _fp4_table(ordinary: Unpack, dtype: torch.dtype | None, read_now: ReadNow) -> torch.Tensor:
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu")
    table = ordinary(codes[None], 1, 2 * NUM_CODES, dtype)[0, 0::2].contiguous()
    sample = torch.arange(256, dtype=torch.uint8, device="cpu").view(8, 32)
    theirs = ordinary(sample, 8, 64, dtype)
    check_sample(foreign_names.UNPACK_FP4, _described(hold(sample), table), theirs, read_now)
    return table


def _int4_table(ordinary: Unpack, read_now: ReadNow) -> torch.Tensor:
    table = torch.arange(-8, 8, dtype=torch.int8, device="cpu")
    sample = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int32).view(4, 16)
    theirs = ordinary(sample, 4, (4, 128))
    check_sample(foreign_names.UNPACK_INT4, _described(hold(sample), table), theirs, read_now)
    return table


def _refuse_stacked(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse experts that are dequantized into one tensor: each rank would hold the whole model."""
    conversions = ordinary(*args, **kwargs)
    for conversion in conversions:
        first, *others = getattr(conversion, "operations", None) or [None]
        if others and type(first).__name__ in ("CompressedTensorsDequantize", "DecompressExperts"):  # 5.17 to 5.24
            raise dequantized_whole("compressed-tensors")
    return conversions


def dequantized_whole(method: str) -> UnsupportedError:
    """Return the error for experts that transformers dequantizes whole on every rank."""
    return UnsupportedError(
        f"quantization {method!r}: transformers dequantizes the experts of this model whole on every rank; load a "
        "dequantized or an fp8 checkpoint (quant_method 'fp8'), or use ZeRO stage 0, 1 or 2"
    )
