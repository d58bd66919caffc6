"""Runs a function in a group of ranks, which are fresh processes, and collects what they return."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowmem_load.errors import LowMemLoadError
from lowmem_load.integrations.startup_hook import OFF, SWITCH

FIRST_NODE = "10.89.0.1"
"""Address of the first of the nodes of `benchmarks.nodes`."""

REPOSITORY = Path(__file__).resolve().parents[1]

TIMEOUT_S = 3600
"""Seconds for all ranks of one run. No load on one machine takes that long."""

LOG_TAIL_LINES = 25
"""Lines of a failed rank's output that its error repeats."""

POLL_S = 0.05


class GroupError(LowMemLoadError, RuntimeError):
    """A rank failed or the ranks ran out of time. The message ends with the last lines of that rank's log."""


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    out: Path,
    world_size: int,
    on_gpu: bool = False,
    nodes: Sequence[str] = ("",),
    mounts: Sequence[int] = (),
) -> list[Any]:
    """Call `function(*args)` in `world_size` processes; return what each returns, dataclasses as dicts.

    The function is one of a module; arguments and results travel as JSON, logs are in `out`. With `on_gpu`, DeepSpeed
    looks for an accelerator. What it compiles is kept in the repository. The ranks are split among the `nodes`, which
    `benchmarks.nodes` has made and which have a temporary folder each; "" is this machine. `mounts` has, for each node,
    a process of which its ranks see the mounts.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = [out / f"rank{rank}.json" for rank in range(world_size)]
    for result in results:  # a result of an earlier run must not pass for one of this run
        result.unlink(missing_ok=True)
    spec_path = out / "spec.json"
    module = function.__module__
    if module == "__main__":
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]  # of `python -m`
    spec_path.write_text(json.dumps({"module": module, "function": function.__name__, "args": args}))
    command = [sys.executable, "-m", "benchmarks.launch", str(spec_path)]
    with socket.socket() as server:  # finds a free port
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        num_local = world_size // len(nodes)
        for rank in range(world_size):
            node = nodes[rank // num_local]
            environment = _environment(rank, world_size, num_local, port, on_gpu)
            prefix = []
            if node:
                (out / node).mkdir(exist_ok=True)
                environment |= {"MASTER_ADDR": FIRST_NODE, "GLOO_SOCKET_IFNAME": "fabric", "TMPDIR": str(out / node)}
                # `ip netns exec` would give the ranks of a node mounts of their own.
                prefix = ["nsenter", f"--net=/var/run/netns/{node}"]
                prefix += [f"--mount=/proc/{pid}/ns/mnt" for pid in mounts[rank // num_local :][:1]]
            with (out / f"rank{rank}.log").open("wb") as log:
                started = subprocess.Popen(
                    [*prefix, *command], cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            processes.append(started)
        _wait(processes, out)
    finally:
        for process in processes:  # kill all before waiting for one: a second interrupt may end the wait
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
    return [json.loads(result.read_text()) for result in results]


def _wait(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        # The first failure ends the run: the other ranks would wait for it until their own timeouts.
        if any(process.poll() for process in processes) or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    for rank, process in enumerate(processes):
        if process.poll():
            log = out / f"rank{rank}.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise GroupError(f"rank {rank} of {len(processes)} ended with status {process.returncode}; {log}:\n{tail}")
    if any(process.poll() is None for process in processes):
        raise GroupError(f"{len(processes)} ranks: not done after {TIMEOUT_S} s; logs in {out}")


def _environment(rank: int, world_size: int, num_local: int, port: int, on_gpu: bool) -> dict[str, str]:
    return {
        "TORCH_EXTENSIONS_DIR": str(REPOSITORY / ".cache" / "torch_extensions"),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % num_local),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        SWITCH: OFF,  # the default loader is not to be replaced
        # DeepSpeed compiles an extension on its first start on CPUs and looks for ninja on PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **({} if on_gpu else {"DS_ACCELERATOR": "cpu"}),
    }


def _be_rank(spec_path: Path) -> None:
    spec = json.loads(spec_path.read_text())
    result = getattr(importlib.import_module(spec["module"]), spec["function"])(*spec["args"])
    (spec_path.parent / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result, default=asdict))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    # All is written: threads of gloo and DeepSpeed that still run now and then abort a process that unwinds normally
    # ("terminate called without an active exception", once in some sixty runs of default ZeRO-3 here).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]))
