"""DeepSpeed's communication on a process group of torch: brought up on it, and forgotten with it.

DeepSpeed is imported when one of these is called, not before: it takes seconds, and decides on the accelerator then.
"""

from __future__ import annotations

from datetime import timedelta

from lowmem_load.contract import require

SUPPORTED = "deepspeed >=0.19.8,<0.20"
"""The releases that all of this folder was written for."""


def bring_up_comm(backend: str, timeout: timedelta) -> None:
    """Make DeepSpeed's comm live on torch's live group. Collective only if DeepSpeed's own is.

    Source: deepspeed 0.19.8 comm/comm.py:877 wraps torch's group if there is one, without another init.

    Args:
        backend: that of the live group.
        timeout: of collectives on groups that DeepSpeed makes.

    Raises:
        IncompatibleVersionError: `reset_comm` would not work.
    """
    import deepspeed

    require(
        SUPPORTED,
        {"deepspeed.comm.comm": ("cdb",), "deepspeed.utils.groups": ("_release_process_group_references",)},
    )
    if not deepspeed.comm.is_initialized():
        # MPI discovery would overwrite the launcher variables, and needs mpi4py.
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def reset_comm() -> None:
    """Forget DeepSpeed's comm and groups so that they can be brought up again on a new process group.

    Source: deepspeed 0.19.8 keeps the backend in the global `cdb` of `comm/comm.py`, and clones of the world group and
    of all others in `utils/groups.py`; a clone that outlives its group breaks the next `deepspeed.initialize`.
    """
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups._release_process_group_references()
