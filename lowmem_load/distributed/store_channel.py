"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers.
- Each rank has one key in the store: its heartbeat. It says in which step the rank is and how far. When the rank has
  done its part, the heartbeat holds its entry, too.
- Each step has one key: its verdict. compare_set writes it, so the first one counts. The leader, the group's first
  rank, writes it when it has read all entries. Who finds a rank lost, or no longer waits, writes that.
- The leader watches the heartbeats of all ranks, the others that of the leader and the verdict. Heartbeats name the
  ranks that failed, so that busy ranks stop.
- A rank that does not come to its next step writes the verdict on it, and passes it. A rank that went on without a
  verdict, since the store was silent, does so when it is back. So all ranks are in line, and a load that failed may be
  tried again.

[Note: threads] A call of the store may take for ever, and no signal interrupts it. So a thread makes the calls, and who
asks waits in short waits. A second thread writes and reads heartbeats. It hears from the caller by `_state`, the caller
hears from it by `_news`: both are replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowmem_load.distributed.absence import NOTICE_S, absent_text, say_who_is_absent
from lowmem_load.distributed.heartbeat import GONE, Heartbeat, Limits, Peer, Progress
from lowmem_load.distributed.nodes import pid_space, start_time
from lowmem_load.distributed.verdict import Entry, Verdict, spell_ranks, verdict_on

BEAT_S = 1.0
"""Seconds between heartbeats."""

POLL_S, POLL_SHARE, RANKS_PER_POLL = 0.001, 0.05, 16
"""Seconds between a waiting rank's first looks, for so many ranks; later ones are this share of the time waited."""

NUM_ASKED = 64
"""Ranks that a rank looks for while the leader has not come: each waiting rank looks by itself."""

NUM_MISSED = 3
"""A rank that has missed more heartbeats than this in a row, because it was stopped, may have been given up."""

NUM_LOOKS = 5
"""Looks, a heartbeat apart, that must see no answer of a silent store: threads wait for the interpreter's lock, too."""

PART = 4 * 2**20
"""Characters of a value at most: torch's store closes a connection that sends 8 MiB (libuv backend, torch 2.13)."""

FAREWELL_S = 5.0
"""Seconds that the leader waits at most until all ranks have read its last verdict: the store may end with it."""

_STORE_ERRORS = RuntimeError, OSError
"""What a store raises, and this module for it. Source: torch 2.13 `torch/csrc/distributed/c10d/exception.cpp`."""

_NOTHING = "-"
"""Stands for the value of a key that is not there."""


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, and how far this rank is in its steps. The first one of its members is the leader."""

    name: str  # unique in the store
    members: tuple[int, ...]  # as ranks in the world
    number: int = 0  # of the next step
    unsaid: Verdict | None = None  # on that step, which this rank does not come to; not in the store yet
    old_keys: list[str] = field(default_factory=list)  # of steps that are over; the leader deletes them
    unread: Sequence[int] = ()  # ranks that may not have read the leader's last verdict yet

    def key(self, what: str) -> str:
        """Return a key of the group's next step."""
        return f"{self.name}/{self.number}/{what}"


class _State(NamedTuple):
    """What this rank does, for its heartbeats."""

    group: Group
    number: int
    title: str = ""
    progress: Callable[[], Progress] | None = None
    entry: Entry | None = None


class _News(NamedTuple):
    """What the heartbeats say of a step."""

    group: str = ""
    number: int = -1
    failed: Sequence[int] = ()  # ranks
    lost: Sequence[tuple[int, str]] = ()  # ranks that this one gives up, and why
    broken: str = ""  # what is wrong with the store
    has_verdict: bool = False  # whether there is one on the step
    absent: Mapping[int, str] = {}  # ranks that are not in the step, and what is known of each
    heard: str = ""  # what the leader says of these


