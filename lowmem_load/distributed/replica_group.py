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

from lowmem_load.distributed.exchange import DRAIN_S, LONGEST_PAUSE_S, PAUSE_S, device_of, wait_for
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

    [Note: own groups] gloo's collectives cannot be ended: where a rank hangs, threads wait for it with the tensors in
    their hands. So a load on gloo has groups of its own, which end with it, and a broadcast fails after
    `Limits.gone_s`, when the others give up that rank. With NCCL, a group of torch that has these ranks is used, such
    as that of a mesh dim, and otherwise one is made, which stays for the next load.

    Attributes:
        place: of this rank among the members.
        device: whose memory is sent.
    """

    def __init__(self, ranks: RankGroup, members: Sequence[int]) -> None:
        of_group = dist.get_process_group_ranks(ranks.group or default_group())
        self._ranks, self._members = ranks, [of_group[rank] for rank in members]
        self.place, self.device = list(members).index(ranks.rank), device_of(ranks)
        self._limit = timedelta(seconds=Limits.from_environment(0.0).gone_s)
        self._works: list[Any] = []
        self._send: Send | None = None

    def connect(self, number: int, check: Callable[[], None]) -> None:
        """Connect the members; `number` is new to these ranks. `check` is called meanwhile, and may raise."""
        make = self._of_gloo if self.device.type == "cpu" else self._of_torch
        made = Future[Send]()

        def run() -> None:
            try:
                made.set_result(make(number))
            except BaseException as error:  # noqa: BLE001  who waits raises it
                made.set_exception(error)

        threading.Thread(target=run, name="lowmem_load-connect", daemon=True).start()
        while not made.done():
            check()
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

    def _of_torch(self, _: int) -> Send:
        torch.accelerator.set_device_index(self.device)
        known = dist.distributed_c10d._world.pg_group_ranks.items()  # noqa: SLF001
        alike = [group for group, ranks in known if [*ranks] == self._members]
        group = alike[0] if alike else dist.new_group(self._members, use_local_synchronization=True)
        return lambda memory, place: dist.broadcast(memory, src=self._members[place], group=group, async_op=True)

    def broadcast(self, memory: torch.Tensor, place: int) -> None:
        """Begin to send memory from the member at `place` to the same memory of all others. Collective."""
        assert self._send is not None
        self._works.append(self._send(memory.view(torch.uint8), place))

    def finish(self, wait: Callable[[], None]) -> None:
        """Wait until all broadcasts have ended; `wait` is called now and then, and may raise. Collective."""
        try:
            wait_for(self._works, wait, is_host=False)
        except RuntimeError as error:  # of gloo: a member has ended, which the ranks learn from each other
            until_s = time.monotonic() + self._limit.total_seconds() + VERDICT_S
            while time.monotonic() < until_s:
                wait()
                time.sleep(LONGEST_PAUSE_S)
            members = listed([str(member) for member in self._members])
            raise LowMemLoadError(f"ranks {members} cannot send each other what they have read: {error}") from error

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
