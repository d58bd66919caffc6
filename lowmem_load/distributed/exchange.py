"""Messages of the ranks of a group, sent in the background."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.live_group import default_group
from lowmem_load.io.memory import own_memory

PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.01
"""Seconds between looks at a collective: the first one, and the longest after it has grown."""

DRAIN_S = 10.0
"""Seconds that a collective gets to end when its result is no longer wanted. All ranks have begun it."""


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class Exchange:
    """Messages of the ranks, of `sizes` bytes each by rank, that go to all ranks, or to rank `to` alone.

    With `gathers`, equal messages take one collective. Else each rank sends its own; a rank whose size is 0 sends none.
    Fill `mine`, if it is there, then `start`; after `finish`, `received` has messages by rank, on ranks that
    get any. From a rank to itself nothing is sent.

    Memory: all messages on ranks that get them, the own one on others. It is that of `before`, an exchange that is
    over, if that is enough: memory that is touched for the first time takes longer than a copy.
    """

    def __init__(
        self,
        ranks: RankGroup,
        sizes: Sequence[int],
        *,
        to: int | None,
        gathers: bool,
        before: Exchange | None = None,
    ) -> None:
        self._ranks, self._to = ranks, to
        self._works: list[Any] = []
        self._is_host = device_of(ranks).type == "cpu"
        self._is_even = gathers and len(sizes) > 1 and min(sizes) == max(sizes) > 0
        rank = ranks.rank
        is_held = [bool(size) and (to in (None, rank) or number == rank) for number, size in enumerate(sizes)]
        ends = list(itertools.accumulate(size * is_here for size, is_here in zip(sizes, is_held, strict=True)))
        self._all = before.give_up() if before is not None else _EMPTY
        if self._all.numel() < ends[-1]:
            self._all = _EMPTY  # it goes before the larger one comes
            self._all = own_memory(ends[-1], device_of(ranks))
        self._memory = self._all[: ends[-1]]
        messages = {number: self._memory[ends[number] - sizes[number] : ends[number]] for number in _places(is_held)}
        self._senders = _places(sizes)
        self.mine = messages.get(rank)
        self.received: Mapping[int, torch.Tensor] = messages if to in (None, rank) else {}

    def give_up(self) -> torch.Tensor:
        """Return the memory, and keep none of it. Local."""
        memory, self._all, self._memory, self.mine, self.received = self._all, _EMPTY, _EMPTY, None, {}
        return memory

    def start(self) -> None:
        """Begin to send. Collective."""
        group, to, rank = self._ranks.group, self._to, self._ranks.rank
        if self._is_even and to is None:
            # torch 2.13 has renamed it.
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
            self._works = [getattr(dist, name)(self._memory, self.mine, group=group, async_op=True)]
        elif self._is_even:
            assert self.mine is not None  # all ranks send
            messages = list(self.received.values()) or None
            self._works = [dist.gather(self.mine, messages, dst=self._global(to), group=group, async_op=True)]
        elif to is None and self._ranks.world_size > 1:
            for sender in self._senders:
                message, source = self.received[sender], self._global(sender)
                self._works.append(dist.broadcast(message, src=source, group=group, async_op=True))
        elif to == rank:
            for sender in self._senders:
                if sender != to:
                    self._works.append(dist.irecv(self.received[sender], src=self._global(sender), group=group))
        elif self.mine is not None and to is not None:
            self._works = [dist.isend(self.mine, dst=self._global(to), group=group)]

    def run(self) -> None:
        """Send, and wait for the messages, also where another rank has failed: all have begun. Collective."""
        try:
            self.start()
            self.finish(self._ranks.check)
        except BaseException:
            self.drain()
            raise

    def finish(self, check: Callable[[], None]) -> None:
        """Wait for the messages. `check` is called now and then, and raises if they will not come."""
        wait_for(self._works, check, is_host=self._is_host)

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


def broadcast(tensors: Sequence[torch.Tensor], ranks: RankGroup) -> None:
    """Send contiguous tensors of the default group's first rank to all others. Collective, within a step."""
    for tensor in tensors:
        content = tensor.view(-1).view(torch.uint8)  # gloo knows fewer dtypes than torch
        wait_for([dist.broadcast(content, 0, async_op=True)], ranks.check, is_host=tensor.device.type == "cpu")


def wait_for(works: list[Any], check: Callable[[], None], *, is_host: bool) -> None:
    """Wait for collectives, and take them out of the list. `check` is called now and then."""
    if is_host and works:  # gloo's isend and irecv only say to who waits that they are over
        works[:] = [_Waiting([*works])]
    while works:
        pause_s = PAUSE_S
        while not works[0].is_completed():
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        works[0].wait()
        del works[0]


class _Waiting:
    """A thread that waits for works, as one work."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works, self._future = works, Future[None]()
        threading.Thread(target=self._run, name="lowmem_load-exchange", daemon=True).start()

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait()
            self._future.set_result(None)
        except BaseException as error:  # noqa: BLE001  who waits raises it
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


def has_fast_gather(ranks: RankGroup) -> bool:
    """Return whether equal messages are sent faster by one collective than by each rank for itself.

    gloo's (torch 2.13) take three times as long. 128 MiB of 4 ranks on one machine: all-gather 419 ms, broadcasts 126;
    gather 178 ms, isend and irecv 50.
    """
    return device_of(ranks).type != "cpu"


def _places(flags: Sequence[int]) -> list[int]:
    return [place for place, flag in enumerate(flags) if flag]


def device_of(ranks: RankGroup) -> torch.device:
    """Return the device on whose memory the group's collectives work best: the accelerator, or the host for gloo."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        backends = dict(pair.split(":") for pair in dist.get_backend_config(ranks.group).split(",") if ":" in pair)
        if kind is not None and backends.get(kind.type, "gloo") != "gloo":
            return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
