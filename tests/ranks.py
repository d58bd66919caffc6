"""run_ranks: calls a function in several fresh processes, one per rank, and returns their results in rank order.

Each call forks new processes from a forkserver that has torch, transformers and deepspeed in memory, since DeepSpeed
and transformers keep globals that one test must not leave to the next. Only the standard library is imported here.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
PRELOAD = "tests.rank_preload"
RENDEZVOUS_TRIES = 3
DEVICE = "LOWMEM_TEST_DEVICE"
"""Variable that names the accelerator of the ranks; the CPU where it is unset."""
SIMULATED = {DEVICE: "sim"}
"""Environment of ranks that have the simulated device of tests/device."""
IS_SIMULATED = os.environ.get(DEVICE) == "sim"
"""Whether all ranks of this run have it: `make test-device`."""
STACK_DUMP_S = 2.0
"""Seconds that hanging ranks get to write their stacks before they are killed."""
LOG_TAIL_CHARS = 6000


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its traceback or stack, and its output."""


@dataclass
class _Rank:
    """One process of a call: `status` is None until it has answered or died."""

    number: int
    process: BaseProcess
    pipe: Connection
    log: Path
    status: str | None = None
    value: Any = field(default=None, repr=False)


def set_environment() -> None:
    """Sets what torch, DeepSpeed and transformers read on import; call it before importing any of them.

    Also has SIGINT raise KeyboardInterrupt, here and in what is started from here: a shell's background jobs ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(REPO / ".cache" / "torch_extensions"))
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # DeepSpeed runs `ninja` by name, which lies next to the interpreter.
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + os.environ.get("PATH", "")


def run_command(command: Sequence[str], *, timeout_s: float = 240, cwd: Path = REPO, **env: str) -> Any:
    """Runs a command as a shell would start it, in no rank; returns it with its output once it has ended well."""
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {key: value for key, value in os.environ.items() if key not in of_ranks} | {"PYTHONPATH": str(REPO)}
    run = subprocess.run(
        command, env=environ | env, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run


def run_ranks(
    fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = 60, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Returns [fn(*args) on rank 0, on rank 1, ...], each run in a fresh process.

    `fn` is a module-level function, its arguments and result can be pickled. It asserts what holds on its rank, and
    returns what has to be compared between ranks. It finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT in the environment, and `env` on top; no process group is made for it. The first failure kills the
    other ranks. Starting the forkserver, and compiling shm_comm the first time, does not count towards `timeout_s`.

    Raises:
        RankFailure: A rank raised, died, or gave no result within `timeout_s`.
    """
    __tracebackhide__ = True  # the rank's own traceback is in the message
    _start_forkserver()
    if {**os.environ, **(env or {})}.get(DEVICE) == "sim":
        from tests.device.build import build

        build()  # outside of the ranks' time
    for _ in range(RENDEZVOUS_TRIES - 1):
        try:
            return _run_once(fn, args, world_size, timeout_s, dict(env or {}))
        except RankFailure as failure:
            # Someone who does not respect the reservation took the port.
            if "EADDRINUSE" not in str(failure):
                raise
    return _run_once(fn, args, world_size, timeout_s, dict(env or {}))


