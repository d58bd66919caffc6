"""Nodes made of Linux network namespaces, each with a link of its own to the storage, and ranks that run on them.

Each node has two cables. The one to the storage, which is a server on this machine, passes `link` at most; the one to
the other nodes passes all there is. Needs root, and iproute2 with tc.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STORAGE = "10.88.0.1"
"""The address under which every node reaches the storage, so that all ranks name one URL."""

PORT = 29_500
TIMEOUT_S = 900


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def nodes(number: int, link: str) -> Iterator[list[str]]:
    """Yield the names of the namespaces; `link` is the rate of a storage link, as tc takes it (such as 1gbit)."""
    names = [f"lowmem{node}" for node in range(number)]
    _call("ip", "link", "add", "lowmembr", "type", "bridge")
    try:
        _call("ip", "link", "set", "lowmembr", "up")
        _call("ip", "addr", "add", f"{STORAGE}/32", "dev", "lo")
        for node, name in enumerate(names):
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", f"lowmemf{node}", "type", "veth", "peer", "name", "fabric", "netns", name)
            _call("ip", "link", "set", f"lowmemf{node}", "master", "lowmembr", "up")
            _call("ip", "link", "add", f"lowmems{node}", "type", "veth", "peer", "name", "storage", "netns", name)
            _call("ip", "addr", "add", f"10.88.{node + 1}.1/24", "dev", f"lowmems{node}")
            _call("ip", "link", "set", f"lowmems{node}", "up")
            _call(*f"tc qdisc add dev lowmems{node} root tbf rate {link} burst 512kb latency 100ms".split())
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"10.89.0.{node + 1}/24", "dev", "fabric")
            _call(*inside, "addr", "add", f"10.88.{node + 1}.2/24", "dev", "storage")
            for device in ("lo", "fabric", "storage"):
                _call(*inside, "link", "set", device, "up")
            _call(*inside, "route", "add", STORAGE, "via", f"10.88.{node + 1}.1")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "addr", "del", f"{STORAGE}/32", "dev", "lo"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "lowmembr"], check=False, capture_output=True)


def run_on_nodes(module: str, names: Sequence[str], num_local: int, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `num_local` ranks of `python -m module --rank SPEC` on each node; return what they wrote, in rank order.

    A node whose name is empty is this machine. Each rank's spec has a `folder` of its node, besides what `spec` has.
    """
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        for node, name in enumerate(names):
            folder = Path(scratch, f"node{node}")
            folder.mkdir()
            # `ip netns exec` would give the ranks of a node mounts of their own.
            prefix = ["nsenter", f"--net=/var/run/netns/{name}"] if name else []
            for local in range(num_local):
                rank = node * num_local + local
                given = {**spec, "folder": str(folder), "out": f"{scratch}/{rank}"}
                places = {"RANK": rank, "LOCAL_RANK": local, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
                places |= {"WORLD_SIZE": len(names) * num_local, "LOCAL_WORLD_SIZE": num_local}
                places |= {"MASTER_ADDR": "10.89.0.1" if name else "127.0.0.1", "TMPDIR": folder}
                places |= {"GLOO_SOCKET_IFNAME": "fabric"} if name else {}
                environment = {**os.environ, **{key: str(value) for key, value in places.items()}}
                command = [*prefix, sys.executable, "-m", module, "--rank", json.dumps(given)]
                processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        codes = [process.wait(TIMEOUT_S) for process in processes]
        if any(codes):
            raise SystemExit(f"{module}: the ranks ended with {codes}")
        return [json.loads(Path(scratch, str(rank)).read_text()) for rank in range(len(processes))]


def be_rank(run: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Run one rank and write its result if the command line asks for one; return whether it did."""
    if sys.argv[1:2] != ["--rank"]:
        return False
    spec = json.loads(sys.argv[2])
    Path(spec["out"]).write_text(json.dumps(run(spec)))
    return True
