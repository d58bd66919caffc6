"""What is known of ZeRO-3 parameters, and of what an engine will do with them. Part of the DeepSpeed seam.

Written for deepspeed 0.19.8. Glossary: `ds/partition.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowmem_load.contract import require, require_attributes
from lowmem_load.ds.comm import SUPPORTED


def _check_contract() -> None:
    """Raise IncompatibleVersionError unless DeepSpeed has what this module relies on."""
    require(
        SUPPORTED,
        {
            "deepspeed.runtime.keep_in_fp32": ("buffers_to_keep_in_fp32", "keep_in_fp32_pattern"),
            "deepspeed.runtime.zero.config": ("DeepSpeedZeroConfig",),
            "deepspeed.runtime.zero.utils": ("is_zero_param",),
        },
    )


_check_contract()

import deepspeed.comm as dist  # noqa: E402  the contract gives the better error
from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from deepspeed.runtime.zero.utils import is_zero_param  # noqa: E402


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` is a ZeRO-3 parameter."""
    return bool(is_zero_param(parameter))


def whole_numel(parameter: torch.Tensor) -> int:
    """Return how many elements `parameter` has in all, partitioned or not."""
    numel: int = parameter.ds_numel if is_zero_param(parameter) else parameter.numel()
    return numel


def partition_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's partition of a ZeRO-3 parameter, flat, padding included; shares its memory."""
    partition: torch.Tensor = parameter.ds_tensor
    return partition


def group_size_of(parameter: torch.Tensor) -> int:
    """Return among how many ranks a ZeRO-3 parameter is cut up."""
    size: int = dist.get_world_size(parameter.ds_process_group)
    return size


def fp32_buffers(module: nn.Module, setting: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the buffers that DeepSpeed keeps in fp32 when it trains `module` in `dtype`.

    Args:
        module: whose class may name some.
        setting: data_types.keep_in_fp32_modules of the ds_config; None where it is absent.
        dtype: in which DeepSpeed runs.
    """
    pattern = keep_in_fp32_pattern(module, setting, dtype)
    return [] if pattern is None else buffers_to_keep_in_fp32(module, pattern)


def persistent(ds_config: Mapping[str, Any], module: nn.Module) -> dict[str, int]:
    """Return the parameters, by name, that an engine will keep whole on every rank between steps, with their elements.

    Source: deepspeed 0.19.8 `parameter_offload.py`, `mark_persistent_parameters`.

    Args:
        ds_config: resolved.
        module: those of its parameters count that are ZeRO-3 parameters.
    """
    config = DeepSpeedZeroConfig(**ds_config["zero_optimization"])
    require_attributes(SUPPORTED, config, ("model_persistence_threshold", "param_persistence_threshold"))
    kept: dict[str, int] = {}
    elements = 0
    for name, parameter in module.named_parameters():
        size = parameter.ds_numel if is_zero_param(parameter) else None
        if size is None or size > config.param_persistence_threshold:
            continue
        if elements + size <= config.model_persistence_threshold:
            kept[name], elements = size, elements + size
    return kept
