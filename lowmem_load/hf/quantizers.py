"""What transformers' quantizers are while a model is described. Part of the transformers seam, see `loader.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers.modeling_utils as modeling_utils
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_load.hf.names import is_four_bit, refuse_quantized
from lowmem_load.hf.replaced import replaced
from lowmem_load.quantize import four_bit

_PLACING = ("caching_allocator_warmup", "dispatch_model")
"""What places a whole model on a device, which a quantizer asks for; 5.x dispatches only to several."""


@contextlib.contextmanager
def described_quantizers(*, is_cut_up: bool) -> Iterator[None]:
    """Let a quantizer of 4-bit weights make described ones; bitsandbytes is imported then, and not before.

    Args:
        is_cut_up: whether parameters will be cut up, for which other quantized ones are refused.
    """
    ordinary = AutoHfQuantizer.from_config
    with contextlib.ExitStack() as stack:

        def from_config(*args: Any, **kwargs: Any) -> Any:
            quantizer = ordinary(*args, **kwargs)
            if is_four_bit(quantizer.quantization_config):
                if not four_bit.is_there():
                    return quantizer  # which is about to say so
                for owner, name, function in four_bit.replacements():
                    stack.enter_context(replaced(owner, name, function))
                for name in _PLACING:
                    if hasattr(modeling_utils, name):
                        stack.enter_context(replaced(modeling_utils, name, _nothing))
            elif is_cut_up:
                _refuse_when_checked(quantizer)
            return quantizer

        with replaced(AutoHfQuantizer, "from_config", from_config):
            yield


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


def _nothing(*_: Any, **__: Any) -> None:
    pass