class _Client:
    """Calls of the store, made in a thread; see [Note: threads]."""

    def __init__(self, open_client: Callable[[], Any]) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, Sequence[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(open_client,), name="lowmem_load-store", daemon=True).start()

    def submit(self, call: str, *arguments: Any) -> Future[Any]:
        """Make a call after all earlier ones."""
        self._calls.put((future := Future[Any](), call, arguments))
        return future

    def end(self) -> None:
        """End the thread after all calls."""
        self._calls.put(None)

    def _run(self, open_client: Callable[[], Any]) -> None:
        store = None
        while item := self._calls.get():
            future, call, arguments = item
            if future.set_running_or_notify_cancel():
                try:
                    store = store or open_client()
                    future.set_result(getattr(store, call)(*arguments))
                except Exception as error:  # noqa: BLE001  who asked raises it
                    future.set_exception(error)


class StoreChannel:
    """Steps and heartbeats of one rank of the world. One thread at a time may use it, but for `check`."""

    def __init__(self, open_client: Callable[[], Any], rank: int, beat_s: float = BEAT_S) -> None:
        self.pid, self.limits = os.getpid(), Limits()
        self._open_client, self._rank, self._beat_s = open_client, rank, beat_s
        self._process = pid_space(), self.pid, start_time(self.pid) or "", platform.node()
        self._client: _Client | None = None
        self._groups: dict[str, Group] = {}
        self._caller = 0  # the thread of the last step
        self._doing: list[tuple[Group, str, Callable[[], Progress] | None]] = []
        self._state = _State(Group("", ()), 0)
        self._news = _News()
        self._absent = ""  # for whom this rank waits
        self._lock = threading.Lock()  # for the heartbeats of this rank and of the others
        self._num_beats = int(time.monotonic() * 1000)  # more than an earlier channel of this process has written
        self._peers: dict[int, Peer] = {}
        self._clock_s = 0.0  # stands still while this process is stopped
        self._beaten_s = self._decides_s = 0.0  # see `_may_decide`

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        return self._groups.setdefault(name, Group(name, members))

    def end(self) -> None:
        """End the thread that makes the calls."""
        if self._client is not None:
            self._client.end()

    @contextlib.contextmanager
    def doing(self, group: Group, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        depth, closing = len(self._doing), threading.Event()
        thread = threading.Thread(
            target=self._send_heartbeats, args=(closing,), name="lowmem_load-heartbeat", daemon=True
        )
        try:
            self._doing.append((group, title, progress))
            self._note_state()
            if not depth:
                self._news, self._beaten_s = _News(), time.monotonic()
                self._client = self._client or _Client(self._open_client)
                thread.start()
            yield
        finally:
            del self._doing[depth:]
            self._note_state()
            if thread.ident:
                self._close(closing, thread)

    def agree(self, group: Group, entry: Entry) -> Verdict:
        """Bring an entry to the group's next step; return the verdict. Collective; within `doing`."""
        self._caller = threading.get_ident()
        try:
            self._pass(group)
            while True:
                verdict = self._verdict(group, entry)
                group.number += 1
                self._look_at(group.members[0])
                if not verdict.passes_over(self._rank, entry.full_title):
                    return verdict._replace(title=verdict.title or entry.full_title)
        except _STORE_ERRORS as error:
            return Verdict(entry.full_title, [(0, self._go_on(group, error))])
        except BaseException as interrupt:
            self.abort(group, f"was interrupted while it waited for the other ranks: {type(interrupt).__name__}")
            raise
        finally:
            self._note_state()

    def abort(self, group: Group, why: str, title: str = "") -> None:
        """Say that this rank does not come to the group's next step, or only to none of this title. Local."""
        group.unsaid = Verdict(title, [(self._rank, why)], may_be_skipped=bool(title))
        with self.doing(group, ""), contextlib.suppress(*_STORE_ERRORS):  # then it is said later
            self._pass(group)

    def leave(self, group: Group, number: int, title: str, why: str) -> None:
        """Say that this rank does not come to step `number`, which has this title. Local; for finalizers.

        They may run at any time, in any thread. So nothing is said if the group is past that step, or if another one
        may be under way: then that one will end with an error, as the ranks are not at the same one.
        """
        if (group.number, self._caller) == (number, threading.get_ident()) and not (self._doing or sys.is_finalizing()):
            self.abort(group, why, title)

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        news = self._news
        if self._doing and (news.broken or (news.failed and self._is_current(news))):
            raise StoppedError(f"stopped because of rank(s) {spell_ranks(sorted(news.failed))}")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _verdict(self, group: Group, entry: Entry) -> Verdict:
        start_s = time.monotonic()
        self._note_state(entry)
        self._send_heartbeat()
        is_leader = self._rank == group.members[0]
        while True:
            # A look right behind the entry comes too early: the leader has yet to read it.
            self._pause(group, start_s)
            if is_leader:
                awaited = [rank for rank in group.members[1:] if self._entry_of(rank, group) is None]
                self._read_heartbeats(awaited)
                found = {rank: self._entry_of(rank, group) for rank in group.members[1:]}
                entries = {self._rank: entry} | {rank: each for rank, each in found.items() if each is not None}
                if len(entries) == len(group.members) and self._may_decide():
                    return self._decide(group, verdict_on(entries))
            if self._news.broken:
                raise ConnectionError(self._news.broken)
            news = self._news if self._is_current(self._news) else _News()
            may_be_there = not is_leader or news.failed or news.has_verdict
            if may_be_there and (content := self._peek(group.key("verdict"))) != _NOTHING:
                return self._decoded(group, content)
            if news.lost:
                lost = Verdict(entry.full_title, news.lost, may_be_skipped=self.limits.is_prompt)
                return self._decide(group, lost)

    def _look_at(self, leader: int) -> None:
        """Find the leader's process, once: if it ends soon, all ranks say so, and not some that the store is gone."""
        if leader != self._rank and leader not in self._peers:
            self._peers[leader] = Peer()  # it has written a heartbeat
            with contextlib.suppress(*_STORE_ERRORS):  # the step is over
                self._read_heartbeats([leader])

    def _pause(self, group: Group, start_s: float) -> None:
        first_s = POLL_S * max(1.0, len(group.members) / RANKS_PER_POLL)
        time.sleep(min(self._beat_s, max(first_s, POLL_SHARE * (time.monotonic() - start_s))))

    def _may_decide(self) -> bool:
        """Return whether the others know that this rank is there: not if it was stopped, until they could say so."""
        now_s = time.monotonic()
        return now_s >= self._decides_s and now_s - self._beaten_s <= NUM_MISSED * self._beat_s

    def _entry_of(self, rank: int, group: Group) -> Entry | None:
        beat = self._peers.get(rank, Peer()).seen_in(group.name, group.number)
        return beat and beat.entry

    def _decide(self, group: Group, verdict: Verdict) -> Verdict:
        """Write the verdict on the group's step, unless there is one; return the one that is there."""
        text = json.dumps(verdict.payloads) if verdict.payloads else ""
        parts = [group.key(f"payloads/{start // PART}") for start in range(0, len(text), PART)]
        for place, key in enumerate(parts):
            self._ask("set", key, text[place * PART : (place + 1) * PART])
        content = verdict.encoded(parts)
        found = self._ask("compare_set", group.key("verdict"), "", content)
        while found == content and verdict.is_complete and group.old_keys:  # all ranks are past the steps before
            self._submit("delete_key", group.old_keys.pop())
        group.old_keys += parts
        if found != content:
            return self._decoded(group, found)
        self._note_verdict(group, verdict)
        return verdict

    def _decoded(self, group: Group, content: str) -> Verdict:
        verdict, parts = Verdict.decoded(content)
        self._note_verdict(group, verdict)
        payloads = json.loads("".join(map(self._peek, parts))) if parts else ()
        return verdict._replace(payloads=payloads)

    def _note_verdict(self, group: Group, verdict: Verdict) -> None:
        if self._rank == group.members[0]:
            lost = {} if verdict.is_complete else dict(verdict.failures)
            group.unread = [rank for rank in group.members[1:] if rank not in lost]
            group.old_keys.append(group.key("verdict"))

    def _pass(self, group: Group) -> None:
        """Pass the step that this rank does not come to, and those before it that ended without it."""
        while group.unsaid is not None:
            verdict = self._decide(group, group.unsaid)
            is_known = verdict.failures and not verdict.passes_over(self._rank, group.unsaid.title)
            if is_known or verdict == group.unsaid:
                group.unsaid = None
            group.number += 1

    def _go_on(self, group: Group, error: Exception) -> str:
        """Leave a store that does not answer; return what is wrong with it."""
        broken = self._news.broken or self._broken(error)
        self._news = _News(failed=[0], broken=broken)
        group.unsaid = Verdict("", [(self._rank, f"went on without the others: {broken}")])
        if self._client is not None:  # this is written when the store answers again
            self._client.submit("compare_set", group.key("verdict"), "", group.unsaid.encoded())
            self._client.end()
            self._client = None
        return broken

    def _broken(self, error: Exception) -> str:
        ended, until_s = "", time.monotonic() + 0.5
        while not ended and time.monotonic() < until_s:  # a killed process closes its connections before it ends
            ended = self._peers.get(0, Peer()).why_ended()
            time.sleep(0.01)
        text = str(error).partition("\n")[0]
        what = text if isinstance(error, TimeoutError) else f"cannot be reached: {text}"
        return ended or f"the store of the process group, which this rank or its launcher holds, {what}"

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def _note_state(self, entry: Entry | None = None) -> None:
        group, title, progress = self._doing[-1] if self._doing else (self._state.group, "", None)
        self._state = _State(group, group.number, title, progress, entry)

    def _is_current(self, news: _News) -> bool:
        return (news.group, news.number) == (self._state.group.name, self._state.number)

    def _send_heartbeats(self, closing: threading.Event) -> None:
        """Run in a thread until `closing` is set or the store does not answer."""
        state, since_s, notice_s, self._absent = self._state, self._clock_s, NOTICE_S, ""
        try:
            self._send_heartbeat()
            while not closing.wait(self._beat_s) and not self._news.broken:
                now_s = time.monotonic()
                self._clock_s += min(now_s - self._beaten_s, 2 * self._beat_s)
                if now_s - self._beaten_s > NUM_MISSED * self._beat_s:
                    self._decides_s = now_s + self._beat_s
                self._beaten_s = now_s
                if state is not self._state:
                    state, since_s, notice_s, self._absent = self._state, self._clock_s, NOTICE_S, ""
                self._send_heartbeat()
                waited_s = None if state.entry is None else self._clock_s - since_s
                news = self._watched(state, waited_s)
                tells = set(news.failed) - set(self._news.failed)
                self._news = news._replace(broken=self._news.broken)
                if tells:
                    self._send_heartbeat()
                if waited_s is not None and waited_s >= notice_s and (absent := absent_text(news.absent) or news.heard):
                    self._absent, notice_s = absent, 2 * notice_s
                    say_who_is_absent(self._rank, waited_s, f"at {state.title!r}", absent)
        except _STORE_ERRORS as error:
            if not closing.is_set() and not self._news.broken:
                self._news = _News(failed=[0], broken=self._broken(error))

    def _watched(self, state: _State, waited_s: float | None) -> _News:
        """Return what the heartbeats of the others, and the verdict, say of this rank's step."""
        group, place = state.group, (state.group.name, state.number)
        is_leader = self._rank == group.members[0]
        watched = group.members[1:] if is_leader else group.members[:1]
        self._read_heartbeats(watched)
        if not is_leader and (waited_s or 0.0) >= NOTICE_S and self._peers[watched[0]].absence(*place):
            watched = tuple(rank for rank in group.members[:NUM_ASKED] if rank != self._rank)
            self._read_heartbeats(watched)
        content = self._peek(f"{group.name}/{state.number}/verdict")  # there if the others went on without this rank
        verdict = Verdict() if content == _NOTHING else Verdict.decoded(content)[0]
        failed = set() if verdict.passes_over(self._rank, state.title) else {rank for rank, _ in verdict.failures}
        peers = {rank: self._peers[rank] for rank in watched}
        found = {rank: each.why_lost(self.limits, group.name, self._clock_s, waited_s) for rank, each in peers.items()}
        lost = [(rank, why) for rank, why in found.items() if why]
        beats = [beat for peer in peers.values() if (beat := peer.seen_in(*place)) is not None]
        failed |= {rank for beat in beats for rank in beat.failed} | dict(lost).keys()
        absent = {rank: text for rank, peer in peers.items() if (text := peer.absence(*place))}
        heard = next((beat.absent for beat in beats if not is_leader), "")
        return _News(*place, [*failed], lost, has_verdict=content != _NOTHING, absent=absent, heard=heard)

    def _send_heartbeat(self) -> None:
        state = self._state
        at = None
        if state.progress is not None:
            with contextlib.suppress(Exception):  # of other code; the step itself goes on
                at = state.progress()
        detail, amount = ("", None) if at is None else (at.detail, at.amount)
        failed = set(self._news.failed) if self._is_current(self._news) else set()
        if state.entry is not None and state.entry.error is not None and not state.entry.is_stopped:
            failed |= {self._rank}
        with self._lock:
            if state is not self._state:
                return  # the caller's thread sends a later one
            self._num_beats += 1
            place = state.group.name, state.number
            beat = Heartbeat(
                *(self._num_beats, state.title, detail, amount, *place, state.entry, [*failed]),
                *(*self._process, self._absent),
            )
            sent = self._submit("set", _key(self._rank), json.dumps(beat))
        self._answer(sent)

    def _read_heartbeats(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank not in self._peers:  # multi_get waits for keys that are not there
                self._ask("compare_set", _key(rank), "", _NOTHING)
                self._peers.setdefault(rank, Peer())
        if len(ranks) > 1:
            found = self._ask("multi_get", [*map(_key, ranks)])
        else:  # one round trip instead of two
            found = [self._peek(_key(rank)) for rank in ranks]
        beats = {rank: Heartbeat.decoded(text) for rank, text in zip(ranks, found, strict=True) if text != _NOTHING}
        with self._lock:
            for rank, beat in beats.items():
                self._peers[rank].note(beat, self._clock_s)

    def _close(self, closing: threading.Event, thread: threading.Thread) -> None:
        closing.set()
        start_s = time.monotonic()
        with contextlib.suppress(*_STORE_ERRORS):  # the store is gone; the other ranks will have noticed
            for group in self._groups.values():
                while group.unread and time.monotonic() < start_s + FAREWELL_S:
                    self._read_heartbeats(group.unread)
                    group.unread = [rank for rank in group.unread if self._may_read(group, self._peers[rank])]
                    if group.unread:
                        self._pause(group, start_s)
            self._send_heartbeat()
        thread.join(2 * self._beat_s)
        if self._news.broken and self._client is not None:
            self._client.end()
            self._client = None  # the next session connects anew

    def _may_read(self, group: Group, peer: Peer) -> bool:
        """Return whether a rank still has to read the last verdict, and can: several may be lost, and one be named."""
        beat = peer.seen_in(group.name, group.number - 1)
        return beat is not None and bool(beat.title) and peer.silent_s(self._clock_s) <= self.limits.gone_s

    # -- the store -----------------------------------------------------------------------------------------------------

    def _submit(self, call: str, *arguments: Any) -> Future[Any]:
        if self._client is None or self._news.broken:
            raise ConnectionError(self._news.broken)
        return self._client.submit(call, *arguments)

    def _peek(self, key: str) -> str:
        """Return the value of a key, or _NOTHING. `get` would wait for it."""
        return str(self._ask("compare_set", key, _NOTHING, _NOTHING))

    def _ask(self, call: str, *arguments: Any) -> Any:
        answer = self._answer(self._submit(call, *arguments))
        return [each.decode() for each in answer] if isinstance(answer, list) else answer and answer.decode()

    def _answer(self, asked: Future[Any]) -> Any:
        for _ in range(max(NUM_LOOKS, math.ceil(self.limits.gone_s / self._beat_s))):
            if wait([asked], self._beat_s).done:
                return asked.result()
        asked.cancel()
        raise TimeoutError(f"has not answered for {self.limits.gone_s:g} s ({GONE})")


def _key(rank: int) -> str:
    return f"rank/{rank}"
