"""One rank's end of the agreement: a thread that writes into the store what this rank does, and reads the others.

The protocol is [Note: agreement] in `distributed/steps.py`. Keys: `rank/R` is the heartbeat of rank R, with its entry;
`GROUP/N` the verdict on step N of a group; `GROUP/failed` the last step in which a rank has failed before the verdict.

[Note: one thread] A call of the store may take for ever, and no signal interrupts it. So one thread makes all calls.
The caller only says where it is, and looks now and then whether the thread has answered. If the thread hangs in a call,
the caller goes on without it, and every later step of this process group fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowmem_load.distributed import peers
from lowmem_load.distributed.peers import Entry, Heartbeat, Limits, Verdict, packed, unpacked
from lowmem_load.errors import listed
from lowmem_load.phases import Progress
from lowmem_load.text import spell_ranks

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # seconds between heartbeats
POLL_S, POLL_GROWTH = 0.001, 1.05  # seconds before a waiting rank looks, for each 16 ranks; how later pauses grow
NOTICE_S = 30.0  # that a rank waits before it says for whom; before each further line it waits twice as long
KEPT = 64  # last verdicts that stay: a rank in a loop that others have left may come to one much later
FAREWELL_S = 2.0  # seconds that the leader waits for who has to read its last verdict: the store may end with it
MAX_SHOWN = 4  # absent ranks of which a line says what they do

_NEVER = timedelta(days=7)  # timeout of the store's clients: who uses them finds out that the store is silent


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, as one of them sees it. The first one of its members is the leader."""

    channel: StoreChannel
    name: str  # unique among the groups of the store; prefix of its keys
    members: tuple[int, ...]  # as ranks in the world
    number: int = 0  # of the next step
    num_loops: int = 0  # that have begun since the last step
    read: list[str] = field(default_factory=list)  # of the leader: keys of the last verdicts

    @property
    def key(self) -> str:
        """The key of the verdict on the next step."""
        return f"{self.name}/{self.number}"


@dataclass(eq=False, slots=True)
class Place:
    """The caller's present work. Two threads use it, so it is not changed."""

    group: Group
    title: str = ""  # "" between loads
    progress: weakref.ref[Callable[[], Progress]] | None = None  # a thread that hangs must not keep what it refers to
    outer: Place | None = None  # around this one; None between loads
    entry: Entry | None = None  # that this rank brings to the step; None while it is busy
    key: str = field(init=False)  # of the verdict
    since_s: float = field(init=False, default_factory=time.monotonic)
    answer: Future[Any] = field(init=False, default_factory=Future)  # of the thread to the caller

    def __post_init__(self) -> None:
        self.key = self.group.key

    def groups(self) -> dict[Group, str]:
        """Return the groups of this block and of those around it, each with the title of a block."""
        return {self.group: self.title, **self.outer.groups()} if self.outer else {}


