"""One rank's end of the agreement: a thread that writes what this rank does into the store, and reads the others.

The protocol is [Note: agreement] in `distributed/steps.py`. Keys: `rank/R` is the heartbeat of rank R, with its entry;
`GROUP/N` the verdict on step N of a group; `GROUP/failed` the last step in which a rank has failed before the verdict.

[Note: one thread] A call of the store may take for ever, and no signal interrupts it. So one thread makes all calls.
The caller only says where it is, and looks now and then whether the thread has answered. If the thread hangs in a call,
the caller goes on without it, and every later step of this process group fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowmem_load.distributed import peers
from lowmem_load.distributed.peers import Entry, Heartbeat, Limits, Peer, Progress, Verdict
from lowmem_load.errors import LowMemLoadError

logger = logging.getLogger(__name__)

BEAT_S, MIN_BEATS = 1.0, 5  # seconds between heartbeats; in how many of them the store must answer at least
POLL_S, POLL_GROWTH = 0.001, 1.05  # seconds before a waiting rank looks, for each 16 ranks; how later pauses grow
PART = 4 * 2**20  # characters of a value: torch's store ends a connection that sends 8 MiB (libuv backend, torch 2.13)
FAREWELL_S = 2.0  # seconds that the leader waits for who has to read its last verdict: the store may end with it

_NOTHING = "-"  # stands for the value of a key that is not there


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, as one of them sees it. The first one of its members is the leader."""

    channel: StoreChannel
    name: str  # unique among the groups of the store; prefix of its keys
    members: tuple[int, ...]  # as ranks in the world
    number: int = 0  # of the next step
    num_loops: int = 0
    read: list[str] = field(default_factory=list)  # of the leader: keys of verdicts, until all members have read them

    @property
    def key(self) -> str:
        """The key of the verdict on the next step."""
        return f"{self.name}/{self.number}"

    def loop(self) -> Group:
        """Return the same ranks for other steps, which each of them may leave. Call on all of them."""
        self.num_loops += 1
        return Group(self.channel, f"{self.key}.{self.num_loops}", self.members, read=self.read)

    @contextlib.contextmanager
    def doing(self, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        channel, outer = self.channel, self.channel.place
        try:
            channel.place = Place(self, title, progress and weakref.ref(progress), outer)
            logger.debug("rank %d: begins %r, of %s", channel.rank, title, self.key)
            if not outer.title:
                channel.wait()  # should this rank end at once, the others know that it had come
            yield
        finally:
            channel.place = replace(outer) if outer.title else Place(self)
            if not outer.title:
                channel.wait()

    def agree(self, entry: Entry, payload: str = "") -> tuple[Verdict, list[str]]:
        """Bring an entry to the next step; return the verdict, and the payloads of all ranks if one has any.

        Collective, within `doing`. An entry without a title fails the step, unless that is over, and waits for nobody.
        """
        channel, block = self.channel, self.channel.place
        logger.debug("rank %d: at step %s, %r: %s", channel.rank, self.key, entry.title, entry.error or "done")
        entry = entry._replace(num_parts=-(-len(payload) // PART))
        try:
            channel.place = replace(block, entry=entry, payload=payload)
            answer = channel.wait()
            if answer is not None:
                self._pass()
                self.number += 1
        finally:
            channel.place = replace(block)
        verdict, payloads = answer or (Verdict([(0, channel.broken)]), [])
        logger.debug("rank %d: %r is over: %s", channel.rank, entry.title, verdict.failures or "go on")
        return verdict, payloads

    def abort(self, why: str) -> None:
        """Say that this rank does not come to the next step. Local."""
        with self.doing("leaving"):
            while not self.agree(Entry("", why))[0].failures:
                pass  # that step ended well before this rank could say it

    def leave(self, why: str) -> None:
        """Say that this rank comes to no further step. It waits for nothing, as finalizers may call it."""
        self.channel.news.put((self.key, why))
        self._pass()

    def _pass(self) -> None:
        if self.channel.rank == self.members[0]:
            self.read.append(self.key)


@dataclass(eq=False, slots=True)
class Place:
    """What this rank does. Two threads use it, so it is not changed."""

    group: Group
    title: str = ""  # "" between loads
    progress: weakref.ref[Callable[[], Progress]] | None = None  # a thread that hangs must not keep what it refers to
    outer: Place | None = None  # the block around this one
    entry: Entry | None = None  # that this rank brings to the step; None while it is busy
    payload: str = ""
    key: str = field(init=False)  # of the verdict
    since_s: float = field(init=False, default_factory=time.monotonic)
    answer: Future[Any] = field(init=False, default_factory=Future)  # of the thread to the caller

    def __post_init__(self) -> None:
        self.key = self.group.key

    def groups(self) -> dict[Group, str]:
        """Return the groups of this block and of those around it, each with the title of a block."""
        return {self.group: self.title, **(self.outer.groups() if self.outer and self.outer.title else {})}


class StoreChannel:
    """Steps and heartbeats of one rank of the world. One thread at a time may use it, but for `check` and `leave`.

    Args:
        open_client: returns a client of the store for the channel's thread, in which it runs.
        rank: of this process in the world.
        limits: how long it waits.
        beat_s: seconds between heartbeats.
    """

    def __init__(
        self, open_client: Callable[[], Any], rank: int, limits: Limits | None = None, beat_s: float = BEAT_S
    ) -> None:
        self.rank, self.limits, self.broken = rank, limits or Limits(), ""  # what is wrong with the store
        self.place = Place(Group(self, "", (rank,)))  # where the caller is
        self._groups: dict[str, Group] = {}
        self._failing: Place | None = None  # where the caller was when another rank failed
        self.news = queue.SimpleQueue[tuple[str, str] | None]()  # wakes the thread; which step to fail, and why
        self._is_over = False
        self._unanswered_s, self._counted_s = 0.0, time.monotonic()  # see `_note_silence`
        # Of the thread.
        self._open_client, self._beat_s = open_client, beat_s
        self._store: Any = None
        self._told = self.place  # what stands in the store
        self._amount, self._still_s, self._notice_s = -1, 0.0, peers.NOTICE_S  # how far the place is, since when
        self._peers: dict[int, Peer] = {}
        self._thread = threading.Thread(target=self._run, name="lowmem_load-store", daemon=True)

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        return self._groups.setdefault(name, Group(self, name, members))

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        if self.place.title:
            self._note_silence()
            if self.broken or self._failing is self.place:
                raise StoppedError("stopped because another rank has failed")

    def end(self) -> None:
        """End the thread."""
        self._is_over = True
        self.news.put(None)

    def wait(self) -> Any:
        """Return the thread's answer to the caller's place; None if the store is broken."""
        if not self._thread.ident:
            self._thread.start()
        self.news.put(None)
        while not self.broken:
            with contextlib.suppress(TimeoutError):
                return self.place.answer.result(self._beat_s)
            self._note_silence()
        return None

    def _note_silence(self) -> None:
        """Count the seconds in which the store has not answered, but few of a time without a look.

        Then this process stood still, or C code held the interpreter's lock, for which the thread waits, too.
        """
        now_s = time.monotonic()
        self._unanswered_s += min(now_s - self._counted_s, self._beat_s)
        self._counted_s = now_s
        if self._unanswered_s > max(self.limits.gone_s, MIN_BEATS * self._beat_s):
            self._break(f"has not answered for {self.limits.gone_s:g} s ({peers.GONE})")

    def _break(self, what: str) -> None:
        self.broken = self.broken or f"the store of the process group, which this rank or its launcher holds, {what}"

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store = self._open_client()
            # Torch's own groups do not form in keys that are in use; and here are the verdicts of other steps.
            if self._store.add(f"used/{self.rank}", 1) > 1:
                return self._break("has been used by an earlier group: give each a store of its own, or a prefix")
            next_beat_s = pause_s = 0.0
            while not self.broken and not self._is_over:
                self._unanswered_s = 0.0
                place, is_due = self.place, time.monotonic() >= next_beat_s
                if place is not self._told:
                    pause_s = POLL_S * max(1.0, len(place.group.members) / 16)
                    self._tell(place)
                if is_due:
                    next_beat_s = time.monotonic() + self._beat_s
                    if place.title:
                        self._beat(place)
                if not place.answer.done() and (answer := self._answer(place)) is not None:
                    place.answer.set_result(answer)
                until_beat_s = max(0.0, next_beat_s - time.monotonic())
                with contextlib.suppress(queue.Empty):
                    left = self.news.get(timeout=until_beat_s if place.answer.done() else min(pause_s, until_beat_s))
                    if left is not None:
                        self._decide(left[0], Verdict([(self.rank, left[1])]))
                pause_s *= POLL_GROWTH
            if self.broken:  # the caller has gone on, and the store is back
                self._decide(self.place.key, Verdict([(self.rank, f"went on without the others: {self.broken}")]))
        except Exception as error:  # noqa: BLE001  such as MemoryError: the caller must hear of it, and why
            text, _, _ = str(error).partition("\n")
            self._break(f"cannot be reached or used: {type(error).__name__}: {text}")

    def _tell(self, place: Place) -> None:
        """Write where the caller is now, and what it brings."""
        self._told, self._still_s, self._notice_s = place, 0.0, peers.NOTICE_S
        self._write_parts(f"rank/{self.rank}", place.payload)
        self._send_heartbeat(place)
        if place.entry and place.entry.error is not None:
            self._store.set(f"{place.group.name}/failed", place.key)

    def _send_heartbeat(self, place: Place, detail: str = "") -> Heartbeat:
        who, seconds = f"pid {os.getpid()} on {platform.node()}", round(time.monotonic() - place.since_s, 3)
        beat = Heartbeat(who, place.key, place.title, detail, seconds, place.entry)
        self._store.set(f"rank/{self.rank}", json.dumps(beat))
        return beat

    def _beat(self, place: Place) -> None:
        """Send a heartbeat. Give up who is lost or stuck, note whether a step fails, and say who is absent."""
        progress, groups = None, place.groups()
        if place.entry is None and place.progress and (report := place.progress()):
            with contextlib.suppress(Exception):  # of other code; the step itself goes on
                progress = report()
        amount, detail = progress or (-1, "")
        self._still_s, self._amount = 0.0 if amount != self._amount else self._still_s + self._beat_s, amount
        beat = self._send_heartbeat(place, detail)
        leader, *followers = place.group.members
        others = self._read_heartbeats(followers if self.rank == leader else [leader], self._beat_s)
        lost = [
            (rank, why)
            for rank, peer in others.items()
            if (why := peer.why_lost(self.limits, place.key, self._still_s if place.entry else 0.0))
        ]
        if lost:
            waiting = [others[rank].beat for rank, _ in lost if others[rank].beat.entry]
            for key in {place.key, *(beat.step for beat in waiting)}:  # who waits elsewhere waits in vain
                self._decide(key, Verdict(lost))
        if place.entry is None:
            if why := self.limits.why_stuck(beat, self._still_s, is_measured=place.progress is not None):
                for group in groups:  # with one title: some ranks may raise in an inner step, and some in an outer one
                    self._decide(group.key, Verdict([(self.rank, why)], title=place.title))
            if any(self._fails(group) for group in groups):
                self._failing = place
            return
        # The rank for which this one waits in an inner step may wait for it in the outer one, which has failed.
        for group, title in groups.items():
            if group is not place.group and self._fails(group):
                self._decide(place.key, Verdict([(self.rank, f"stopped because {title} has failed")]))
        absent = {rank: peer.absence for rank, peer in others.items() if not peer.beat.is_at(place.key)}
        if absent and self._still_s >= self._notice_s:
            self._notice_s *= 2
            peers.say_who_is_absent(self.rank, self._still_s, f"at {place.title!r}", absent)

    def _answer(self, place: Place) -> Any:
        """Return what the caller waits for; None if it is not there yet."""
        if place.entry is not None:
            if not (content := self._look(place, place.entry)):
                return None
            verdict = Verdict(*json.loads(content))
            return verdict, json.loads(self._read_parts(f"{place.group.name}/payloads", verdict.num_parts) or "[]")
        leader, *followers = place.group.members
        if place.title or self.rank != leader or time.monotonic() > place.since_s + FAREWELL_S:
            return True
        last = place.group.read[-1] if place.group.read else ""  # do all know it?
        return None if any(peer.beat.is_at(last) for peer in self._read_heartbeats(followers).values()) else True

    def _look(self, place: Place, entry: Entry) -> str:
        """Return the verdict on the step, which this rank writes if it can; "" if there is none."""
        if not entry.title:
            return self._decide(place.key, Verdict([(self.rank, entry.error or "")]))
        leader, *followers = place.group.members
        if self.rank == leader:
            beats = {rank: peer.beat for rank, peer in self._read_heartbeats(followers).items()}
            entries = {rank: beat.entry for rank, beat in beats.items() if beat.entry and beat.is_at(place.key)}
            if len(entries) == len(followers):  # all have read the verdicts before
                for key in place.group.read:
                    self._store.delete_key(key)
                place.group.read.clear()
                entries = {leader: entry, **entries}
                verdict = peers.verdict_on(entries)
                if any(each.num_parts for each in entries.values()) and not verdict.failures and not verdict.differs:
                    payloads = [self._read_parts(f"rank/{rank}", each.num_parts) for rank, each in entries.items()]
                    num_parts = self._write_parts(f"{place.group.name}/payloads", json.dumps(payloads))
                    verdict = verdict._replace(num_parts=num_parts)
                return self._decide(place.key, verdict._replace(title=place.title))
        return peek(self._store, place.key)

    def _fails(self, group: Group) -> bool:
        """Return whether a step of a group fails to which this rank has yet to bring its entry."""
        key = group.key
        return peek(self._store, key) != "" or peek(self._store, f"{group.name}/failed") == key

    def _decide(self, key: str, verdict: Verdict) -> str:
        """Write the verdict on a step, unless there is one; return the one that counts."""
        logger.debug("rank %d: verdict on %s: %s", self.rank, key, verdict.failures or "go on")
        return str(self._store.compare_set(key, "", json.dumps(verdict)).decode())

    def _read_heartbeats(self, ranks: Sequence[int], seconds: float = 0.0) -> dict[int, Peer]:
        """Read what ranks wrote last, so many seconds after the last time that counted."""
        for rank in ranks:
            if rank not in self._peers:  # multi_get waits for keys that are not there
                self._store.compare_set(f"rank/{rank}", "", _NOTHING)
                self._peers[rank] = Peer()
        contents = self._store.multi_get([f"rank/{rank}" for rank in ranks]) if ranks else []
        for rank, content in zip(ranks, contents, strict=True):
            if content.decode() != _NOTHING:
                self._peers[rank].note(content.decode(), seconds)
        return {rank: self._peers[rank] for rank in ranks}

    def _write_parts(self, key: str, text: str) -> int:
        """Write a text of any length; return the number of its parts. Parts are read before they are written again."""
        starts = range(0, len(text), PART)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", text[start : start + PART])
        return len(starts)

    def _read_parts(self, key: str, num_parts: int) -> str:
        parts = self._store.multi_get([f"{key}/{number}" for number in range(num_parts)]) if num_parts else []
        self._unanswered_s = 0.0  # other parts may follow
        return "".join(part.decode() for part in parts)


def peek(store: Any, key: str) -> str:
    """Return the value of a key, "" if it is not there. `get` would wait for it."""
    value = str(store.compare_set(key, _NOTHING, _NOTHING).decode())
    return "" if value == _NOTHING else value


def look_into(host: str, port: int, looks_s: float = 3 * BEAT_S) -> list[dict[str, Any]]:
    """Return what the ranks of a job do, by the store in which their process groups meet: a row for each rank."""
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise LowMemLoadError(f"no store of torch.distributed answers at {host}:{port}") from error
    if not hasattr(store, "list_keys"):
        raise LowMemLoadError("this release of torch cannot list the keys of a store; 2.13 can")
    found = [re.fullmatch(r"(.*lowmem_load/.*?)/?rank/(\d+)", key) for key in store.list_keys()]
    before = {match: store.get(match[0]).decode() for match in found if match}
    time.sleep(looks_s)
    rows = []
    for match, content in sorted(before.items(), key=lambda item: (item[0][1], int(item[0][2]))):
        now = store.get(match[0]).decode()
        if now != _NOTHING:
            beat = Heartbeat.decoded(now)
            place = {"prefix": match[1], "rank": int(match[2]), "silent": bool(beat.title) and now == content}
            rows.append({**place, "does": beat.doing, **beat._asdict()})
    return rows
