"""Starts ranks as fresh processes on this machine, and collects what each writes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowmem_load.errors import LowMemLoadError

TIMEOUT_S = 3600
"""Seconds: far above any load on one machine, so only a hang meets it."""

LOG_TAIL_LINES = 25
"""Lines of a failed rank's output that its error ends with."""

POLL_S = 0.05


class GroupError(LowMemLoadError, RuntimeError):
    """A rank failed or the group ran past its time; the message ends with the tail of that rank's log."""


def run_ranks(
    module: str, spec: Mapping[str, Any], out: Path, world_size: int, *, on_gpu: bool, cwd: Path | None = None
) -> list[str]:
    """Run `python -m module OUT/spec.json` in `world_size` processes; return the OUT/rank<N>.json that they write.

    Args:
        module: to run.
        spec: what it is told, as JSON.
        out: folder of the results and logs; made if need be.
        world_size: ranks, all on this machine.
        on_gpu: whether DeepSpeed may look for an accelerator.
        cwd: folder that the processes run in.

    Raises:
        GroupError: names the rank that failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = [out / f"rank{rank}.json" for rank in range(world_size)]
    for result in results:  # one left by an earlier run must not pass for this one's
        result.unlink(missing_ok=True)
    spec_path = out / "spec.json"
    spec_path.write_text(json.dumps(spec))
    command, port = [sys.executable, "-m", module, str(spec_path)], _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            environment = _environment(rank, world_size, port, on_gpu)
            with _log_path(out, rank).open("wb") as log:
                started = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes.append(started)
        _wait(processes, out)
    finally:
        for process in processes:  # all of them, before a second interrupt can come while one is waited for
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
    return [result.read_text() for result in results]


def _log_path(out: Path, rank: int) -> Path:
    return out / f"rank{rank}.log"


def _wait(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        # The first failure ends the group: its peers would wait for it until their own timeouts.
        if any(process.poll() for process in processes) or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    for rank, process in enumerate(processes):
        if process.poll():
            log = _log_path(out, rank)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise GroupError(f"rank {rank} of {len(processes)} ended with status {process.returncode}; {log}:\n{tail}")
    if any(process.poll() is None for process in processes):
        raise GroupError(f"{len(processes)} ranks: not done after {TIMEOUT_S} s; logs in {out}")


def _environment(rank: int, world_size: int, port: int, on_gpu: bool) -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # DeepSpeed compiles an extension on its first CPU start and looks for ninja on PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    if not on_gpu:
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
