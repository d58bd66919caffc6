"""Nodes made of Linux network namespaces, each with a link of its own to the storage.

Each node has two cables. The one to the storage, which is a server on this machine, passes `link` at most; the one to
the other nodes passes all there is. Needs root, and iproute2 with tc.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

STORAGE = "10.88.0.1"
"""The address under which every node reaches the storage, so that all ranks name one URL."""


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
