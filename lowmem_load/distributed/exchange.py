"""Messages of the ranks of a group, sent by one collective in the background."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.live_group import default_group
from lowmem_load.io.elements import own_memory

PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.01
"""Seconds between looks at a collective: the first one, and the longest after it has grown."""

DRAIN_S = 10.0
"""Seconds that a collective gets to end when its result is no longer wanted. All ranks have begun it."""


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class Exchange:
    """One message of each rank, or of rank `sender` alone, that goes to all ranks, or to rank `to` alone.

    All messages are `nbytes` long. Fill `mine`, if it is there, then `start`; after `finish`, `received` has messages
    by rank, on ranks that get any. On one rank, or from a rank to itself, nothing is sent.

    Memory: all messages on ranks that get them, one on others that send. It is that of
    `before`, an exchange that is over, if that is enough: memory that is touched for the first time takes longer than a
    copy.
    """

    def __init__(
        self, ranks: RankGroup, nbytes: int, *, sender: int | None, to: int | None, before: Exchange | None = None
    ) -> None:
        self._ranks, self._sender, self._to = ranks, sender, to
        self._work: Any = None
        rank, num_ranks = ranks.rank, ranks.world_size
        sends, gets = sender in (None, rank), to in (None, rank)
        num_sent = num_ranks if sender is None else 1
        self.mine: torch.Tensor | None = None
        self.received: Mapping[int, torch.Tensor] = {}
        num_held = num_sent if gets else 1 if sends else 0
        self._all = before.give_up() if before is not None else _EMPTY
        if self._all.numel() < num_held * nbytes:
            self._all = _EMPTY  # it goes before the larger one comes
            self._all = own_memory(num_held * nbytes, device_of(ranks))
        self._memory = self._all[: num_held * nbytes]
        if gets:
            senders = range(num_ranks) if sender is None else [sender]
            self.received = dict(zip(senders, self._memory.view(num_sent, nbytes), strict=True))
        if sends:
            self.mine = self.received[rank] if gets else self._memory

    def give_up(self) -> torch.Tensor:
        """Return the memory, and keep none of it. Local."""
        memory, self._all, self._memory, self.mine, self.received = self._all, _EMPTY, _EMPTY, None, {}
        return memory

    def start(self) -> None:
        """Begin to send. Collective."""
        group, to, sender = self._ranks.group, self._to, self._sender
        if self._ranks.world_size == 1 or (to is not None and to == sender):
            return
        if sender is None and to is None:
            # torch 2.13 has renamed it.
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
            self._work = getattr(dist, name)(self._memory, self.mine, group=group, async_op=True)
        elif sender is None:
            assert self.mine is not None  # all ranks send
            messages = list(self.received.values()) or None
            self._work = dist.gather(self.mine, messages, dst=self._global(to), group=group, async_op=True)
        elif to is None:
            self._work = dist.broadcast(self._memory, src=self._global(sender), group=group, async_op=True)
        elif self._ranks.rank == sender:
            self._work = dist.isend(self._memory, dst=self._global(to), group=group)
        elif self._ranks.rank == to:
            self._work = dist.irecv(self._memory, src=self._global(sender), group=group)

    def finish(self, check: Callable[[], None]) -> None:
        """Wait for the messages. `check` is called now and then, and raises if they will not come."""
        pause_s = PAUSE_S
        is_asked = self._to is None or self._sender is None  # gloo's isend and irecv only say so to who waits
        while self._work is not None and is_asked and not self._work.is_completed():
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if self._work is not None:
            self._work.wait()
            self._work = None

    def drain(self) -> None:
        """Wait a little for messages that are no longer wanted: memory must not go while they come."""
        until_s = time.monotonic() + DRAIN_S

        def check() -> None:
            if time.monotonic() > until_s:
                raise TimeoutError

        with contextlib.suppress(Exception):
            self.finish(check)

    def _global(self, rank: int | None) -> int:
        assert rank is not None
        return dist.get_global_rank(self._ranks.group or default_group(), rank)


def device_of(ranks: RankGroup) -> torch.device:
    """Return the device on whose memory the group's collectives work best: the accelerator, or the host for gloo."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        backends = dict(pair.split(":") for pair in dist.get_backend_config(ranks.group).split(",") if ":" in pair)
        if kind is not None and backends.get(kind.type, "gloo") != "gloo":
            return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
