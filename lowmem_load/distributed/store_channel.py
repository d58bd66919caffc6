"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers.
- Each rank has one key in the store: its heartbeat. It says in which step the rank is and how far. When the rank has
  done its part, the heartbeat holds its entry, too.
- Each step has one key: its verdict. compare_set writes it, so the first one counts. The leader, the group's first
  rank, writes it when it has read all entries. Who gives up another rank, or does not come to the step, writes that.
- The leader watches the heartbeats of all ranks, the others that of the leader. All look for the verdict, and for the
  key that a rank writes when it fails: then busy ranks stop.
- With its verdict a step is over, and all ranks go on to the next number. So a load that failed may be tried again.

[Note: one thread] A call of the store may take for ever, and no signal interrupts it. So one thread makes all calls.
The caller sends it a `_Position` for each thing that it does, and waits for answers in short waits. If the thread does
not come back from a call, the caller goes on without it, and the next load starts another one.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import platform
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowmem_load.distributed.absence import NOTICE_S, absent_text, say_who_is_absent
from lowmem_load.distributed.heartbeat import GONE, Heartbeat, Limits, Peer, Progress
from lowmem_load.distributed.verdict import Entry, Verdict, verdict_on

BEAT_S, MIN_BEATS = 1.0, 5
"""Seconds between heartbeats, and heartbeats in which a store must answer at least."""

POLL_S, POLL_SHARE, RANKS_PER_POLL = 0.001, 0.05, 16
"""Seconds between a waiting rank's first looks, for so many ranks; later ones are this share of the time waited."""

MAX_NAMED = 64
"""Ranks that each waiting rank looks for to say for whom it waits; the leader looks for all."""

SHORT, PART = 2**16, 4 * 2**20
"""Characters of a text that goes with others, and of a value: torch's store closes a connection that sends 8 MiB (libuv
backend, torch 2.13)."""

FAREWELL_S = 2.0
"""Seconds that the leader waits for ranks without heartbeats that have to read its last verdict: the store may end with
it."""

_NOTHING = "-"
"""Stands for the value of a key that is not there."""


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, and the number of this rank's next step. The first one of its members is the leader."""

    name: str  # unique in the store
    members: tuple[int, ...]  # as ranks in the world
    number: int = 0


class _Position(NamedTuple):
    """What the caller does. Compared by identity."""

    group: str
    members: tuple[int, ...]
    number: int
    title: str = ""  # "" between loads
    progress: weakref.ref[Callable[[], Progress]] | None = None  # a thread that hangs must not keep what it refers to
    entry: Entry | None = None
    leaves: bool = False  # whether this rank does not wait for the others, and fails the step
    is_prompt: bool = False  # see `RankGroup.step`

    def key(self, what: object) -> str:
        """Return a key of the step."""
        return f"{self.group}/{self.number}/{what}"


