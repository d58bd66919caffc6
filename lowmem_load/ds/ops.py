"""Which of DeepSpeed's ops are compiled here, or can be. Part of the DeepSpeed seam."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder

from lowmem_load.contract import require
from lowmem_load.ds.extensions import TORCH, is_installed

USES: Mapping[str, str] = {
    "AsyncIOBuilder": "for offload to nvme",
    "CPUAdamBuilder": "for offload_optimizer to the CPU",
    "FusedAdamBuilder": "for Adam on GPUs",
    "ShareMemCommBuilder": "for ranks on the CPU",
}
"""The ops that loading and training under ZeRO-3 take, and what for."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op: its name and use, whether it is compiled, and whether it can be."""

    name: str
    use: str
    is_built: bool
    is_compatible: bool


def ops() -> list[Op]:
    """Return the ops of `USES` that this release has for the accelerator of this process."""
    require(TORCH, {"torch.utils.cpp_extension": ("_get_build_directory", "is_ninja_available")})
    from torch.utils.cpp_extension import _get_build_directory, is_ninja_available

    found = []
    unused = "FusedAdamBuilder" if get_accelerator().device_name() == "cpu" else "ShareMemCommBuilder"
    for class_name, use in USES.items():
        if class_name == unused:
            continue
        builder = get_accelerator().create_op_builder(class_name) if hasattr(op_builder, class_name) else None
        if builder is None:
            continue
        library = os.path.join(_get_build_directory(builder.name, verbose=False), f"{builder.name}.so")
        is_built = is_installed(builder.name) or os.path.exists(library)
        is_compatible = is_ninja_available() and bool(builder.is_compatible(verbose=False))
        found.append(Op(builder.name, use, is_built, is_compatible))
    return found
