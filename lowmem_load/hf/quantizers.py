"""Quantized models: which can be loaded, and transformers' quantizers while a model is described."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers

from lowmem_load import foreign_names
from lowmem_load.errors import IncompatibleVersionError, UnsupportedError
from lowmem_load.hf.names import model_config
from lowmem_load.replaced import Handlers, replaced

_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""transformers' class of configuration for each method that can be loaded dequantized."""


def quantization_method(quantization: Any, default: str | None = None) -> str:
    """Return the method of a quantization config, which is an object or as in a config.json."""
    method = _fields(quantization).get("quant_method", default or type(quantization).__name__)
    return str(getattr(method, "value", method))


def is_four_bit(quantization: Any) -> bool:
    """Return whether a quantization config, an object or as in a config.json, is one of bitsandbytes in 4 bits."""
    if quantization_method(quantization, "bitsandbytes") != "bitsandbytes":  # config.json of old checkpoints has none
        return False
    return any(_fields(quantization).get(key) for key in ("load_in_4bit", "_load_in_4bit"))  # a property of the object


def is_four_bit_model(model: Any) -> bool:
    """Return whether the weights of a transformers model are held in 4 bits by bitsandbytes."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None and is_four_bit(quantizer.quantization_config)


def _fields(quantization: Any) -> Mapping[str, Any]:
    return quantization if isinstance(quantization, Mapping) else getattr(quantization, "__dict__", {})


def refuse_quantized(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise for a quantized model that ZeRO-3 cannot partition, unless it is to be dequantized."""
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantization is None or is_four_bit(quantization) or _fields(quantization).get("dequantize") is True:
        return
    raise UnsupportedError(
        f"quantization {quantization_method(quantization)!r} cannot be partitioned by ZeRO-3: every rank "
        "would hold the whole model; ask for dequantize=True where the method has it (fp8, mxfp4), load a "
        "dequantized checkpoint, use bitsandbytes in 4 bits, or use ZeRO stage 0, 1 or 2"
    )


def dequantizing(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the `quantization_config` that loads a checkpoint dequantized."""
    quantization = getattr(model_config(name, kwargs), "quantization_config", None)
    method = None if quantization is None else quantization_method(quantization)
    if method not in _CONFIGS:
        what = "is not quantized" if method is None else f"is quantized by {method!r}"
        raise UnsupportedError(f"{name}: {what}; loaded dequantized can be {', '.join(_CONFIGS)}")
    return getattr(transformers, _CONFIGS[method])(dequantize=True)


def four_bit_config(dtype: torch.dtype) -> Any:
    """Return the `quantization_config` of QLoRA for DeepSpeed's dtype: nf4, with quantized scales."""
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # the scales are whole on every rank
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


@contextlib.contextmanager
def described_quantizers(*, is_partitioned: bool) -> Iterator[None]:
    """Inside, quantizers of transformers make described weights."""
    with contextlib.ExitStack() as stack:

        @functools.cache  # a model and one that it contains may have the same method
        def describe(handlers: Callable[[], Handlers]) -> None:
            stack.enter_context(replaced(handlers()))

        def from_config(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            quantizer = ordinary(*args, **kwargs)
            method = quantization_method(quantizer.quantization_config)
            if is_four_bit(quantizer.quantization_config):
                if importlib.util.find_spec("bitsandbytes") is not None:  # else transformers is about to say so
                    describe(_packing_handlers)
                return quantizer
            if method in _CONFIGS:
                from lowmem_load.hf import dequantize

                describe(dequantize.fp8_handlers if method == "fp8" else dequantize.mxfp4_handlers)
            if is_partitioned:
                refusals = {foreign_names.VALIDATE_ENVIRONMENT.of(type(quantizer)): _refuse_when_checked}
                if hasattr(quantizer, "update_weight_conversions"):  # not every quantizer has it
                    refusals[foreign_names.UPDATE_CONVERSIONS.of(type(quantizer))] = _refuse_stacked
                stack.enter_context(replaced(refusals))
            return quantizer

        stack.enter_context(replaced({foreign_names.MAKE_QUANTIZER: from_config}))
        if is_partitioned:
            stack.enter_context(replaced({foreign_names.INKLING_EXPERTS: _refuse_quantized_experts}))
        yield


def _packing_handlers() -> Handlers:
    from lowmem_load.frameworks import bitsandbytes

    try:
        handlers = bitsandbytes.packing_handlers()
    except IncompatibleVersionError as error:
        raise UnsupportedError(str(error)) from error
    # The model stays where it is.
    return {**handlers, foreign_names.WARM_UP: lambda *_, **__: None}


def _refuse_when_checked(ordinary: Callable[..., Any], quantizer: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse once the quantizer has checked the environment: mxfp4 may decide then to dequantize."""
    try:
        ordinary(quantizer, *args, **kwargs)
    finally:  # for a method that is refused it does not matter what is not installed
        refuse_quantized(quantizer, {})


def _refuse_quantized_experts(ordinary: Callable[..., Any], operation: Any, tensors: Any, *rest: Any, **kw: Any) -> Any:
    if len(tensors) > 1:  # weights and scales; what `save_pretrained` writes is not quantized
        raise _dequantized_whole("nvfp4" if len(tensors) > 2 else "mxfp8")
    return ordinary(operation, tensors, *rest, **kw)


def _refuse_stacked(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse experts that are dequantized into one tensor: each rank would hold the whole model."""
    conversions = ordinary(*args, **kwargs)
    for conversion in conversions:
        first, *others = getattr(conversion, "operations", None) or [None]
        if others and type(first).__name__ in ("CompressedTensorsDequantize", "DecompressExperts"):  # 5.17 to 5.24
            raise _dequantized_whole("compressed-tensors")
    return conversions


def _dequantized_whole(method: str) -> UnsupportedError:
    return UnsupportedError(
        f"quantization {method!r}: transformers dequantizes the experts of this model whole on every rank; load a "
        "dequantized or an fp8 checkpoint (quant_method 'fp8'), or use ZeRO stage 0, 1 or 2"
    )
