"""A weight that is stored quantized, by a method made up here: what is planned, filled, restored and refused of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_load.config.settings import Settings, read_settings
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.frameworks.bitsandbytes import check_packable, check_packed
from lowmem_load.symbolic.context import Context
from lowmem_load.symbolic.quantized import Companion, Quantized, QuantizedTensor
from tests.described import described, write_file
from tests.described import module as module_of

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path)


class Restored:
    """What a method is asked to restore."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, nn.Parameter, dict[str, torch.Tensor], torch.device]] = []

    def __call__(
        self, name: str, made: nn.Parameter, companions: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self.calls.append((name, made, dict(companions), device))


def quantized(tensors: Mapping[str, Any], method: str = "halves", restore: Any = None) -> QuantizedTensor:
    """Stands for x packed; z goes with it, and a number that comes with the packing."""
    companions = {
        "scales": Companion((6,), torch.float32, tensors["z"].expression),
        "mean": Companion((2,), torch.float16, None),
    }
    return QuantizedTensor.of(tensors["x"], tensors["x"].expression, Quantized(method, companions, restore), blocks=8)


def module(w: torch.Tensor, **others: torch.Tensor) -> nn.Module:
    made = module_of(**({} if isinstance(w, nn.Parameter) else {"w": w}), **others)
    if isinstance(w, nn.Parameter):
        made.register_parameter("w", w)
    return made


# -- settings --------------------------------------------------------------------------------------------------------


def settings_of(config: Mapping[str, Any], **options: Any) -> Settings:
    return read_settings({**BF16, **config}, world_size=2, **options)


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **section}}


NVME = zero(offload_param={"device": "nvme", "nvme_path": "/nowhere"})


def packed_as(file: Path, dtype: torch.dtype) -> nn.Module:
    def make(tensors: Mapping[str, Any], _: Context) -> nn.Module:
        cast = {**tensors, "x": tensors["x"].to(dtype)}
        return module(w=quantized(cast))

    return described(file, make).model


@pytest.mark.parametrize(
    ("config", "options", "dtype", "error", "words"),
    [
        ({}, {}, torch.float32, ConfigError, "w: its 4-bit values are stored as torch.float32, and DeepSpeed"),
        ({}, {}, torch.float16, ConfigError, "use bnb_4bit_quant_storage=torch.bfloat16"),
        (zero(zero_quantized_weights=True), {}, torch.bfloat16, ConfigError, "^zero_quantized_weights: "),
        (
            *(zero(zero_quantized_nontrainable_weights=True), {}, torch.bfloat16, ConfigError),
            "^zero_quantized_nontrainable_weights: ",
        ),
        (
            *(zero(use_all_reduce_for_fetch_params=True), {}, torch.uint8, ConfigError),
            "^use_all_reduce_for_fetch_params: ",
        ),
        (
            *(zero(stage3_use_all_reduce_for_fetch_params=True), {}, torch.uint8, ConfigError),
            "^stage3_use_all_reduce_for_fetch_params: ",
        ),
        ({}, {"partition": "w"}, torch.bfloat16, UnsupportedError, "^partition= with 4-bit weights"),
        (NVME, {}, torch.uint8, UnsupportedError, "writes to nvme are of torch.bfloat16"),
    ],
)
def test_a_setting_that_takes_the_bytes_for_numbers_is_refused(
    config: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype,
    error: type[Exception],
    words: str,
    file: Path,
) -> None:
    settings = settings_of(config, **options)
    with pytest.raises(error, match=words):
        check_packed(packed_as(file, dtype), settings)
    check_packed(described(file, lambda t, _: module(w=t["x"])).model, settings)  # no packed weight, no matter


@pytest.mark.parametrize(("config", "dtype"), [({}, torch.bfloat16), ({}, torch.uint8), (NVME, torch.bfloat16)])
def test_storage_that_deepspeed_leaves_alone_is_not(config: dict[str, Any], dtype: torch.dtype, file: Path) -> None:
    check_packed(packed_as(file, dtype), settings_of(config))


def test_what_cannot_be_packed_is_refused(file: Path) -> None:
    def make(tensors: Mapping[str, Any], _: Context) -> nn.Module:
        packing = Quantized("halves", {}, Restored(), "it has an odd number of elements")
        x = tensors["x"].bfloat16()
        return module(w=QuantizedTensor.of(x, x.expression, packing))

    with pytest.raises(UnsupportedError, match=r"^w: it has an odd number of elements$"):
        check_packable(described(file, make).model)
