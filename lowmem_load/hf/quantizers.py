"""What transformers' quantizers are while a model is described. Part of the transformers seam, see `loader.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import transformers
import transformers.modeling_utils as modeling_utils
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_load.errors import IncompatibleVersionError, UnsupportedError
from lowmem_load.hf import four_bit, fp8, mxfp4
from lowmem_load.hf.names import is_four_bit, model_config, quantization_method, refuse_quantized
from lowmem_load.hf.replaced import Replacement, replaced

_PLACING = ("caching_allocator_warmup", "dispatch_model")
"""What places a whole model on a device, which a quantizer asks for; 5.x dispatches only to several."""


_DEQUANTIZED: Mapping[str, Callable[[], list[Replacement]]] = {"fp8": fp8.replacements, "mxfp4": mxfp4.replacements}
"""Methods whose dequantization is described in another way than by running it, and what stands in for it."""


@contextlib.contextmanager
def described_quantizers(*, is_cut_up: bool) -> Iterator[None]:
    """Let quantizers make described weights; what a method needs is imported when a quantizer of it is made.

    Other quantized weights are refused where parameters will be cut up.
    """
    described: set[str] = set()
    with contextlib.ExitStack() as stack:

        def describe(method: str, replacements: Callable[[], list[Replacement]]) -> None:
            if method not in described:  # else by the quantizer of a model that contains this one
                described.add(method)
                stack.enter_context(replaced(*replacements()))

        def from_config(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            quantizer = ordinary(*args, **kwargs)
            method = quantization_method(quantizer.quantization_config)
            if is_four_bit(quantizer.quantization_config):
                if four_bit.is_there():  # else it is about to say so
                    describe(method, _packing)
                return quantizer
            if method in _DEQUANTIZED:
                describe(method, _DEQUANTIZED[method])
            if is_cut_up:
                _refuse_when_checked(quantizer)
                _refuse_stacked(quantizer)
            return quantizer

        stack.enter_context(replaced((AutoHfQuantizer, "from_config", from_config)))
        yield


def _packing() -> list[Replacement]:
    """Return `four_bit.replacements`, and nothing for what places a model.

    With a bitsandbytes with which this cannot be streamed, stock may load it.

    Raises:
        UnsupportedError: names the release to install.
    """
    try:
        found = four_bit.replacements()
    except IncompatibleVersionError as error:
        raise UnsupportedError(str(error)) from error
    return found + [(modeling_utils, name, _nothing) for name in _PLACING if hasattr(modeling_utils, name)]


def _refuse_when_checked(quantizer: Any) -> None:
    """Refuse quantized weights before the model is built: at the check of what the method needs, which may change it.

    mxfp4 dequantizes where it finds no kernels.
    """

    def validate_environment(*args: Any, **kwargs: Any) -> None:
        del quantizer.validate_environment  # the class has its own
        try:
            quantizer.validate_environment(*args, **kwargs)
        finally:  # what is missing for a method that cannot be followed does not matter
            refuse_quantized(quantizer, {})

    quantizer.validate_environment = validate_environment


_STACKS_AT_ONCE = ("CompressedTensorsDequantize", "DecompressExperts")
"""Operations that write what they dequantize of experts into memory for all of them: 5.17 to 5.23."""


def _refuse_stacked(quantizer: Any) -> None:
    """Refuse experts that are dequantized into memory for all of them: each rank would hold the model whole."""
    ordinary = getattr(quantizer, "update_weight_conversions", None)
    if ordinary is None:  # before 5.0
        return

    def update_weight_conversions(*args: Any, **kwargs: Any) -> Any:
        conversions = ordinary(*args, **kwargs)
        for conversion in conversions:
            first, *others = getattr(conversion, "operations", None) or [None]
            if others and type(first).__name__ in _STACKS_AT_ONCE:
                raise UnsupportedError(
                    "quantization 'compressed-tensors': transformers dequantizes the experts of this model whole on "
                    "every rank; load a dequantized or an fp8 checkpoint (quant_method 'fp8'), or use ZeRO stage 0, 1 "
                    "or 2"
                )
        return conversions

    quantizer.update_weight_conversions = update_weight_conversions


def _nothing(*_: Any, **__: Any) -> None:
    pass


_DEQUANTIZING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""transformers' class of quantization configs for each method that can be loaded dequantized."""


def dequantizing(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the `quantization_config` that loads a checkpoint dequantized.

    Raises:
        UnsupportedError: it is not quantized, or in a way that has no such load.
    """
    quantization = getattr(model_config(name, kwargs), "quantization_config", None)
    method = None if quantization is None else quantization_method(quantization)
    if method not in _DEQUANTIZING:
        held = "is not quantized" if method is None else f"is quantized by {method!r}"
        raise UnsupportedError(f"{name}: {held}; loaded dequantized can be {', '.join(_DEQUANTIZING)}")
    return getattr(transformers, _DEQUANTIZING[method])(dequantize=True)