def _start_forkserver() -> None:
    """Starts the forkserver, once per session; it imports PRELOAD by way of PYTHONPATH."""
    set_environment()
    multiprocessing.set_forkserver_preload([PRELOAD])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a TCP port that nobody else is given meanwhile.

    The socket stays bound but does not listen, and SO_REUSEADDR is set after the bind: so the kernel hands the port to
    no one who asks for any free one, while rank 0's store, which names it, can listen there.
    """
    try:
        holder = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::", 0))
    except OSError:  # no IPv6 here
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        holder.bind(("", 0))
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield holder.getsockname()[1]


def _run_once(
    fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout_s: float, env: dict[str, str]
) -> list[Any]:
    __tracebackhide__ = True
    ranks: list[_Rank] = []
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    with reserved_port() as port:
        try:
            for number in range(world_size):
                ranks.append(_start_rank(number, world_size, port, folder, env, fn, args))
            _collect(ranks, time.monotonic() + timeout_s)
            failed = [rank for rank in ranks if rank.status not in (None, "ok")]
            if failed:
                raise RankFailure("\n\n".join(_describe(rank, world_size) for rank in failed))
            hanging = [rank for rank in ranks if rank.status is None]
            if hanging:
                _dump_stacks(hanging)
                head = f"no result from {len(hanging)} of {world_size} ranks within {timeout_s} s"
                raise RankFailure("\n\n".join([head, *(_describe(rank, world_size) for rank in hanging)]))
            return [rank.value for rank in ranks]
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.process.close()
                rank.pipe.close()
            shutil.rmtree(folder, ignore_errors=True)


def _start_rank(
    number: int,
    world_size: int,
    port: int,
    folder: Path,
    env: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> _Rank:
    rank_env = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Where many tests share a machine, C code may keep the heartbeats of a rank that is alive for long.
        "LOWMEM_LOAD_GONE_S": "60",
        **env,
    }
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    log = folder / f"rank{number}.log"
    process = context.Process(
        target=_rank_main, args=(theirs, str(log), rank_env, fn, args), name=f"rank{number}", daemon=True
    )
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Rank(number, process, ours, log)


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Waits until every rank has answered, one has failed, or the deadline has passed."""
    while waiting := [rank for rank in ranks if rank.status is None]:
        ready = connection.wait([rank.pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for rank in waiting:
            if rank.pipe not in ready:
                continue
            try:
                rank.status, rank.value = rank.pipe.recv()
            except (EOFError, ConnectionResetError):
                rank.process.join(5)
                rank.status, rank.value = "died", rank.process.exitcode
        if any(rank.status not in (None, "ok") for rank in ranks):
            return


def _dump_stacks(ranks: list[_Rank]) -> None:
    """Has each rank write the stacks of its threads to its log."""
    sizes = {rank.number: rank.log.stat().st_size if rank.log.exists() else 0 for rank in ranks}
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_DUMP_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if all(rank.log.exists() and rank.log.stat().st_size > sizes[rank.number] for rank in ranks):
            time.sleep(0.1)  # let the last lines arrive
            return


def _describe(rank: _Rank, world_size: int) -> str:
    name = f"rank {rank.number} of {world_size}"
    if rank.status == "failed":
        text = f"{name} failed\n{rank.value}"
    elif rank.status == "died":
        text = f"{name} died with exit code {rank.value}"
    else:
        text = f"{name} was still running, its stacks are at the end of its output"
    output = rank.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip() if rank.log.exists() else ""
    return f"{text}\n--- output of {name} ---\n{output}" if output else text


def save_coverage() -> None:
    """Writes what this process has run so far, under `make coverage`: ranks do not end by themselves."""
    if "coverage" in sys.modules:  # loaded at the start of each process, then and only then
        import coverage

        if (measured := coverage.Coverage.current()) is not None:
            measured.save()


def _rank_main(pipe: Connection, log: str, env: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs in the rank: calls `fn`, sends what came of it and waits to be killed.

    It waits because rank 0's exit would close the store, and any rank's exit its connections, under the others' feet.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    os.environ.pop("LOCAL_SIZE", None)  # would turn on DeepSpeed's shared memory segments, which outlive killed ranks
    os.environ.update(env)
    try:
        if not getattr(sys.modules.get(PRELOAD), "READY", False):
            raise RuntimeError(f"the forkserver could not import {PRELOAD}: every rank would import all by itself")
        if os.environ.get(DEVICE) == "sim":
            from tests.device.simulated import install

            install()
        import torch

        torch.set_num_threads(1)
        answer = pickle.dumps(("ok", fn(*args)))
    except BaseException:
        answer = pickle.dumps(("failed", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    save_coverage()
    try:
        pipe.send_bytes(answer)
        pipe.recv_bytes()
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        os._exit(0)
