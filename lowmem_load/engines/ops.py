"""Starts DeepSpeed's comm, and loads its ops, which torch compiles at their first use.

DeepSpeed is imported when a function is called: the import takes seconds and chooses the accelerator.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import sys
import time
from datetime import timedelta
from typing import Any

from lowmem_load.errors import ConfigError
from lowmem_load.foreign_names import DEEPSPEED, require

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Seconds that another process's build may take before its lock is named."""

OLD_S = 600.0
"""Seconds after which a lock is reported: builds take minutes on a busy machine, and other ranks wait for one."""

_GROUPS = (
    *("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"),
    *("_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mesh_device", "mpu"),
    *("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP"),
)
"""Names of `utils/groups.py` that contain a group, an object with one, or a dict of groups."""


def bring_up_comm(backend: str, timeout: timedelta) -> None:
    """Start DeepSpeed's comm on torch's process group, if it has not started."""
    import deepspeed

    require(
        DEEPSPEED,
        {
            "deepspeed.comm.comm": ("cdb",),
            "deepspeed.ops.op_builder.builder:OpBuilder": ("_loaded_ops", "load"),
            "deepspeed.utils.groups": _GROUPS,
        },
    )
    if not deepspeed.comm.is_initialized():
        load_shm_comm()
        # Source: deepspeed 0.19.8 comm/comm.py:877 wraps torch's group without another initialization.
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
        if isinstance(group := getattr(groups, name), dict):
            group.clear()
        else:
            setattr(groups, name, None)


def load_shm_comm() -> None:
    """Load the op by which DeepSpeed's comm shares memory between CPU ranks, where this accelerator has it."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Source: deepspeed 0.19.8 comm/torch.py, build_shm_op, which finds it loaded afterwards.
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        load_op(builder)


def load_async_io() -> None:
    """Load the op by which DeepSpeed's swapper reaches its files."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    load_op(AsyncIOBuilder())


def load_op(builder: Any) -> Any:
    """Return the module of one of DeepSpeed's ops, compiled first if need be. Raises what the compiler raises."""
    try:
        if builder.name not in builder._loaded_ops:
            _await_lock(builder.name)
        return builder.load(verbose=False)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ConfigError(
            f"{error.filename}: DeepSpeed compiles its extensions there, and it cannot be written ({error.strerror}); "
            "set TORCH_EXTENSIONS_DIR to a folder that this process can write, also where the extensions are compiled "
            "already: torch makes a lock there"
        ) from error


def _await_lock(name: str) -> None:
    """Wait for the build of another process; name its lock after `PATIENCE_S`, as torch waits for ever to 2.13."""
    start = time.monotonic()
    while locks := old_locks(name, older_than_s=float("-inf")):
        if time.monotonic() - start >= PATIENCE_S:
            logger.warning("%s; if nobody builds there, delete it: this load goes on then", "; ".join(locks))
            return
        time.sleep(0.1)


def old_locks(name: str = "*", *, older_than_s: float = OLD_S) -> list[str]:
    """Return what a user should know of each old lock that torch keeps next to an extension while it compiles it.

    A build that is killed leaves its lock for ever. Source: torch 2.13 `utils/cpp_extension.py`,
    `_get_build_directory`.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    here = f"py{sys.version_info.major}{sys.version_info.minor}*"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions", here)
    texts = []
    for lock in sorted(glob.glob(os.path.join(root, name, "lock"))):
        with contextlib.suppress(FileNotFoundError):  # that build has ended
            age_s = time.time() - os.path.getmtime(lock)
            if age_s >= older_than_s:
                texts.append(
                    f"{lock}: is {age_s / 60:.0f} minutes old. torch waits silently for the build that made it, and "
                    "a killed build leaves it"
                )
    return texts
