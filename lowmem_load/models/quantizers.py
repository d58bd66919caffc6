"""Quantized models of transformers: their formats, which can be loaded, and its quantizers while one is described."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers

from lowmem_load import foreign_names
from lowmem_load.errors import UnsupportedError
from lowmem_load.models.model_class import model_config
from lowmem_load.quantized.bitsandbytes import BitsAndBytes4Bit
from lowmem_load.quantized.dequantized import CompressedTensors, FineGrainedFp8, Mxfp4, dequantized_whole
from lowmem_load.quantized.format import QuantizedFormat, fields_of, method_of
from lowmem_load.replaced import replaced

FORMATS: tuple[QuantizedFormat, ...] = (BitsAndBytes4Bit(), FineGrainedFp8(), Mxfp4(), CompressedTensors())
"""The formats that are known. Others can be loaded, but not be partitioned."""


def format_of(quantization: Any) -> QuantizedFormat:
    """Return the format of a quantization config, an object or as in a config.json; else one that does nothing."""
    return next((each for each in FORMATS if each.recognizes(quantization)), QuantizedFormat())


def stays_packed(quantization: Any) -> bool:
    """Return whether weights of a quantization config are packed in memory, and can be partitioned and sharded so."""
    return format_of(quantization).stays_packed


def packed_format(model: Any) -> QuantizedFormat:
    """Return the format in which a transformers model is packed in memory; if it is not, one that does nothing."""
    return format_of(getattr(getattr(model, "hf_quantizer", None), "quantization_config", None))


def refuse_quantized(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise for a quantized model that ZeRO-3 cannot partition, unless it is to be dequantized."""
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantization is None or stays_packed(quantization) or fields_of(quantization).get("dequantize") is True:
        return
    raise UnsupportedError(
        f"quantization {method_of(quantization)!r} cannot be partitioned by ZeRO-3, so every rank would need the full "
        "model. Pass dequantize=True in the quantization_config if it has that (fp8, mxfp4, "
        "compressed-tensors), load a dequantized checkpoint, use bitsandbytes in 4 bits, or use ZeRO stage 0, 1 or 2"
    )


def dequantizing(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the `quantization_config` that loads a checkpoint dequantized."""
    quantization = getattr(model_config(name, kwargs), "quantization_config", None)
    found = format_of(quantization)
    if not found.config_class:
        what = "is not quantized" if quantization is None else f"is quantized by {method_of(quantization)!r}"
        known = ", ".join(each.method for each in FORMATS if each.config_class)
        raise UnsupportedError(f"{name}: {what}; these can be loaded dequantized: {known}")
    return getattr(transformers, found.config_class)(dequantize=True)


def four_bit_config(dtype: torch.dtype) -> Any:
    """Return the `quantization_config` of QLoRA for DeepSpeed's dtype: nf4, with quantized scales."""
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # every rank has the scales in full
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


@contextlib.contextmanager
def described_quantizers(*, is_partitioned: bool) -> Iterator[None]:
    """Inside, quantizers of transformers make described weights."""
    with contextlib.ExitStack() as stack:

        @functools.cache  # a model and one that it contains may have the same format
        def describe(found: QuantizedFormat) -> None:
            stack.enter_context(replaced(found.handlers()))

        def from_config(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            quantizer = ordinary(*args, **kwargs)
            found = format_of(quantizer.quantization_config)
            describe(found)
            if is_partitioned and not found.stays_packed:
                refuse = {foreign_names.VALIDATE_ENVIRONMENT.of(type(quantizer)): _refuse_when_checked}
                stack.enter_context(replaced({**found.refusals(quantizer), **refuse}))
            return quantizer

        stack.enter_context(replaced({foreign_names.MAKE_QUANTIZER: from_config}))
        if is_partitioned:
            stack.enter_context(replaced({foreign_names.INKLING_EXPERTS: _refuse_quantized_experts}))
        yield


def _refuse_when_checked(ordinary: Callable[..., Any], quantizer: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse once the quantizer has checked the environment: mxfp4 may decide then to dequantize."""
    try:
        ordinary(quantizer, *args, **kwargs)
    finally:  # for a method that is refused it does not matter what is not installed
        refuse_quantized(quantizer, {})


def _refuse_quantized_experts(ordinary: Any, operation: Any, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
    if len(input_dict) > 1:  # weights and scales; what `save_pretrained` writes is not quantized
        raise dequantized_whole("nvfp4" if len(input_dict) > 2 else "mxfp8")
    return ordinary(operation, input_dict, *args, **kwargs)
