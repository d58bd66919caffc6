"""Starts DeepSpeed's comm, and loads its ops, which torch compiles at their first use, one process at a time.

DeepSpeed is imported when a function is called: the import takes seconds and chooses the accelerator.

[Note: torch's lock] torch compiles an op at its first use. To 2.13, torch marks a folder in which it builds by an empty
file `lock`, which it removes at the end (`torch/utils/file_baton.py`). If a build is killed, the file stays, and every
later process waits for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from lowmem_load.contract import DEEPSPEED, TORCH, require
from lowmem_load.errors import ConfigError

logger = logging.getLogger(__name__)

ABANDONED_S = 1800.0
"""Seconds without a change in a folder after which nobody builds there. A build writes a file after each source, which
takes less than a minute of one core, but minutes where the machine is busy."""

POLL_S = 0.2
"""Seconds between two looks at a lock."""

OUR_LOCK = "lowmem_load.lock"

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
    from deepspeed.ops import op_builder

    # Source: deepspeed 0.19.8 ops/op_builder/async_io.py, whose load loads pin_memory first; so since 0.19.5.
    for name in ("PinMemoryBuilder", "AsyncIOBuilder"):
        if hasattr(op_builder, name):
            load_op(getattr(op_builder, name)())


def load_op(builder: Any) -> Any:
    """Return the module of one of DeepSpeed's ops, compiled first if need be. Raises what the compiler raises."""
    if builder.name in builder._loaded_ops or _is_installed(builder.name):
        return builder.load(verbose=False)
    with _alone_in(_build_folder(builder.name)):
        return builder.load(verbose=False)


def _is_installed(name: str) -> bool:
    """Return whether DeepSpeed was installed with this op compiled."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator().device_name()


def _build_folder(name: str) -> str:
    require(TORCH, {"torch.utils.cpp_extension": ("_get_build_directory",)})
    from torch.utils.cpp_extension import _get_build_directory

    with _named_if_not_writable():
        folder: str = _get_build_directory(name, verbose=False)
    return folder


@contextlib.contextmanager
def _named_if_not_writable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: DeepSpeed compiles its extensions there, and it cannot be written ({error.strerror}); "
            "set TORCH_EXTENSIONS_DIR to a folder that this process can write, also where the extensions are compiled "
            "already: torch makes a lock there"
        ) from error


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    path = os.path.join(folder, OUR_LOCK)
    with _named_if_not_writable():
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:  # of another user
            if not os.access(folder, os.W_OK):
                raise
            logger.warning("%s: cannot be opened (%s); others may build meanwhile", path, error.strerror)
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: torch's own is left
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _remove_abandoned_lock(folder)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned_lock(folder: str) -> None:
    """Wait for torch's lock to go; remove it once nobody builds any more, see [Note: torch's lock]."""
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return  # the lock of torch 2.15 always stays; the kernel frees it when its holder ends
    lock, is_announced = os.path.join(folder, "lock"), False
    while os.path.exists(lock):  # the process that made it may be on another machine, so it cannot be looked up
        if time.time() - _last_change(folder) > ABANDONED_S:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lock)
            logger.warning("%s: was left by a build that was killed; removed", lock)
            return
        if not is_announced:
            until = f"until nothing has changed there for {ABANDONED_S:.0f} s"
            logger.warning("%s: waiting for the build that made it, %s; delete it if nobody builds there", lock, until)
            is_announced = True
        time.sleep(POLL_S)


def _last_change(folder: str) -> float:
    """Return when a file of the folder was last written, in seconds since the epoch."""
    times = [0.0]
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != OUR_LOCK:
                with contextlib.suppress(FileNotFoundError):
                    times.append(entry.stat().st_mtime)
    return max(times)
