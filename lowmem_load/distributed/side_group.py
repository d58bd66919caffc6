"""Messages that ranks send each other in the background, in a group of their own."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowmem_load.distributed.environment import backends_by_device, default_group, default_store
from lowmem_load.distributed.peers import Limits
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import LowMemLoadError, listed
from lowmem_load.files.memory import own_memory
from lowmem_load.phases import Progress

PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.01  # between looks at a message: the first one, and the longest
DRAIN_S = 10.0  # that messages get to end when they are no longer wanted; all ranks have begun them
VERDICT_S = 5.0  # beyond `Limits.gone_s` after a message has failed: by then it is known which rank has ended

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class SideGroup:
    """Some of the ranks of a group, which send each other messages. All of them call its methods in the same order.

    [Note: own groups] A collective cannot be ended: where a rank hangs, threads wait for it and keep the tensors, and
    the next collective of the group would meet it. So this group is not the caller's, and ends with what it was made
    for; its messages fail after `Limits.gone_s`, when the others give up that rank. It is one of gloo, which sends host
    memory, whatever the backend of the default group: a communicator of NCCL cannot be made by some ranks alone, and
    nothing bounds the time in which it forms. So with `on_device`, where an accelerator's memory is to be sent by its
    own backend, the caller's group sends it.

    Attributes:
        place: of this rank among the members.
        device: whose memory is sent.
        gathers: whether equal messages are sent by one collective.
        num_waits: which counts as progress. To wait is progress for as long as a step may be without any. So if a rank
            hangs, that one is named, and not the ones that wait for it.
    """

    def __init__(self, ranks: RankGroup, members: Sequence[int] | None = None, *, on_device: bool = False) -> None:
        world = ranks.world_ranks
        self._members = [world[rank] for rank in (range(len(world)) if members is None else members)]
        self.place = self._members.index(world[ranks.rank])
        self.device = device_of(ranks) if on_device else torch.device("cpu")
        self.gathers = on_device and has_fast_gather(ranks)
        self._ranks, self._limits = ranks, Limits.from_environment(0.0)
        self._limit = timedelta(seconds=self._limits.gone_s)
        self._is_own = not self.gathers and not ranks.is_fake
        self._group: Any = None if self._is_own else ranks.group or default_group()
        self._store: Any = None  # in which the members of an own group have found each other
        self.num_waits = 0
        self._works: list[Any] = []  # of torch, that have begun
        self._waits: list[tuple[Callable[[], bool], Callable[[], Any]]] = []  # whether one is over; what it came to

    def connect(self) -> None:
        """Connect the members. Collective, within a step."""
        if self._is_own and len(self._members) > 1:
            name = f"{self._ranks.next_step}/{'-'.join(map(str, self._members))}"  # of this step: no other has it
            self._store = dist.PrefixStore(f"lowmem_load/side/{name}", default_store())  # type: ignore[attr-defined]
            gloo = functools.partial(dist.ProcessGroupGloo, self._store, self.place, len(self._members), self._limit)
            made = _in_thread("lowmem_load-connect", gloo)
            until_s = time.monotonic() + self._limits.silence_s
            while not made.done():
                self._ranks.check()
                if time.monotonic() > until_s:
                    limit = f"{self._limits.silence_s:g} s"
                    raise LowMemLoadError(f"{self._names} have not connected to each other in {limit}")
                time.sleep(PAUSE_S)
            self._group = made.result()

    def broadcast(self, memory: torch.Tensor, place: int) -> None:
        """Begin to send contiguous memory from the member at `place` to the same memory of all others."""
        if len(self._members) == 1:
            return
        content = memory.view(-1).view(torch.uint8)  # gloo knows fewer dtypes than torch
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = place, True
        if self._is_own:
            options.timeout = self._limit
        self._works.append(self._group.broadcast([content], options))

    def send(self, memory: torch.Tensor, place: int) -> None:
        """Begin to send bytes to the member at `place`."""
        self._works.append(self._group.send([memory], place, 0))

    def receive(self, memory: torch.Tensor, place: int) -> None:
        """Begin to receive bytes from the member at `place`."""
        self._works.append(self._group.recv([memory], place, 0))

    def gather(self, memory: torch.Tensor, mine: torch.Tensor, received: list[torch.Tensor], to: int | None) -> None:
        """Begin to send equal messages to all members, whose places in `memory` are in order, or to one member.

        Where the group `gathers`, by the caller's group.
        """
        if to is None:
            # torch 2.13 has renamed it.
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
            self._works.append(getattr(dist, name)(memory, mine, group=self._group, async_op=True))
        else:
            dst = self._members[to]
            self._works.append(dist.gather(mine, received or None, dst=dst, group=self._group, async_op=True))

    def progress(self, of_step: Callable[[], Progress]) -> Callable[[], Progress]:
        """Return the progress of a step that waits for messages, too."""

        def report() -> Progress:
            amount, detail = of_step()
            return Progress(amount + self.num_waits, detail)

        return report

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until all messages have come; `check` is called now and then, and may raise. Collective."""
        progress_until_s = time.monotonic() + self._limits.silence_s
        self.num_waits += 1

        def count_and_check() -> None:
            self.num_waits += time.monotonic() < progress_until_s
            check()

        try:
            self._wait(count_and_check)
        except RuntimeError as error:  # of gloo: a member has ended, which the ranks learn from each other
            until_s = time.monotonic() + self._limits.gone_s + VERDICT_S
            while time.monotonic() < until_s:
                check()
                time.sleep(LONGEST_PAUSE_S)
            raise LowMemLoadError(f"{self._names} cannot send each other messages: {error}") from error

    def close(self) -> None:
        """Leave the group. Messages that are no longer wanted get a little time: memory must not go while they come."""
        until_s = time.monotonic() + DRAIN_S

        def check() -> None:
            if time.monotonic() > until_s:
                raise TimeoutError

        with contextlib.suppress(Exception):
            self._wait(check)
        self._works, self._waits, self._group = [], [], None
        if (store := self._store) is not None:  # all have connected, or raise at the end of that step
            # Source: torch 2.13 ProcessGroupGloo.cpp and gloo's rendezvous/context.cc, which leave the key there.
            _in_thread("lowmem_load-forget", lambda: store.delete_key(f"0/{self.place}"))

    def close_later(self) -> None:
        """As `close`, in a thread that nobody waits for. For finalizers, if only messages have the memory."""
        group = copy.copy(self)
        self._works, self._waits, self._group, self._store = [], [], None, None
        with contextlib.suppress(RuntimeError):  # Python ends, and does not start threads any more
            _in_thread("lowmem_load-close", group.close)

    def _wait(self, check: Callable[[], None]) -> None:
        works, group, self._works = self._works, self._group, []
        if self.device.type == "cpu" and works:  # gloo's messages to one rank only say to who waits that they are over
            over = _in_thread("lowmem_load-wait", lambda: _wait_for(works, group))
            self._waits.append((over.done, over.result))
        else:
            self._waits += [(work.is_completed, work.wait) for work in works]
        while self._waits:
            (is_over, result), pause_s = self._waits[0], PAUSE_S
            while not is_over():
                check()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            del self._waits[0]
            result()

    @property
    def _names(self) -> str:
        return f"ranks {listed([str(member) for member in self._members])}"


