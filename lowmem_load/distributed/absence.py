"""What waiting ranks say on stderr of those that have not come, such as those of a script that loads on rank 0 only.

Ranks that have a process group know each other by heartbeats, see `store_channel.py`. Before that, here: each rank
leaves a key in the launcher's store when it begins to make the group.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowmem_load.distributed.heartbeat import NO_CALL, SAME_ORDER
from lowmem_load.errors import listed
from lowmem_load.text import spell_ranks

NOTICE_S = 30.0
"""Seconds that a rank waits before it says for whom. Before each further line it waits twice as long."""

MAX_SHOWN = 4
"""Ranks of which a line says what they do."""

CONNECT_S = 5.0
"""Seconds for a connection to the launcher's store."""


def say_who_is_absent(rank: int, waited_s: float, place: str, absent: str) -> None:
    """Write to stderr for whom a rank waits, and where; `absent` is the text of `absent_text`. It never fails."""
    line = f"lowmem_load: rank {rank} has waited {waited_s:.0f} s {place} for {absent}; {SAME_ORDER}"
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def absent_text(absent: Mapping[int, str]) -> str:
    """Return ranks that have not come as text, given what is known of them; "" if there are none."""
    details = listed([f"rank {rank} {text}" for rank, text in absent.items()], MAX_SHOWN)
    return f"rank(s) {spell_ranks([*absent])} ({details})" if absent else ""


_numbers = itertools.count(1)  # of groups that this process has made


class Arrivals:
    """Who has come to make a process group, as keys in the launcher's store."""

    def __init__(self) -> None:
        self._rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        # After a restart by torchrun the store may be the same.
        prefix = f"lowmem_load/come/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(_numbers)}"
        self._keys = [f"{prefix}/{rank}" for rank in range(world_size)]
        self._over = threading.Event()

    def note(self, store: Any) -> None:
        """Note in the launcher's store that this rank has come."""
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        store.set(self._keys[self._rank], "")

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Within the block, say at growing intervals which ranks have not come."""
        thread = threading.Thread(target=self._watch, name="lowmem_load-arrivals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self) -> None:
        start_s, notice_s = time.monotonic(), NOTICE_S
        while not self._over.wait(start_s + notice_s - time.monotonic()):
            place, absent = "to make the process group", self._absent()
            if absent and not self._over.is_set():
                say_who_is_absent(self._rank, notice_s, place, absent)
            notice_s *= 2

    def _absent(self) -> str:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            # A connection of its own: that of the waiting thread is in use.
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))  # type: ignore[attr-defined]
            self.note(store)  # rank 0 may wait in the constructor of its store
            return absent_text({rank: NO_CALL for rank, key in enumerate(self._keys) if not store.check([key])})
        except (RuntimeError, OSError):
            return f"the store of rank 0 or its launcher, which does not answer at {host}:{port}"
