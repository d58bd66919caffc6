"""Refuses settings that the installed release of DeepSpeed lacks, most of which it would ignore without a word.

A feature is recognised by its module, not by the version.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from lowmem_load.errors import UnsupportedError

KEEPS_FP32 = "deepspeed.runtime.keep_in_fp32"
"""Keeps buffers in fp32."""
HAS_AUTOCAST = "deepspeed.runtime.torch_autocast"
"""Runs torch.autocast."""
HAS_AUTOEP = "deepspeed.module_inject.auto_ep_config"
"""Reads expert_parallel."""
HAS_MICS = "deepspeed.runtime.zero.mics"
"""Implements MiCS."""


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
    refuse_absent_fp32((ds_config.get("data_types") or {}).get("keep_in_fp32_modules"))


def refuse_absent_fp32(setting: Any) -> None:
    """Raise UnsupportedError if data_types.keep_in_fp32_modules is a list that the installed DeepSpeed ignores."""
    if isinstance(setting, list) and setting and not has(KEEPS_FP32):
        raise _absent("data_types.keep_in_fp32_modules", "would ignore it", "0.19.8 is the first that does not")


def warn_of_deadlocks(ds_config: Mapping[str, Any]) -> None:
    """Warn if reads and writes of the swapper may never end.

    Source: `csrc/aio/py_lib/py_ds_aio.cpp`. To 0.17.6, `wait` holds the interpreter's lock, which the I/O thread may
    need; 0.18.4 releases it. From Python only the version tells them apart.
    """
    import deepspeed

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
