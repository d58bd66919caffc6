"""Quantizers of transformers while a model is described."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_load.errors import UnsupportedError
from lowmem_load.hf.quantizers import described_quantizers


class CompressedTensorsDequantize:
    """By its name, as it has many: it needs a package that is not installed."""


class Quantizer:
    def __init__(self, conversions: list[Any]) -> None:
        self.quantization_config = SimpleNamespace(quant_method="compressed-tensors", dequantize=True)
        self._conversions = conversions

    def validate_environment(self) -> None:
        pass

    def update_weight_conversions(self, *_: Any) -> list[Any]:
        return self._conversions


@pytest.mark.parametrize("is_partitioned", [True, False])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_experts_that_would_be_dequantized_whole_are_refused(
    is_partitioned: bool, is_stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations: list[object] = [CompressedTensorsDequantize(), *([object()] if is_stacked else [])]
    conversions = [SimpleNamespace(), SimpleNamespace(operations=[]), SimpleNamespace(operations=operations)]
    monkeypatch.setattr(AutoHfQuantizer, "from_config", lambda *_, **__: Quantizer(conversions))
    with described_quantizers(is_partitioned=is_partitioned):
        quantizer: Any = AutoHfQuantizer.from_config(None)
        quantizer.validate_environment()
        if is_partitioned and is_stacked:
            with pytest.raises(
                UnsupportedError, match=r"compressed-tensors.*dequantizes the experts of this model whole"
            ):
                quantizer.update_weight_conversions([], None)
        else:
            assert quantizer.update_weight_conversions([], None) is conversions


@pytest.mark.parametrize("is_partitioned", [True, False])
@pytest.mark.parametrize("method", ["nvfp4", "mxfp8", None])
def test_experts_without_a_quantizer_are_refused_when_quantized(is_partitioned: bool, method: str | None) -> None:
    import transformers.core_model_loading as loading

    owner = getattr(loading, "Inkling2LoopDequantizeExperts", None)
    if owner is None:
        pytest.skip("transformers before 5.24")
    names = ["w", "scale", "amax", "denominator"][: {"nvfp4": 4, "mxfp8": 2, None: 1}[method]]
    shapes = {"w": (2, 3, 32), "scale": (2, 3, 4 if method == "nvfp4" else 1), "amax": (2,), "denominator": (2,)}
    tensors = {name: torch.ones(shapes[name]) for name in names}
    with described_quantizers(is_partitioned=is_partitioned):
        if is_partitioned and method:
            with pytest.raises(UnsupportedError, match=f"{method}.*dequantizes the experts of this model whole"):
                owner().convert(tensors, names, ["experts"])
        else:
            wide = 64 if method == "nvfp4" else 32
            sources = [*names, None, None, None][:4]
            assert owner().convert(tensors, sources, ["experts"])["experts"].shape == (2, 3, wide)
