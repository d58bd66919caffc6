"""Runs a function in a fresh process, with this version of the package or another, or as a rank without the others."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_ERROR_CHARS = 150


class FailedError(Exception):
    """The function did not return; says why."""


def run_apart(function: Callable[..., Any], *args: Any, package: Path | None, limit_s: float, limit_bytes: int) -> Any:
    """Return what a function of a module gives in a process of its own.

    Args:
        function: of a module that uses nothing of lowmem_load but what it imports inside of functions, where another
            package is given.
        *args: of it.
        package: folder that holds the lowmem_load to use; None for that of this checkout.
        limit_s: after so many seconds it is ended.
        limit_bytes: so much memory of its own it may have.

    Raises:
        FailedError: it raised, or came to a limit.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, package, limit_bytes, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise FailedError(f"took more than {limit_s:.0f} s")
        outcome = ours.recv()
    except EOFError as error:
        process.join()
        raise FailedError(f"ended with code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
    if isinstance(outcome, FailedError):
        raise outcome
    return outcome


def _child(
    connection: Connection, package: Path | None, limit_bytes: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    if package is not None:
        sys.path.insert(0, str(package))
        for name in [name for name in sys.modules if name.partition(".")[0] == "lowmem_load"]:
            del sys.modules[name]  # of this checkout: other modules of benchmarks have imported it
    try:
        outcome = function(*args)
        if package is not None:
            import lowmem_load

            assert Path(lowmem_load.__file__).is_relative_to(package)
    except FailedError as error:
        outcome = error
    except Exception as error:  # noqa: BLE001  of any class: it is a result
        text = " ".join(f"{type(error).__name__}: {error}".split())
        outcome = FailedError(text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " ...")
    connection.send(outcome)


def unpack_package(commit: str, folder: Path) -> Path:
    """Write lowmem_load as of a commit of this repository into `folder`, but measured as today; return the folder.

    Raises:
        FailedError: git does not know it.
    """
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "archive", "--format=tar", commit, "lowmem_load"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise FailedError(f"commit {commit}: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "lowmem_load" / "bench").mkdir(exist_ok=True)
    for module in ("__init__.py", "memory.py"):
        shutil.copy(root / "lowmem_load" / "bench" / module, folder / "lowmem_load" / "bench" / module)
    return folder


def be_rank(rank: int, world_size: int) -> None:
    """Make this process a rank of a world that has no others, on torch's fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # DeepSpeed asks for them, and uses the group
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
