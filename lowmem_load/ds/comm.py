"""DeepSpeed's communication on a process group of torch: brought up on it, and forgotten with it.

DeepSpeed is imported when one of these is called, not before: it takes seconds, and decides on the accelerator then.
"""

from __future__ import annotations

from datetime import timedelta

from lowmem_load.contract import DEEPSPEED, require
from lowmem_load.ds.extensions import load_shm_comm

_GROUPS = (
    *("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"),
    *("_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mesh_device", "mpu"),
)
"""Where `utils/groups.py` keeps one group, or what holds one."""
_GROUPS_BY_NAME = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP")
"""Where it keeps several."""


def bring_up_comm(backend: str, timeout: timedelta) -> None:
    """Make DeepSpeed's comm live on torch's live group. Collective only if DeepSpeed's own is.

    Source: deepspeed 0.19.8 comm/comm.py:877 wraps torch's group if there is one, without another init.

    Raises:
        IncompatibleVersionError: `reset_comm` or `load_op` would not work.
    """
    import deepspeed

    require(
        DEEPSPEED,
        {
            "deepspeed.comm.comm": ("cdb",),
            "deepspeed.git_version_info": ("accelerator_name", "installed_ops"),
            "deepspeed.ops.op_builder.builder:OpBuilder": ("_loaded_ops", "load"),
            "deepspeed.utils.groups": (*_GROUPS, *_GROUPS_BY_NAME),
        },
    )
    if not deepspeed.comm.is_initialized():
        load_shm_comm()
        # MPI discovery would overwrite the launcher variables, and needs mpi4py.
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def reset_comm() -> None:
    """Forget DeepSpeed's comm and groups so that they can be brought up again on a new process group.

    Source: deepspeed 0.19.8 keeps the backend in the global `cdb` of `comm/comm.py`, and clones of the world group and
    of all others in `utils/groups.py`; a clone that outlives its group breaks the next `deepspeed.initialize`. So do
    older releases, which have no function to forget them.
    """
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
        return
    for name in _GROUPS:
        setattr(groups, name, None)
    for name in _GROUPS_BY_NAME:
        getattr(groups, name).clear()