class Exchange:
    """Messages of the ranks, of `sizes` bytes each by rank, that go to all ranks, or to rank `to` alone.

    A rank whose size is 0 sends none. Fill `mine`, if it is there, then `start`; once the group has finished,
    `received` has messages by rank, where it `arrives`. From a rank to itself nothing is sent.

    Memory: all messages on ranks that get them, the own one on others. It is that of `before`, an exchange that is
    over, if that is enough: memory that is touched for the first time takes longer than a copy.
    """

    def __init__(
        self, side: SideGroup, sizes: Sequence[int], *, to: int | None, before: Exchange | None = None
    ) -> None:
        self._side, self._to, self._sizes = side, to, sizes
        rank = side.place
        self.arrives = to in (None, rank)
        self._is_even = side.gathers and len(sizes) > 1 and min(sizes) == max(sizes) > 0
        self._memory = before.give_up() if before is not None else _EMPTY
        here = [size if self.arrives or number == rank else 0 for number, size in enumerate(sizes)]
        if self._memory.numel() < sum(here):
            self._memory = _EMPTY  # it goes before the larger one comes
            self._memory = own_memory(sum(here), side.device)
        ends = itertools.accumulate(here)
        messages = {
            number: self._memory[end - size : end]
            for number, (size, end) in enumerate(zip(here, ends, strict=True))
            if size
        }
        self.mine = messages.get(rank)
        self.received: Mapping[int, torch.Tensor] = messages if self.arrives else {}

    def give_up(self) -> torch.Tensor:
        """Return the memory, and keep none of it. Local."""
        memory, self._memory, self.mine, self.received = self._memory, _EMPTY, None, {}
        return memory

    def start(self) -> None:
        """Begin to send. Collective."""
        side, to = self._side, self._to
        senders = [number for number, size in enumerate(self._sizes) if size]
        if self._is_even:
            assert self.mine is not None  # all ranks send
            side.gather(self._memory[: sum(self._sizes)], self.mine, [*self.received.values()], to)
        elif to is None:
            for sender in senders:
                side.broadcast(self.received[sender], sender)
        elif to == side.place:
            for sender in senders:
                if sender != to:
                    side.receive(self.received[sender], sender)
        elif self.mine is not None:
            side.send(self.mine, to)


def _wait_for(works: list[Any], _: Any) -> None:
    """Wait for works, whose group must stay that long."""
    for work in works:
        work.wait()


def _in_thread(name: str, work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a thread that nobody has to wait for."""
    over = Future[Any]()

    def run() -> None:
        try:
            over.set_result(work())
        except BaseException as error:  # noqa: BLE001  who waits raises it
            over.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return over


def has_fast_gather(ranks: RankGroup) -> bool:
    """Return whether equal messages are sent faster by one collective than by each rank for itself.

    gloo's (torch 2.13) take three times as long. 128 MiB of 4 ranks on one machine: all-gather 419 ms, broadcasts 126;
    gather 178 ms, isend and irecv 50.
    """
    return device_of(ranks).type != "cpu"


def device_of(ranks: RankGroup) -> torch.device:
    """Return the device on whose memory the group's collectives work best: the accelerator, or the host for gloo."""
    if dist.is_initialized() and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and backends_by_device(ranks.group).get(kind.type, "gloo") != "gloo":
            return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
