"""Starts DeepSpeed's comm on torch's process group, and drops it.

DeepSpeed is imported when a function is called: the import takes seconds and chooses the accelerator.
"""

from __future__ import annotations

from datetime import timedelta

from lowmem_load.contract import DEEPSPEED, require
from lowmem_load.ds.ops import load_shm_comm

_GROUPS = (
    *("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"),
    *("_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mesh_device", "mpu"),
    *("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP"),
)
"""Names of `utils/groups.py` that hold a group, an object with one, or a dict of groups."""


def bring_up_comm(backend: str, timeout: timedelta) -> None:
    """Start DeepSpeed's comm on torch's process group, if it has not started."""
    import deepspeed

    require(
        DEEPSPEED,
        {
            "deepspeed.comm.comm": ("cdb",),
            "deepspeed.git_version_info": ("accelerator_name", "installed_ops"),
            "deepspeed.ops.op_builder.builder:OpBuilder": ("_loaded_ops", "load"),
            "deepspeed.utils.groups": _GROUPS,
        },
    )
    if not deepspeed.comm.is_initialized():
        load_shm_comm()
        # Source: deepspeed 0.19.8 comm/comm.py:877 wraps torch's group without another initialisation.
        # MPI discovery would overwrite the launcher variables, and needs mpi4py.
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def reset_comm() -> None:
    """Drop DeepSpeed's comm and groups: one that outlives torch's group breaks the next `deepspeed.initialize`."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
        return
    for name in _GROUPS:  # older releases have no function that drops them
        if isinstance(held := getattr(groups, name), dict):
            held.clear()
        else:
            setattr(groups, name, None)
