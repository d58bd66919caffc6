"""Refuses settings that the installed release of DeepSpeed lacks, most of which it would ignore without a word.

A feature is recognised by its module, not by the version.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from lowmem_load.contract import DEEPSPEED, require
from lowmem_load.errors import UnsupportedError

# Modules of DeepSpeed that keep buffers in fp32, run torch.autocast, read expert_parallel, and implement MiCS.
KEEPS_FP32 = "deepspeed.runtime.keep_in_fp32"
HAS_AUTOCAST = "deepspeed.runtime.torch_autocast"
HAS_AUTOEP = "deepspeed.module_inject.auto_ep_config"
HAS_MICS = "deepspeed.runtime.zero.mics"


def has(module: str) -> bool:
    """Return whether the installed DeepSpeed has a module, without importing it."""
    return importlib.util.find_spec(module) is not None


def refuse_what_is_absent(ds_config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the first setting that the installed DeepSpeed does not have."""
    if ds_config["zero_optimization"].get("mics_shard_size", -1) > 0 and not has(HAS_MICS):
        raise _absent("mics_shard_size", "has no MiCS", "0.19.6 is the last that does, zero_hpz_partition_size is near")
    if (ds_config.get("torch_autocast") or {}).get("enabled") and not has(HAS_AUTOCAST):
        raise _absent("torch_autocast", "would ignore it", "0.17.2 is the first that does not")
    if (ds_config.get("expert_parallel") or {}).get("enabled") and not has(HAS_AUTOEP):
        raise _absent("expert_parallel", "would ignore it", "0.19.8 does not")
    _refuse_absent_fp32((ds_config.get("data_types") or {}).get("keep_in_fp32_modules"))


def _refuse_absent_fp32(setting: Any) -> None:
    if isinstance(setting, list) and setting and not has(KEEPS_FP32):
        raise _absent("data_types.keep_in_fp32_modules", "would ignore it", "0.19.8 is the first that does not")


def fp32_buffers(module: nn.Module, setting: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the buffers that DeepSpeed keeps in fp32 when it trains `module` in `dtype`.

    `setting` is data_types.keep_in_fp32_modules of the ds_config; None if it is absent.
    """
    _refuse_absent_fp32(setting)
    if not has(KEEPS_FP32):
        return []
    require(DEEPSPEED, {KEEPS_FP32: ("buffers_to_keep_in_fp32", "keep_in_fp32_pattern")})
    from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern

    pattern = keep_in_fp32_pattern(module, setting, dtype)
    return [] if pattern is None else buffers_to_keep_in_fp32(module, pattern)


def warn_of_deadlocks(ds_config: Mapping[str, Any]) -> None:
    """Warn if reads and writes of the swapper may never end."""
    import deepspeed

    # To 0.17.6 `wait` of csrc/aio/py_lib/py_ds_aio.cpp holds the interpreter's lock, which the I/O thread may need.
    device = (ds_config["zero_optimization"].get("offload_param") or {}).get("device")
    if device == "nvme" and Version(deepspeed.__version__) < Version("0.18"):
        warnings.warn(
            f"deepspeed {deepspeed.__version__} may hang while it swaps parameters to or from nvme: it waits for its "
            "own thread with the interpreter's lock held; deepspeed 0.18.4 does not",
            stacklevel=2,
        )


def _absent(setting: str, lack: str, releases: str) -> UnsupportedError:
    import deepspeed

    return UnsupportedError(
        f"{setting}: deepspeed {deepspeed.__version__} {lack} ({releases}); remove it, or install another release"
    )
