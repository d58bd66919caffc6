"""Starts a group of ranks as fresh processes and collects their results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.worker import RankResult, Spec

REPOSITORY = Path(__file__).resolve().parents[1]
# An hour: far above any load here, so only a hang meets it.
TIMEOUT_S = 3600
LOG_TAIL_LINES = 25


class GroupError(RuntimeError):
    """A rank failed or the group ran past its time; the message ends with the tail of that rank's log."""


def run_group(spec: Spec, world_size: int, on_gpu: bool) -> list[RankResult]:
    """Run `world_size` fresh processes of one load and return their results in rank order."""
    texts = run_processes("benchmarks.worker", asdict(spec), Path(spec.out), world_size, on_gpu)
    return [RankResult.from_json(text) for text in texts]


def run_processes(module: str, spec: dict[str, Any], out: Path, world_size: int, on_gpu: bool) -> list[str]:
    """Run `python -m module OUT/spec.json` in `world_size` processes; return the OUT/rank<N>.json that they write."""
    out.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):  # a result left by an earlier run must not pass for this one's
        _result_path(out, rank).unlink(missing_ok=True)
    spec_path = out / "spec.json"
    spec_path.write_text(json.dumps(spec))
    port = _free_port()
    processes = []
    try:
        for rank in range(world_size):
            environment = _environment(rank, world_size, port, on_gpu)
            processes.append(_start(module, spec_path, _log_path(out, rank), environment))
        _wait(processes, out)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [_result_path(out, rank).read_text() for rank in range(world_size)]


def _result_path(out: Path, rank: int) -> Path:
    return out / f"rank{rank}.json"


def _log_path(out: Path, rank: int) -> Path:
    return out / f"rank{rank}.log"


def _start(module: str, spec_path: Path, log_path: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, str(spec_path)]
    with log_path.open("wb") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        # The first failure ends the group: its peers would wait for it until their own timeouts.
        if any(process.poll() for process in processes) or time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
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
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".cache" / "torch_extensions"))
    if not on_gpu:
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
