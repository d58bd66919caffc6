"""Makes two nodes of Linux namespaces, joined by a cable, and runs functions in them."""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"
NAMESPACES = ("net", "uts", "mnt", "pid_for_children")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(RuntimeError):
    """Nodes cannot be made here."""


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")


class Cable:
    """Two nodes. Use as a context manager; raises Unavailable where they cannot be made.

    Attributes:
        pids: of a process for each node, in whose namespaces the node is.
    """

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cable:
        missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
        if os.geteuid() != 0 or missing:
            raise Unavailable(f"nodes take root, and util-linux and iproute2 (missing: {', '.join(missing) or 'root'})")
        try:
            for number in range(2):
                script = f"echo node{number} > /proc/sys/kernel/hostname && ip link set lo up && echo up && sleep inf"
                own = ["--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount", "--uts"]
                node = subprocess.Popen(["unshare", *own, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
                self._processes.append(node)
                self.pids.append(node.pid)
                assert node.stdout is not None
                if node.stdout.readline() != "up\n":
                    raise Unavailable("namespaces cannot be made here")
            ends = [["name", INTERFACE, "netns", str(pid)] for pid in self.pids]
            _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for number, address in enumerate(ADDRESSES):
                self._ip(number, "addr", "add", f"{address}/24", "dev", INTERFACE)
                self._ip(number, "link", "set", INTERFACE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def cut(self) -> None:
        """No packet passes any more; no connection is told."""
        self._ip(1, "link", "set", INTERFACE, "down")

    def _ip(self, number: int, *arguments: str) -> None:
        _call("nsenter", "--target", str(self.pids[number]), "--net", "ip", *arguments)


def _enter(pid: int, *namespaces: str) -> None:
    """Moves the calling thread, and what it starts, to the namespaces of a process."""
    descriptors = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in namespaces]
    for descriptor in descriptors:
        if _libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def in_node(pid: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a child of this process, in the node of `pid`; returns what it returned."""
    _enter(pid, *NAMESPACES)
    result, to_write = os.pipe()
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            answer = pickle.dumps((True, work(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(to_write, "wb") as pipe:
            pipe.write(answer)
        signal.pause()  # until the parent ends: rank 0 holds the store
    os.close(to_write)
    with os.fdopen(result, "rb") as pipe:
        content = pipe.read()
    is_good, value = pickle.loads(content) if content else (False, "died")
    assert is_good, value
    return value
