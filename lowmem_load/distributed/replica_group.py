"""A group of ranks that send each other what one of them has read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowmem_load.distributed.exchange import DRAIN_S, LONGEST_PAUSE_S, PAUSE_S, wait_for
from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Limits
from lowmem_load.distributed.live_group import default_group, default_store
from lowmem_load.errors import LowMemLoadError, listed

VERDICT_S = 5.0
"""Seconds beyond `Limits.gone_s` after a broadcast has failed: by then it is known which rank has ended."""

Send = Callable[[torch.Tensor, int], Any]
"""Begins to send bytes from the rank at a place of the group to all others; returns the work of torch."""


class ReplicaGroup:
    """Ranks that hold the same memory. All of them call its methods in the same order.

    [Note: own groups] A collective cannot be ended: where a rank hangs, threads wait for it with the tensors in their
    hands, and the next collective of the group would meet it. So a load has groups of its own, which end with it, and a
    broadcast fails after `Limits.gone_s`, when the others give up that rank. They are of gloo, which sends host memory,
    whatever the backend of the default group: a communicator of NCCL cannot be made by some ranks alone, and nothing
    bounds the time in which it forms.

    Attributes:
        place: of this rank among the members.
    """

    def __init__(self, ranks: RankGroup, members: Sequence[int]) -> None:
        of_group = dist.get_process_group_ranks(ranks.group or default_group())
        self._members = [of_group[rank] for rank in members]
        self.place = list(members).index(ranks.rank)
        limits = Limits.from_environment(0.0)
        self._limit, self._silence_s = timedelta(seconds=limits.gone_s), limits.silence_s
        self._works: list[Any] = []
        self._send: Send | None = None

    def connect(self, number: int, check: Callable[[], None]) -> None:
        """Connect the members; `number` is new to these ranks. `check` is called meanwhile, and may raise."""
        made = Future[Send]()

        def run() -> None:
            try:
                made.set_result(self._of_gloo(number))
            except BaseException as error:  # noqa: BLE001  who waits raises it
                made.set_exception(error)

        threading.Thread(target=run, name="lowmem_load-connect", daemon=True).start()
        until_s = time.monotonic() + self._silence_s
        while not made.done():
            check()
            if time.monotonic() > until_s:
                raise LowMemLoadError(f"{self._names} have not connected to each other in {self._silence_s:g} s")
            time.sleep(PAUSE_S)
        self._send = made.result()

    def _of_gloo(self, number: int) -> Send:
        members = "-".join(map(str, self._members))
        store = dist.PrefixStore(f"lowmem_load/replicas/{number}/{members}", default_store())  # type: ignore[attr-defined]
        group = dist.ProcessGroupGloo(store, self.place, len(self._members), self._limit)

        def send(memory: torch.Tensor, place: int) -> Any:
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = place, self._limit
            return group.broadcast([memory], options)  # type: ignore[attr-defined]

        return send

    def broadcast(self, memory: torch.Tensor, place: int) -> None:
        """Begin to send host memory from the member at `place` to the same memory of all others. Collective."""
        assert self._send is not None
        self._works.append(self._send(memory.view(torch.uint8), place))

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until all broadcasts have ended; `check` is called now and then, and may raise. Collective."""
        try:
            wait_for(self._works, check, is_host=False)
        except RuntimeError as error:  # of gloo: a member has ended, which the ranks learn from each other
            until_s = time.monotonic() + self._limit.total_seconds() + VERDICT_S
            while time.monotonic() < until_s:
                check()
                time.sleep(LONGEST_PAUSE_S)
            raise LowMemLoadError(f"{self._names} cannot send each other what they have read: {error}") from error

    @property
    def _names(self) -> str:
        return f"ranks {listed([str(member) for member in self._members])}"

    def close(self) -> None:
        """Leave the group; after a failure, wait a little for broadcasts that others have begun as well. Local."""
        if self._works:
            rest = threading.Thread(
                target=_drain, args=(self._works, self._send), name="lowmem_load-drain", daemon=True
            )
            self._works = []
            self._send = None
            rest.start()
            rest.join(DRAIN_S)
        self._send = None


def _drain(works: list[Any], _: Send | None) -> None:
    """Wait for broadcasts, whose group must stay that long."""
    while works:
        with contextlib.suppress(RuntimeError):  # somebody has ended
            works.pop().wait()
