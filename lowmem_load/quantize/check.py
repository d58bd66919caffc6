"""Which settings leave packed weights as they are, and which would take their bytes for numbers. Pure."""

from __future__ import annotations

import torch
from torch import nn

from lowmem_load.describe.quantized import QuantizedTensor
from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.settings.settings import Settings

_LOSSY = {
    "zero_quantized_weights": "quantizes what it gathers",
    "zero_quantized_nontrainable_weights": "quantizes frozen weights",
    "use_all_reduce_for_fetch_params": "adds up what it gathers",
}
"""Settings of zero_optimization under which DeepSpeed computes with the values of weights before a module gets them.

Source: deepspeed 0.19.8 `partition_parameters.py`, `all_gather_coalesced`: an all-reduce turns the bytes of -0.0 into
those of 0.0, for one.
"""


def check_packed(model: nn.Module, settings: Settings) -> None:
    """Refuse what cannot be packed, and what DeepSpeed would do to packed weights as if they were numbers.

    Args:
        model: described.
        settings: resolved for it.

    Raises:
        ConfigError: DeepSpeed would change the packed bytes, in stock as well: names the setting, or the weight whose
            storage dtype is not the one in which DeepSpeed runs.
        UnsupportedError: names the weight that cannot be packed, or what has not been tried.
    """
    packed = {name: each for name, each in model.named_parameters() if isinstance(each, QuantizedTensor)}
    if packed and settings.stage == 3:
        _check_settings(settings)
        for name, parameter in packed.items():
            _check_storage(name, parameter.dtype, settings)
    for name, parameter in packed.items():
        if parameter.quantized.problem is not None:
            raise UnsupportedError(f"{name}: {parameter.quantized.problem}")


def _check_settings(settings: Settings) -> None:
    section = settings.ds_config["zero_optimization"]
    for setting, does in _LOSSY.items():
        if section.get(setting):
            raise ConfigError(f"{setting}: DeepSpeed {does}, and packed 4-bit weights are no numbers; remove it")
    if settings.partition is not None:
        raise UnsupportedError("partition= with 4-bit weights has not been tried; load all of the model into ZeRO-3")


def _check_storage(name: str, storage: torch.dtype, settings: Settings) -> None:
    if storage.is_floating_point and storage != settings.dtype:
        raise ConfigError(
            f"{name}: its 4-bit values are stored as {storage}, and DeepSpeed, which runs in {settings.dtype} under "
            f"this ds_config, would cast them as if they were numbers; use bnb_4bit_quant_storage={settings.dtype} "
            "(or torch.uint8), with a checkpoint that is packed already by packing it anew"
        )
    if settings.offload_device == "nvme" and storage != settings.dtype:
        raise UnsupportedError(
            f"{name}: its 4-bit values are stored as {storage}, and the buffers through which DeepSpeed writes to nvme "
            f"are of {settings.dtype}; use bnb_4bit_quant_storage={settings.dtype}"
        )
