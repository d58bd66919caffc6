"""Loads DeepSpeed's ops, which torch compiles at their first use: one process at a time, past locks of killed builds.

[Note: torch's lock] To 2.13, torch marks a folder in which it builds by an empty file `lock`, which the building
process holds open and removes at the end (`torch/utils/file_baton.py`). A build that is killed leaves the file behind,
and every later process waits for ever. The file is removed here once nobody can be building:

- A process of this machine that has the file open is building. It is waited for.
- Our own builds hold a `flock` on a file of ours, and write into it meanwhile. If the next holder finds that mark, the
  last one was killed. Compilers that it has left, which work in the folder, are waited for.
- Any other lock may belong to a process on another machine or in another container. It is given up when nothing in
  the folder has changed for `ABANDONED_S`.

A killed build of ours followed by a build of somebody else on another machine is not told apart from the first case. A
folder for each machine (`TORCH_EXTENSIONS_DIR`) rules that out.
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
from lowmem_load.errors import ConfigError

logger = logging.getLogger(__name__)

ABANDONED_S = 600.0
"""Seconds without a change in a folder after which nobody builds there. A build writes a file after each source, which
takes less than a minute of one core."""

POLL_S = 0.2
"""Seconds between two looks at a lock."""

OUR_LOCK = "lowmem_load.lock"
_TORCH_LOCK = "lock"
_BUILDING = b"a build is under way, or was killed\n"


def load_shm_comm() -> None:
    """Load the op by which DeepSpeed's comm shares memory between CPU ranks, where this accelerator has it.

    Source: deepspeed 0.19.8 `comm/torch.py`, `build_shm_op`, which finds it loaded afterwards.

    Raises: see `load_op`.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        load_op(builder)


def load_async_io() -> None:
    """Load the op by which DeepSpeed's swapper reaches its files.

    Source: deepspeed 0.19.8 `ops/op_builder/async_io.py`, whose `load` loads `pin_memory` first; so since 0.19.5.

    Raises: see `load_op`.
    """
    from deepspeed.ops import op_builder

    for name in ("PinMemoryBuilder", "AsyncIOBuilder"):
        if hasattr(op_builder, name):
            load_op(getattr(op_builder, name)())


def load_op(builder: Any) -> Any:
    """Return the module of one of DeepSpeed's ops, compiled first if need be; see [Note: torch's lock].

    `bring_up_comm` has checked what this needs of DeepSpeed.

    Raises:
        ConfigError: the folder of the extensions cannot be written.
        ImportError, RuntimeError: the op cannot be built or loaded.
    """
    if builder.name in builder._loaded_ops or _is_installed(builder.name):
        return builder.load(verbose=False)
    with _alone_in(_build_folder(builder.name)):
        return builder.load(verbose=False)


def _is_installed(name: str) -> bool:
    """Return whether DeepSpeed was installed with this op compiled, so that torch does not compile it."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator().device_name()


def _build_folder(name: str) -> str:
    """Return the folder in which torch builds an extension, made if it was absent."""
    require(TORCH, {"torch.utils.cpp_extension": ("_get_build_directory",)})
    from torch.utils.cpp_extension import _get_build_directory

    try:
        folder: str = _get_build_directory(name, verbose=False)
    except OSError as error:
        raise _not_writable(str(error.filename), error) from error
    return folder


def _not_writable(folder: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{folder}: DeepSpeed compiles its extensions there, and it cannot be written ({error.strerror}); set "
        "TORCH_EXTENSIONS_DIR to a folder that this process can write, also where the extensions are compiled already: "
        "torch makes a lock there"
    )


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Let one process at a time build in the folder, after torch's lock is gone from it."""
    try:
        descriptor = os.open(os.path.join(folder, OUR_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if not os.access(folder, os.W_OK):
            raise _not_writable(folder, error) from error
        logger.warning("%s: cannot be locked (%s), so a build that was killed there is not noticed", folder, error)
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _wait_for_torch_lock(folder, was_killed=os.fstat(descriptor).st_size > 0)
        os.pwrite(descriptor, _BUILDING, 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _wait_for_torch_lock(folder: str, *, was_killed: bool) -> None:
    """Return when torch's lock is not there; remove it once nobody builds any more, see [Note: torch's lock]."""
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return  # the lock of torch 2.15 always stays; the kernel frees it when its holder ends
    lock, is_announced = os.path.join(folder, _TORCH_LOCK), False
    while (found := _identity(lock)) is not None:
        builder = _builder(folder, found, was_killed=was_killed)
        if builder is None:
            if _identity(lock) == found:  # not another build's by now
                os.unlink(lock)
                logger.warning("%s: was left by a build that was killed; removed", lock)
            continue
        if not is_announced:
            logger.warning("%s: waiting for %s; delete it if nobody builds there", lock, builder)
            is_announced = True
        time.sleep(POLL_S)


def _builder(folder: str, lock: tuple[int, int], *, was_killed: bool) -> str | None:
    """Return who may still be building in a folder, in words; None if nobody can be."""
    holders, workers = _processes(folder, lock)
    if holders:
        return f"the build of process {holders[0]}"
    if time.time() - _last_change(folder) > ABANDONED_S:
        return None
    if was_killed:
        return f"process {workers[0]}, which a build that was killed has left" if workers else None
    return f"a build of no process here, until nothing has changed there for {ABANDONED_S:.0f} s"


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
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
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
    """Return when a file of the folder was last written, in seconds since the epoch; 0 where there is none."""
    times = [0.0]
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != OUR_LOCK:
                with contextlib.suppress(FileNotFoundError):
                    times.append(entry.stat().st_mtime)
    return max(times)


# -- what `doctor` says of them --------------------------------------------------------------------------------------

USES: Mapping[str, str] = {
    "AsyncIOBuilder": "for offload to nvme",
    "CPUAdamBuilder": "for offload_optimizer to the CPU",
    "FusedAdamBuilder": "for Adam on GPUs",
    "ShareMemCommBuilder": "for ranks on the CPU",
}
"""The ops that loading and training under ZeRO-3 use, and what for."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op: its name and use, whether it is compiled, and whether it can be."""

    name: str
    use: str
    is_built: bool
    is_compatible: bool


def ops() -> list[Op]:
    """Return the ops of `USES` that this release has for the accelerator of this process."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import op_builder
    from torch.utils.cpp_extension import is_ninja_available

    accelerator, found = get_accelerator(), []
    unused = "FusedAdamBuilder" if accelerator.device_name() == "cpu" else "ShareMemCommBuilder"
    for class_name, use in USES.items():
        has_it = class_name != unused and hasattr(op_builder, class_name)
        builder = accelerator.create_op_builder(class_name) if has_it else None
        if builder is not None:
            library = os.path.join(_build_folder(builder.name), f"{builder.name}.so")
            is_built = _is_installed(builder.name) or os.path.exists(library)
            is_compatible = is_ninja_available() and bool(builder.is_compatible(verbose=False))
            found.append(Op(builder.name, use, is_built, is_compatible))
    return found