class StoreChannel:
    """Steps and heartbeats of one rank of the world. One thread at a time may use it, but for `check`."""

    def __init__(
        self, open_client: Callable[[], Any], rank: int, limits: Limits | None = None, beat_s: float = BEAT_S
    ) -> None:
        self._new_worker = functools.partial(_Worker, open_client, rank, limits or Limits(), beat_s)
        self._worker = self._new_worker()
        self._groups: dict[str, Group] = {}
        self._group = Group("", (rank,))  # of the outermost block
        self._caller = 0  # the thread of the last step
        self._doing: list[tuple[Group, str, Callable[[], Progress] | None]] = []
        self._position: _Position | None = None

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        return self._groups.setdefault(name, Group(name, members))

    def end(self) -> None:
        """End the thread."""
        self._worker.moves.put(None)

    @contextlib.contextmanager
    def doing(self, group: Group, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        depth = len(self._doing)
        if not depth:
            self._group = group
            if not self._worker.thread.ident:
                self._worker.thread.start()
        try:
            self._doing.append((group, title, progress))
            here = self._move()
            if not depth:
                self._worker.answer(here)  # should this rank end at once, the others know that it had come
            yield
        finally:
            del self._doing[depth:]
            here = self._move()
            if not depth:
                self._worker.answer(here)
                if self._worker.broken:
                    self._worker = self._new_worker()

    def agree(self, group: Group, entry: Entry, *, leaves: bool = False, is_prompt: bool = False) -> Verdict:
        """Bring an entry to the group's next step; return the verdict. Collective; within `doing`."""
        self._caller = threading.get_ident()
        try:
            verdict = self._worker.answer(self._move(entry, leaves, is_prompt))
            group.number += 1
            self._move()
        except BaseException as interrupt:
            if not leaves:
                self.abort(group, f"was interrupted while it waited for the other ranks: {type(interrupt).__name__}")
            raise
        return verdict._replace(title=verdict.title or entry.full_title)

    def abort(self, group: Group, why: str) -> None:
        """Say that this rank does not come to the group's next step. Local."""
        with self.doing(group, "leaving"):
            while not self.agree(group, Entry("", error=why), leaves=True).failures:
                pass  # that step ended well before this rank could say it

    def leave(self, group: Group, number: int, why: str) -> None:
        """Say that this rank does not come to step `number`. Local; for finalizers.

        They may run at any time, in any thread. So nothing is said if the group is past that step, or if another one
        may be under way: then that one will end with an error, as the ranks are not at the same one.
        """
        if (group.number, self._caller) == (number, threading.get_ident()) and not (self._doing or sys.is_finalizing()):
            self.abort(group, why)

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        if self._doing:
            self._worker.note_silence()
            if self._worker.broken or self._worker.failing is self._position:
                raise StoppedError("stopped because another rank has failed")

    def _move(self, entry: Entry | None = None, leaves: bool = False, is_prompt: bool = False) -> _Position:
        group, title, progress = self._doing[-1] if self._doing else (self._group, "", None)
        place = group.name, group.members, group.number
        self._position = _Position(*place, title, progress and weakref.ref(progress), entry, leaves, is_prompt)
        self._worker.moves.put(self._position)
        return self._position


class _Worker:
    """The thread that makes all calls of the store; see [Note: one thread]."""

    def __init__(self, open_client: Callable[[], Any], rank: int, limits: Limits, beat_s: float) -> None:
        self.moves: queue.SimpleQueue[_Position | None] = queue.SimpleQueue()
        self.broken = ""  # what is wrong with the store
        self.failing: _Position | None = None  # where this rank was when it heard that the step fails
        self._answers: queue.SimpleQueue[tuple[_Position | None, Verdict]] = queue.SimpleQueue()
        self._unanswered_s, self._counted_s = 0.0, time.monotonic()  # see `note_silence`
        self._open_client, self._rank, self._limits, self._beat_s = open_client, rank, limits, beat_s
        self._who = f"pid {os.getpid()} on {platform.node()}"
        self._num_beats = int(time.monotonic() * 1000)  # more than an earlier thread of this process has written
        self._peers: dict[int, Peer] = {}
        self._old_keys = collections.defaultdict[str, set[str]](set)  # of steps that are over, by group
        self._clock_s, self._last_s = 0.0, time.monotonic()  # a clock that stands still while this process is stopped
        self._begun_s = self._beaten_s = self._notice_s = self._decides_s = 0.0
        self._here = _Position("", (), 0)  # where this rank is
        self._entry: Entry | None = None  # of the position, as it lies in the store
        self._is_answered = False
        self.thread = threading.Thread(target=self._run, name="lowmem_load-store", daemon=True)

    # -- called by the caller ------------------------------------------------------------------------------------------

    def answer(self, here: _Position) -> Verdict:
        """Return the verdict on a position's step, an empty one where it has no entry; or one on a broken store."""
        while True:
            with contextlib.suppress(queue.Empty):
                position, verdict = self._answers.get(timeout=0.0 if self.broken else self._beat_s)
                if position is here:
                    return verdict
            self.note_silence()
            if self.broken:
                return Verdict("", [(0, self.broken)])

    def note_silence(self) -> None:
        """Count the seconds in which the store has not answered, but few of a time without a look.

        Then this process stood still, or C code held the interpreter's lock, for which the thread waits, too.
        """
        now_s = time.monotonic()
        self._unanswered_s += min(now_s - self._counted_s, self._beat_s)
        self._counted_s = now_s
        if self._unanswered_s > max(self._limits.gone_s, MIN_BEATS * self._beat_s):
            self._break(f"has not answered for {self._limits.gone_s:g} s ({GONE})")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store = self._open_client()
            here, is_new = self.moves.get(), True
            self._last_s = time.monotonic()
            while here is not None:
                pause_s = self._follow(here, is_new=is_new)
                try:
                    here, is_new = self.moves.get(timeout=pause_s), True
                except queue.Empty:
                    is_new = False
                if pause_s is None:  # there was nothing to do
                    self._last_s = time.monotonic()
        except (RuntimeError, OSError) as error:  # Source: torch 2.13 `torch/csrc/distributed/c10d/exception.cpp`
            text, _, _ = str(error).partition("\n")
            self._break(f"cannot be reached: {text}")
        except Exception as error:  # noqa: BLE001  such as MemoryError: the caller must hear of it, and why
            self._break(f"could not be used by this rank: {error!r}")

    def _break(self, what: str) -> None:
        self.broken = self.broken or f"the store of the process group, which this rank or its launcher holds, {what}"
        self._answers.put((None, Verdict("")))

    def _follow(self, here: _Position, *, is_new: bool) -> float | None:
        """Do what the position asks for; return after how many seconds to do it again, None for never."""
        now_s = time.monotonic()
        if now_s - self._last_s > MIN_BEATS * self._beat_s:
            self._decides_s = now_s + 2 * self._beat_s  # the others may have given up this process while it stood still
        self._clock_s += min(now_s - self._last_s, 2 * self._beat_s)
        self._last_s, self._here = now_s, here
        is_due = now_s >= self._beaten_s + self._beat_s
        if is_new:
            self._begun_s, self._notice_s, self._is_answered = self._clock_s, NOTICE_S, False
            self._entry = None  # so that no heartbeat takes an earlier entry for one of this step
            if here.entry:
                payload = self._put(here.key(self._rank), here.entry.payload)
                self._entry = here.entry._replace(payload=payload)
            if here.entry and here.entry.error is not None:
                self._call("set", here.key("failed"), "")
        if is_due or is_new:
            self._send_heartbeat(here)
        waited_s = self._clock_s - self._begun_s
        if is_due:
            self._beaten_s = now_s
        if is_new and here.title and not here.entry:
            self._answers.put((here, Verdict("")))
        if not here.title and not self._is_answered:
            self._part(here, waited_s)
        elif here.title and not self._is_answered and (is_due or (here.entry and not is_new)):
            # Right behind the entry a look comes too early: the leader has yet to read it.
            self._look(here, waited_s, is_due=is_due)
        if here.entry and waited_s >= self._notice_s:
            self._notice_s *= 2
            self._say_who_is_absent(here, waited_s)
        if self._is_answered or not (here.entry or not here.title):
            return self._beat_s if here.title else None
        first_s = POLL_S * max(1.0, len(here.members) / RANKS_PER_POLL)
        return min(self._beat_s, max(first_s, POLL_SHARE * waited_s))

    def _look(self, here: _Position, waited_s: float, *, is_due: bool) -> None:
        """Look for the verdict on the step, or write it if this rank can."""
        leader, *followers = here.members
        is_leader = self._rank == leader
        watched = followers if is_leader else [leader]
        if is_due or is_leader:
            self._read_heartbeats([rank for rank in watched if is_due or not self._entry_of(rank, here)])
        entries = {rank: entry for rank in watched if (entry := self._entry_of(rank, here))}
        may_decide = time.monotonic() >= self._decides_s
        if is_leader and self._entry and len(entries) == len(followers) and may_decide:
            while self._old_keys[here.group]:  # all ranks are past the steps before
                self._call("delete_key", self._old_keys[here.group].pop())
            self._decide(here, verdict_on({leader: self._entry, **entries}))
        elif here.leaves and self._entry:
            self._decide(here, Verdict("", [(self._rank, str(self._entry.error))]))
        elif (is_due or not is_leader or not may_decide) and (content := self._peek(here.key("verdict"))) != _NOTHING:
            self._take(here, content)
        elif is_due and (lost := self._lost(here, watched, waited_s if here.entry else None)):
            self._decide(here, Verdict(here.title, lost))
        elif is_due and self._peek(here.key("failed")) != _NOTHING:
            self.failing = here

    def _lost(self, here: _Position, watched: Sequence[int], waited_s: float | None) -> list[tuple[int, str]]:
        """Return the ranks that do not come to the step, and why."""
        limits = self._limits._replace(absence_s=self._limits.silence_s) if here.is_prompt else self._limits
        reasons = {
            rank: self._peers[rank].why_lost(limits, here.group, here.number, self._clock_s, waited_s)
            for rank in watched
        }
        return [(rank, why) for rank, why in reasons.items() if why]

    def _decide(self, here: _Position, verdict: Verdict) -> None:
        """Write the verdict on the step, unless there is one; take the one that is there."""
        payloads = self._put(here.key("payloads"), json.dumps(verdict.payloads) if verdict.payloads else "")
        content = json.dumps(verdict._replace(payloads=payloads))
        self._take(here, self._call("compare_set", here.key("verdict"), "", content).decode())

    def _take(self, here: _Position, content: str) -> None:
        if not here.entry:  # the others did not wait for this rank; the step goes on until it brings its entry
            self.failing = here
            return
        title, failures, is_alike, stored = json.loads(content)
        payloads = json.loads(self._text(stored) or "[]")
        if self._rank == here.members[0]:
            entries = [self._entry, *(self._entry_of(rank, here) for rank in here.members[1:])]
            payloads_of_all = [stored, *(entry.payload for entry in entries if entry)]  # also those of a failed step
            parts = [key for keys in payloads_of_all if isinstance(keys, list) for key in keys]
            self._old_keys[here.group].update((here.key("verdict"), here.key("failed"), *parts))
        failures = [(rank, text) for rank, text in failures]
        self._answer(here, Verdict(title, failures, is_alike, [*map(self._text, payloads)]))

    def _answer(self, here: _Position, verdict: Verdict) -> None:
        self._is_answered = True
        self._answers.put((here, verdict))

    def _part(self, here: _Position, waited_s: float) -> None:
        """Look whether other ranks still have to read the last verdict of this one."""
        is_leader = self._rank == here.members[0]
        peers = {rank: self._peers.get(rank, Peer()) for rank in here.members[1:] if is_leader}
        behind = [rank for rank, peer in peers.items() if peer.seen_at(here.group, here.number - 1)]
        self._read_heartbeats(behind)
        are_reading = any(self._clock_s - peers[rank].changed_s < FAREWELL_S for rank in behind)  # long payloads, say
        if not behind or waited_s > (self._limits.gone_s if are_reading else FAREWELL_S):
            self.failing = None  # what the position's progress refers to can go
            self._answer(here, Verdict(""))

    def _say_who_is_absent(self, here: _Position, waited_s: float) -> None:
        others = [rank for rank in here.members if rank != self._rank]
        others = others if self._rank == here.members[0] else others[:MAX_NAMED]
        self._read_heartbeats(others)
        absent = {rank: text for rank in others if (text := self._peers[rank].absence(here.group, here.number))}
        if absent:
            say_who_is_absent(self._rank, waited_s, f"at {here.title!r}", absent_text(absent))

    # -- calls of the store --------------------------------------------------------------------------------------------

    def _send_heartbeat(self, here: _Position) -> None:
        self._num_beats += 1
        amount, detail = _progress_at(here) or (None, "")
        place = here.group, here.number, here.title
        beat = Heartbeat(self._num_beats, self._who, *place, amount, detail, self._entry)
        self._call("set", _key(self._rank), json.dumps(beat))

    def _send_due_heartbeat(self) -> None:
        """Send a heartbeat between calls that take long together, as those for the payloads of all ranks do."""
        if time.monotonic() >= self._beaten_s + self._beat_s:
            self._beaten_s = time.monotonic()
            self._send_heartbeat(self._here)

    def _read_heartbeats(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank not in self._peers:  # multi_get waits for keys that are not there
                self._call("compare_set", _key(rank), "", _NOTHING)
                self._peers[rank] = Peer()
        if len(ranks) > 1:
            contents = [value.decode() for value in self._call("multi_get", [*map(_key, ranks)])]
        else:  # one round trip instead of two
            contents = [self._peek(_key(rank)) for rank in ranks]
        for rank, content in zip(ranks, contents, strict=True):
            if content != _NOTHING:
                self._peers[rank].note(Heartbeat.decoded(content), self._clock_s)

    def _entry_of(self, rank: int, here: _Position) -> Entry | None:
        beat = self._peers[rank].seen_at(here.group, here.number) if rank in self._peers else None
        return beat and beat.entry

    def _put(self, key: str, text: str | Sequence[str]) -> str | Sequence[str]:
        """Return a text, or the keys that now hold its parts if it is long."""
        if not isinstance(text, str) or len(text) <= SHORT:
            return text
        keys = [f"{key}/{start}" for start in range(0, len(text), PART)]
        for number, part in enumerate(keys):
            self._send_due_heartbeat()
            self._call("set", part, text[number * PART : (number + 1) * PART])
        return keys

    def _text(self, stored: str | Sequence[str]) -> str:
        """Return the text that `_put` returned, or whose parts it put into the store."""
        if isinstance(stored, str):
            return stored
        parts: list[str] = []
        for key in stored:
            self._send_due_heartbeat()
            parts.append(self._peek(key))
        return "".join(parts)

    def _peek(self, key: str) -> str:
        """Return the value of a key, or _NOTHING. `get` would wait for it."""
        return str(self._call("compare_set", key, _NOTHING, _NOTHING).decode())

    def _call(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self._store, name)(*arguments)
        if self.broken:  # the caller waits no longer, and the store is back
            failure = Verdict("", [(self._rank, f"went on without the others: {self.broken}")])
            self._store.compare_set(self._here.key("verdict"), "", json.dumps(failure))
            raise ConnectionError
        self._unanswered_s = 0.0
        return answer


def _progress_at(here: _Position) -> Progress | None:
    report = here.progress and here.progress()
    with contextlib.suppress(Exception):  # of other code; the step itself goes on
        return report() if report else None
    return None


def _key(rank: int) -> str:
    return f"rank/{rank}"
