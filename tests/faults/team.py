"""Sets of ranks that live through many faults, forked from a process that has the fault library preloaded.

`tests/ranks.py` starts fresh ranks for each call, without the library; here a set is used until a fault costs it a
rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from tests.faults.shim import Control, build
from tests.faults.worker import Answer, Command
from tests.ranks import REPO, reserved_port, set_environment

START_S = 300
"""Until the ranks are there: imports, and the first time DeepSpeed's extension is compiled."""
SILENCE_S = 6
"""After which the ranks of a set name one that makes no progress; a read that is tried again sleeps up to 2 s."""


class Zygote:
    """The process that ranks are forked from; see `zygote.py`.

    Attributes:
        folder: for all that the ranks and the faults need.
    """

    def __init__(self) -> None:
        set_environment()
        library = build(REPO / ".cache" / "faults")
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        command = [sys.executable, "-m", "tests.faults.zygote"]
        paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(paths)}
        self._log = (self.folder / "zygote.log").open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, env=env, cwd=REPO
        )

    def fork(self, arguments: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raises RuntimeError if it ended."""
        if self._process.poll() is not None:
            text = (self.folder / "zygote.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the process that ranks are forked from ended:\n{text}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Team:
    """The ranks of one process group, forked from a `Zygote`. `warm` has what they have done before without a fault."""

    def __init__(self, zygote: Zygote, world_size: int, group_timeout_s: float) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix=f"team{world_size}-", dir=zygote.folder))
        self.controls = [Control(self.folder / f"rules{rank}") for rank in range(world_size)]
        self.connections: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self.warm: set[tuple[object, ...]] = set()
        self._zygote = zygote
        self._port = contextlib.ExitStack()
        port = self._port.enter_context(reserved_port())
        try:
            self._start(port, group_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, port: int, group_timeout_s: float) -> None:
        address = str(self.folder / "address")
        with Listener(address) as listener:
            for rank in range(self.world_size):
                env = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.world_size),
                    # Two ranks read with several threads each, three with one: both ways to read have their faults.
                    "LOCAL_WORLD_SIZE": "1" if self.world_size == 2 else str(self.world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "LOWMEM_LOAD_SILENCE_S": str(SILENCE_S),
                    "LOWMEM_LOAD_GONE_S": str(SILENCE_S),
                }
                arguments = {
                    "address": address,
                    "control": str(self.folder / f"rules{rank}"),
                    "log": str(self.log(rank)),
                    "env": env,
                    "group_timeout_s": group_timeout_s,
                }
                self._zygote.fork(arguments)
            for _ in range(self.world_size):
                self._wait_for(listener)
                connection = listener.accept()
                rank, pid = connection.recv()
                self.connections[rank], self.pids[rank] = connection, pid

    def _wait_for(self, listener: Listener) -> None:
        """Waits until a rank asks for a connection."""
        deadline = time.monotonic() + START_S
        while not wait([listener._listener._socket], timeout=1):  # type: ignore[attr-defined]
            self._zygote.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rank within {START_S} s")

    def log(self, rank: int) -> Path:
        """The output of a rank."""
        return self.folder / f"rank{rank}.log"

    def send(self, rank: int, command: Command) -> None:
        self.connections[rank].send(command)

    def answers(self, ranks: set[int], deadline: float) -> dict[int, Answer | None]:
        """Returns what these ranks answer until then, by `time.perf_counter`; None for one that died."""
        found: dict[int, Answer | None] = {}
        while left := ranks - set(found):
            ready = wait([self.connections[rank] for rank in left], timeout=max(0.0, deadline - time.perf_counter()))
            if not ready:
                break
            for rank in left:
                if self.connections[rank] in ready:
                    try:
                        found[rank] = self.connections[rank].recv()
                    except (EOFError, ConnectionResetError):
                        found[rank] = None
        return found

    def stacks(self, ranks: set[int]) -> str:
        """Returns where these ranks are, as far as they say so."""
        found = []
        for rank in sorted(ranks):
            size = self.log(rank).stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
            time.sleep(0.3)
            text = self.log(rank).read_bytes()[size:].decode(errors="replace")
            found.append(f"rank {rank}:\n{text}")
        return "\n".join(found)

    def close(self) -> None:
        for control in self.controls:
            control.clear()
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self.connections.values():
            connection.close()
        self._port.close()