class StoreChannel:
    """The thread of a rank of the world that uses the store, and all that it shares with its callers."""

    def __init__(self, open_client: Callable[[], Any], rank: int, beat_s: float = BEAT_S) -> None:
        self.rank, self.limits, self.broken = rank, Limits(), ""  # what is wrong with the store
        self.groups: dict[str, Group] = {}
        self.place = Place(Group(self, "", (rank,)))  # where the caller is
        self._left = deque[tuple[Group, str]]()  # loops that the caller has left, and why
        # Released when the thread has to look. A queue.SimpleQueue would be simpler, but before CPython 3.13 its
        # get(timeout=) waits for ever if the timeout passes while it takes its lock, as happens on busy cores.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._failing: Place | None = None  # where the caller was when another rank failed
        self._unanswered_s, self._counted_s = 0.0, time.monotonic()  # see `_note_silence`
        # Of the thread.
        self._open_client, self._beat_s = open_client, beat_s
        self._amount, self._still_s, self._notice_s = -1, 0.0, NOTICE_S  # how far the place is, since when
        self._seen: dict[int, tuple[bytes, float]] = {}  # the heartbeats of others, and the seconds since they changed
        self._thread = threading.Thread(target=self._run, name="lowmem_load-store", daemon=True)
        self._thread.start()

    def wait(self) -> Any:
        """Return the thread's answer to the caller's place; None if the store is broken."""
        self._wake_thread()
        while not self.broken:
            with contextlib.suppress(TimeoutError):
                return self.place.answer.result(self._beat_s)
            self._note_silence()
        return None

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        if self.place.title:
            self._note_silence()
            if self.broken or self._failing is self.place:
                raise StoppedError(peers.STOPPED)

    def leave(self, loop: Group, why: str) -> None:
        """Tell the other ranks that this one comes to no further step of a loop. Local; a finalizer may call it."""
        self._left.append((loop, why))
        self._wake_thread()

    def end(self) -> None:
        """End the thread."""
        self._break("is no longer used")
        self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been woken, and has not looked yet
            self._wake.release()

    def _note_silence(self) -> None:
        """Count the seconds in which the store has not answered, but only one beat of a longer time without a look.

        Then this process stood still, or C code kept the interpreter's lock, for which the thread waits, too.
        """
        now_s = time.monotonic()
        self._unanswered_s += min(now_s - self._counted_s, self._beat_s)
        self._counted_s = now_s
        if self._unanswered_s > self.limits.gone_s:
            if not self.broken:  # its text is equal on all ranks, so it does not have this
                calls = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))[-3:]  # noqa: SLF001
                where = ", ".join(f"{call.name} (line {call.lineno})" for call in calls)
                logger.warning("lowmem_load: rank %d gives up the store, which its thread asks in %s", self.rank, where)
            self._break(f"has not answered for {self.limits.gone_s:g} s ({peers.GONE})")

    def _break(self, what: str) -> None:
        self.broken = self.broken or f"the rendezvous store, which this rank or its launcher keeps, {what}"

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store = self._open_client()
            # Torch's own groups do not form in keys that are in use; and here are the verdicts of other steps.
            if self._store.add(f"used/{self.rank}", 1) > 1:
                self._break("has been used by an earlier group: give each a store of its own, or a prefix")
            told, next_beat_s, pause_s = None, 0.0, POLL_S
            while not self.broken:
                self._unanswered_s, place = 0.0, self.place
                if place is not told:
                    told, pause_s = place, POLL_S * max(1.0, len(place.group.members) / 16)
                    self._tell(place)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + self._beat_s
                    if place.title:
                        self._beat(place)
                if not place.answer.done() and (answer := self._answer(place)):
                    place.answer.set_result(answer)
                until_beat_s = max(0.0, next_beat_s - time.monotonic())
                self._wake.acquire(timeout=until_beat_s if place.answer.done() else min(pause_s, until_beat_s))
                while self._left:
                    loop, why = self._left.popleft()
                    self._decide(loop.key, Verdict([(self.rank, why)]))
                    self._note_read(loop, loop.key)
                pause_s *= POLL_GROWTH
        except Exception as error:  # noqa: BLE001  such as MemoryError: the caller must hear of it, and why
            text, _, _ = str(error).partition("\n")
            self._break(f"cannot be reached or used: {type(error).__name__}: {text}")

    def _tell(self, place: Place) -> None:
        """Write where the caller is now, and what it brings."""
        logger.debug("rank %d: at %s, %r: %s", self.rank, place.key, place.title, place.entry or "busy")
        self._still_s, self._notice_s = 0.0, NOTICE_S
        self._send_heartbeat(place)
        if place.entry and place.entry.error is not None:
            self._store.set(f"{place.group.name}/failed", place.key)

    def _send_heartbeat(self, place: Place, detail: str = "") -> Heartbeat:
        who, seconds = f"pid {os.getpid()} on {platform.node()}", round(time.monotonic() - place.since_s, 3)
        beat = Heartbeat(who, place.key, place.title, detail, seconds, place.entry)
        self._store.set(f"rank/{self.rank}", packed(beat))
        return beat

    def _beat(self, place: Place) -> None:
        """Send a heartbeat. Give up this rank if it is stuck, and note whether a step fails."""
        amount, detail = Progress(-1, "")
        if place.entry is None and place.progress and (report := place.progress()):
            with contextlib.suppress(Exception):  # of other code; the step itself goes on
                amount, detail = report()
        self._still_s, self._amount = 0.0 if amount != self._amount else self._still_s + self._beat_s, amount
        beat, groups = self._send_heartbeat(place, detail), place.groups()
        self._watch(place)
        is_busy = place.entry is None
        why = is_busy and self.limits.why_stuck(beat, self._still_s, is_measured=place.progress is not None)
        for group, title in groups.items():
            if why:  # with one title: some ranks may raise in an inner step, and some in an outer one
                self._decide(group.key, Verdict([(self.rank, why)], place.title))
            if not is_busy and group == place.group:
                continue
            # A verdict that comes before this rank's entry is a failure.
            if peek(self._store, group.key) or peek(self._store, f"{group.name}/failed") == group.key.encode():
                self._failing = place
                if not is_busy:  # the rank for which this one waits may wait for it in the outer step
                    self._decide(place.key, Verdict([(self.rank, f"stopped because {title} has failed")]))

    def _watch(self, place: Place) -> None:
        """Give up who is lost, and say who is absent."""
        leader, *followers = place.group.members
        others = self._heartbeats(followers if self.rank == leader else [leader], self._beat_s)
        waited_s, lost, steps = self._still_s if place.entry else 0.0, [], {place.key}
        for rank, other in others.items():
            if why := self.limits.why_lost(other, self._seen[rank][1], place.key, waited_s):
                lost.append((rank, why))
                steps |= {other.step} if other.entry else set()  # who waits elsewhere waits in vain
        for key in sorted(steps) if lost else ():  # in one order, so that the first rank's verdict is that of all steps
            lost = [*self._decide(key, Verdict(lost)).failures] or lost
        absent = {rank: other.last_seen for rank, other in others.items() if not other.is_at(place.key)}
        if absent and waited_s >= self._notice_s:
            self._notice_s *= 2
            seen = listed([f"rank {rank} {text}" for rank, text in absent.items()], MAX_SHOWN)
            whom = f"rank(s) {spell_ranks([*absent])} ({seen}); {peers.SAME_ORDER}"
            where = f"{waited_s:.0f} s at {place.title!r}"
            logger.warning("lowmem_load: rank %d has waited %s for %s", self.rank, where, whom)

    def _answer(self, place: Place) -> Any:
        """Return what the caller waits for; None if it is not there yet."""
        (leader, *followers), read = place.group.members, place.group.read
        if place.entry is None and (place.title or not read or time.monotonic() > place.since_s + FAREWELL_S):
            return True
        beats = self._heartbeats(followers) if self.rank == leader else {}
        here = {rank: beat for rank, beat in beats.items() if beat.is_at(place.key if place.entry else read[-1])}
        if place.entry is None:
            return all(self._seen[rank][1] > self.limits.gone_s for rank in here)
        entries = {leader: place.entry, **{rank: beat.entry for rank, beat in here.items() if beat.entry}}
        if not place.entry.title:
            verdict = self._decide(place.key, Verdict([(self.rank, place.entry.error or "")]))
        elif len(entries) == len(place.group.members):
            verdict = self._decide(place.key, peers.verdict_on(entries, place.title))
        elif content := peek(self._store, place.key):
            verdict = Verdict(*unpacked(content))
        else:
            return None
        self._note_read(place.group, place.key)
        return verdict

    def _note_read(self, group: Group, key: str) -> None:
        """Note that this rank needs a verdict no more. The leader deletes the oldest ones."""
        if self.rank == group.members[0]:
            group.read.append(key)
            if len(group.read) > KEPT:
                self._store.delete_key(group.read.pop(0))

    def _decide(self, key: str, verdict: Verdict) -> Verdict:
        """Write the verdict on a step, unless there is one; return the one that counts."""
        logger.debug("rank %d: verdict on %s: %s", self.rank, key, verdict.failures or "go on")
        return Verdict(*unpacked(self._store.compare_set(key, "", packed(verdict))))

    def _heartbeats(self, ranks: Sequence[int], seconds: float = 0.0) -> dict[int, Heartbeat]:
        """Return what ranks wrote last, so many seconds after the last time that counted."""
        for rank in ranks:
            if rank not in self._seen:  # multi_get waits for keys that are not there
                self._store.compare_set(f"rank/{rank}", "", packed(Heartbeat()))
                self._seen[rank] = b"", 0.0
        contents = self._store.multi_get([f"rank/{rank}" for rank in ranks]) if ranks else []
        for rank, content in zip(ranks, contents, strict=True):
            before, silent_s = self._seen[rank]
            self._seen[rank] = content, silent_s + seconds if content == before else 0.0
        return {rank: Heartbeat.read(self._seen[rank][0]) for rank in ranks}


def new_client(store: Any) -> Any:
    """Return another client of a store, for another thread."""
    client = store.clone()
    client.set_timeout(_NEVER)
    return dist.PrefixStore("lowmem_load", client)  # type: ignore[attr-defined]


def peek(store: Any, key: str) -> bytes:
    """Return the value of a key, empty if it is not there. `get` would wait for it."""
    value = bytes(store.compare_set(key, "-", "-"))
    return b"" if value == b"-" else value
