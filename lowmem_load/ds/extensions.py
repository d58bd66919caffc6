"""DeepSpeed's extensions are compiled at their first use: one process at a time, and no build that was killed blocks.

[Note: torch's lock] torch 2.13 marks a folder in which it builds by a file named `lock` (`torch/utils/file_baton.py`),
made with O_EXCL, empty, and removed when the build has ended. A process that is killed leaves it behind, and all later
ones wait for ever. It does not say whose it is, so it is removed here only where nobody can be building:

- The process that made it keeps it open meanwhile. As long as one of this machine has it open, it is waited for.
- The build was ours: we build under a lock of our own beside it (`flock`, which ends with its process, however it
  ends), and write into that file while we do. Whoever gets it and finds it written in knows that its last holder was
  killed. What ninja and the compilers still do then, with the folder as their working directory, is waited for.
- Else it may be that of a process that cannot be seen from here: on another machine or in another container that
  shares the folder. It is given up once nothing in the folder has changed for `ABANDONED_S`.

What remains is a build of somebody else, on another machine, that began in the folder after ours was killed there and
before the next of ours. A folder of its own for each machine (`TORCH_EXTENSIONS_DIR`) rules that out.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_load.contract import TORCH, require

logger = logging.getLogger(__name__)

ABANDONED_S = 600.0
"""Seconds without a change in a folder after which no unseen process builds there. A build writes a file with each
source that it has compiled, and of the extensions that are loaded here each takes less than a minute of one core."""

POLL_S = 0.2
"""Seconds between two looks at a lock."""

OUR_LOCK = "lowmem_load.lock"
_TORCH_LOCK = "lock"
_BUILDING = b"a build is under way, or was killed\n"


def load_shm_comm() -> None:
    """Load the op with which DeepSpeed's comm shares memory between CPU ranks, where this accelerator has it.

    Source: deepspeed 0.19.8 `comm/torch.py`, `build_shm_op`, which finds it loaded afterwards.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        load_op(builder)


def load_async_io() -> None:
    """Load the op by which DeepSpeed's swapper reaches its files.

    Source: deepspeed 0.19.8 `ops/op_builder/async_io.py`, whose `load` loads `pin_memory` first; so since 0.19.5.

    Raises:
        ImportError, RuntimeError: it cannot be built, or not be loaded.
    """
    from deepspeed.ops import op_builder

    for name in ("PinMemoryBuilder", "AsyncIOBuilder"):
        if hasattr(op_builder, name):
            load_op(getattr(op_builder, name)())


def load_op(builder: Any) -> Any:
    """Return the module of one of DeepSpeed's ops, compiled first if need be; see [Note: torch's lock].

    Needs what `bring_up_comm` has checked of DeepSpeed.

    Raises:
        ImportError, RuntimeError: it cannot be built, or not be loaded.
    """
    if builder.name in builder._loaded_ops or is_installed(builder.name):
        return builder.load(verbose=False)
    require(TORCH, {"torch.utils.cpp_extension": ("_get_build_directory",)})
    from torch.utils.cpp_extension import _get_build_directory

    with _alone_in(_get_build_directory(builder.name, verbose=False)):
        return builder.load(verbose=False)


def is_installed(name: str) -> bool:
    """Return whether DeepSpeed was installed with this op compiled, so that torch is not asked to."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator().device_name()


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Let one process at a time build in the folder, after torch's lock is gone from it."""
    try:
        descriptor = os.open(os.path.join(folder, OUR_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:  # another user's, or read-only: torch says what it lacks, if it does
        logger.warning("%s: cannot be locked (%s), so a build that was killed there is not noticed", folder, error)
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _killed_builds_leave_a_lock():
            _wait_for_torch_lock(folder, was_killed=os.fstat(descriptor).st_size > 0)
        os.pwrite(descriptor, _BUILDING, 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _killed_builds_leave_a_lock() -> bool:
    """Return whether torch marks a folder by the existence of a file, as it does to 2.13.

    That of 2.15 stays for good, and is locked while somebody builds: the kernel unlocks it (`cpp_extension.py:2424`).
    """
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def _wait_for_torch_lock(folder: str, *, was_killed: bool) -> None:
    """Return when torch's lock is not there; remove it once nobody builds any more, see [Note: torch's lock]."""
    lock = os.path.join(folder, _TORCH_LOCK)
    has_told = False
    while (made := _identity(lock)) is not None:
        holders, workers = _processes(folder, made)
        is_abandoned = time.time() - _last_change(folder) > ABANDONED_S
        if holders:
            awaited = f"the build of process {holders[0]}"
        elif was_killed and workers and not is_abandoned:
            awaited = f"process {workers[0]}, which a build that was killed has left"
        elif was_killed or is_abandoned:
            if _identity(lock) == made:
                os.unlink(lock)
                logger.warning("%s: was left by a build that was killed; removed", lock)
            continue
        else:
            awaited = f"a build of no process here, until nothing has changed there for {ABANDONED_S:.0f} s"
        if not has_told:
            logger.warning("%s: waiting for %s; delete it if nobody builds there", lock, awaited)
            has_told = True
        time.sleep(POLL_S)


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _processes(folder: str, lock: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return the processes that have the lock open, and those that work in the folder; none where there is no /proc.

    Files are compared by device and inode: their paths differ where another process has other mounts.
    """
    holders, workers, directory = [], [], _identity(folder)
    with contextlib.suppress(OSError):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if _leads_to(f"/proc/{pid}/cwd", os.path.basename(folder), directory):
                workers.append(int(pid))
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                numbers = os.listdir(f"/proc/{pid}/fd")
                if any(_leads_to(f"/proc/{pid}/fd/{number}", _TORCH_LOCK, lock) for number in numbers):
                    holders.append(int(pid))
    return holders, workers


def _leads_to(link: str, name: str, identity: tuple[int, int] | None) -> bool:
    try:  # the name first: a stat of whatever a process has open could wait for a lost file server
        return os.path.basename(os.readlink(link)) == name and _identity(link) == identity
    except OSError:
        return False


def _last_change(folder: str) -> float:
    """Return when somebody last made or wrote a file in the folder, seconds since the epoch; 0 where it is empty."""
    times = [0.0]
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != OUR_LOCK:
                with contextlib.suppress(FileNotFoundError):
                    times.append(entry.stat().st_mtime)
    return max(times)


# -- what is there ---------------------------------------------------------------------------------------------------

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
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import op_builder
    from torch.utils.cpp_extension import _get_build_directory, is_ninja_available

    accelerator, found = get_accelerator(), []
    unused = "FusedAdamBuilder" if accelerator.device_name() == "cpu" else "ShareMemCommBuilder"
    for class_name, use in USES.items():
        has_it = class_name != unused and hasattr(op_builder, class_name)
        builder = accelerator.create_op_builder(class_name) if has_it else None
        if builder is not None:
            library = os.path.join(_get_build_directory(builder.name, verbose=False), f"{builder.name}.so")
            is_built = is_installed(builder.name) or os.path.exists(library)
            is_compatible = is_ninja_available() and bool(builder.is_compatible(verbose=False))
            found.append(Op(builder.name, use, is_built, is_compatible))
    return found
