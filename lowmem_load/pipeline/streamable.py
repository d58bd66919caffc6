"""Which loads can be streamed, and which errors say that one cannot."""

from __future__ import annotations

from typing import Any

from lowmem_load.config.settings import Settings
from lowmem_load.ds import zero_init
from lowmem_load.errors import CheckpointError, ConfigError, LowMemLoadError, ModelBuildError, UnsupportedError, listed
from lowmem_load.hf import loader
from lowmem_load.hf.quantizers import is_four_bit
from lowmem_load.pipeline.describe import Described

_PLACES_BY_ITSELF = ("device_map", "quantization_config", "gguf_file")
"""Keywords of loads that transformers itself does under stages 0 to 2."""


def may_work_in_stock(error: Exception) -> bool:
    """Return whether an error, of all ranks, is about streaming: not about files, the ds_config or other ranks.

    One that is not ours comes from code of transformers or of the model, which may not be ready for symbolic tensors.
    """
    return isinstance(error, UnsupportedError | ModelBuildError) or not isinstance(error, LowMemLoadError | OSError)


def is_left_alone(call: loader.Call, settings: Settings) -> bool:
    """Return whether transformers does a load by itself, also inside `streaming()`."""
    return settings.stage < 3 and any(call.kwargs.get(name) for name in _PLACES_BY_ITSELF)


def refuse_device_map(call: loader.Call, settings: Settings) -> None:
    """Raise ConfigError if two are to place the parameters of a load."""
    if settings.stage == 3 and call.kwargs.get("device_map") is not None:
        raise ConfigError(f"{call.name}: device_map and ZeRO-3 both place parameters; remove device_map")


def check_described(described: Described) -> None:
    """Raise for what cannot be planned."""
    zero_init.refuse_partitioned(described.model)
    _check_four_bit(described)
    described.target.check(described.model)


def check_around(init: Any, described: Described) -> None:
    """Raise if a zero.Init around this load makes other parameters than the load."""
    settings, device = described.settings, described.settings.offload_device
    device = described.target.device.type if device == "none" else device
    zero_init.refuse_another(init, dtype=settings.dtype, device=device, world_size=settings.world_size)


def _check_four_bit(described: Described) -> None:
    quantizer = getattr(described.model, "hf_quantizer", None)
    if quantizer is not None and is_four_bit(quantizer.quantization_config):
        from lowmem_load.hf import four_bit

        unpacked = four_bit.unpacked(described.model)
        if unpacked:
            raise CheckpointError(
                f"{described.name}: {listed(unpacked)} are to be held in 4 bits, but "
                "the files have no values for them, or packed ones without their quantization state"
            )
        four_bit.check_packed(described.model, described.settings)
