"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers.
- Each rank has one key in the store: its heartbeat. It says in which step the rank is and how far. When the rank has
  done its part, the heartbeat holds its entry, too.
- Each group has one key: the verdict on its latest step. The leader, the group's first rank, writes it when it has read
  all entries. compare_set writes it, so the first verdict on a step counts.
- The leader watches the heartbeats of all ranks, the others that of the leader. Who finds a rank lost, or is
  interrupted, writes a verdict that says so. Heartbeats name the ranks that failed, so that busy ranks stop.
- A rank that aborts says in its heartbeat to which step it does not come. When it is back, it passes the steps that
  were ended without it. So all ranks are in line again, and a load that failed may be tried again.

[Note: threads] No signal interrupts a call of the store, which may take for ever. So one thread makes all calls. The
caller waits for it in short waits, and looks whether the store still answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowmem_load.distributed.heartbeat import GONE, Heartbeat, Limits, Peer, Progress, StoreWatch
from lowmem_load.distributed.nodes import pid_space, start_time
from lowmem_load.distributed.verdict import Entry, Verdict, spell_ranks, verdict_on

BEAT_S = 1.0
"""Seconds between heartbeats."""

POLL_S, POLL_SHARE = 0.001, 0.05
"""Seconds between a waiting rank's first looks, and the share of the time waited that is between later ones."""

RANKS_PER_POLL = 16
"""In groups of more ranks the first looks are as many times further apart, for the sake of the store."""

NUM_MISSED = 3
"""A rank that has missed more heartbeats than this in a row, because it was stopped, may have been given up."""

PART = 4 * 2**20
"""Characters of a value at most: torch's store closes a connection that sends 8 MiB (libuv backend, torch 2.13)."""

FAREWELL_S = 5.0
"""Seconds that the leader waits at most until all ranks have read its last verdict: the store may end with it."""

_NOTHING = "-"
"""Stands for the value of a key that is not there."""


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


class _RetiredError(Exception):
    """The store has answered a thread whose session is over."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, and how far this rank is in its steps. The first one of its members is the leader."""

    name: str  # unique in the store
    members: tuple[int, ...]  # as ranks in the world
    number: int = 0  # of the next step
    is_behind: bool = False  # whether other ranks may have ended the next step without this one
    content: str = ""  # of the latest verdict that this rank has seen, as it lies in the store
    verdict: Verdict = field(default_factory=Verdict)  # the same
    payloads: Sequence[Any] = ()  # that the leader has written last

    def key(self, what: str) -> str:
        """Return a key of the group in the store."""
        return f"{self.name}/{what}"

    def note(self, content: str) -> None:
        """Take the latest verdict."""
        if content not in (_NOTHING, self.content):
            self.content, self.verdict = content, Verdict.decoded(content)


@dataclass(eq=False, slots=True)
class _Step:
    group: Group
    entry: Entry
    since_s: float
    is_written: bool = False
    interrupt: str = ""
    verdict: Verdict | None = None


@dataclass(eq=False, slots=True)
class _Session:
    thread: threading.Thread | None = None
    store: Any = None
    watch: StoreWatch = field(default_factory=lambda: StoreWatch(time.monotonic()))
    round_trip_s: float = 0.0  # of the latest answer
    broken: str = ""
    is_closing: bool = False
    unread: tuple[str, int, Sequence[int]] = ("", 0, ())  # group, step and ranks that may not have read the verdict yet


class StoreChannel:
    """Steps and heartbeats of one rank of the world. One thread at a time may use it, but for `check`."""

    def __init__(self, open_client: Callable[[], Any], rank: int, beat_s: float = BEAT_S) -> None:
        self.pid, self.limits = os.getpid(), Limits()
        self._open_client, self._rank, self._beat_s = open_client, rank, beat_s
        self._process = pid_space(), self.pid, start_time(self.pid) or "", platform.node()
        self._client: Any = None
        self._changed = threading.Condition()  # its lock is for all that follows, and for groups, steps and sessions
        self._session: _Session | None = None
        self._groups: dict[str, Group] = {}
        self._doing: list[tuple[Group, str, Callable[[], Progress] | None]] = []
        self._step: _Step | None = None  # that this rank waits in
        self._has_news = False  # whether the thread should write a heartbeat at once
        self._failed: set[int] = set()  # ranks, in the current step
        self._left = ("", 0, "")  # group and number of a step that this rank does not come to, and why
        self._num_beats = 0
        self._peers: dict[int, Peer] = {}
        self._clock_s = 0.0  # stands still while this process is stopped

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        return self._groups.setdefault(name, Group(name, members))

    @contextlib.contextmanager
    def doing(self, group: Group, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        with self._changed:
            self._doing.append((group, title, progress))
            session = self._session
            if session is None:
                session = self._session = _Session()
                session.thread = threading.Thread(
                    target=self._run, args=(session,), name="lowmem_load-heartbeat", daemon=True
                )
                self._failed = set()
                session.thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._doing.pop()
                session.is_closing = not self._doing
                self._changed.notify_all()
            if session.is_closing:
                self._close(session)

    def agree(self, group: Group, entry: Entry) -> Verdict:
        """Bring an entry to the group's next step; return the verdict. Collective; within `doing`."""
        session = self._session
        assert session is not None
        with self._changed:
            step = self._step = _Step(group, entry, self._clock_s)
            self._left = ("", 0, "")
            if entry.error is not None and not entry.is_stopped:
                self._failed = {self._rank}
            self._wake()
        try:
            while step.verdict is None and not self._is_broken(session):
                with self._changed:
                    self._changed.wait_for(lambda: step.verdict is not None or session.broken, self._beat_s)
        except BaseException as interrupt:
            why = f"was interrupted while it waited for the other ranks: {type(interrupt).__name__}"
            with self._changed:
                step.interrupt = why  # the thread writes the verdict
                self._wake()
                self._changed.wait_for(lambda: step.verdict is not None or session.broken, 2 * self._beat_s)
            if step.verdict is None or self._rank not in dict(step.verdict.failures):  # the others go on
                self._leave(step, why)
            raise
        if step.verdict is None:
            self._leave(step, f"went on without the others: {session.broken}")
        return step.verdict or Verdict(entry.full_title, [(0, session.broken)], is_complete=False)

    def abort(self, group: Group, why: str) -> None:
        """Say that this rank does not come to the group's next step. Local."""
        with self._changed:
            group.is_behind, self._left = True, (group.name, group.number, why)
        with self.doing(group, "leaving"):
            pass  # the last heartbeat says so

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        session = self._session
        if session is not None and (self._failed or self._is_broken(session)):
            with self._changed:
                raise StoppedError(f"stopped because of rank(s) {spell_ranks(sorted(self._failed))}")

    def _close(self, session: _Session) -> None:
        assert session.thread is not None
        try:
            session.thread.join(2 * self._beat_s if session.broken else FAREWELL_S + self.limits.gone_s)
        finally:
            self._session = None
            if session.thread.is_alive():
                self._client = None  # that thread uses the old one for as long as the store does not answer

    def _is_broken(self, session: _Session) -> bool:
        limit_s = self.limits.gone_s
        with self._changed:
            is_silent = not session.broken and session.watch.is_silent(time.monotonic(), limit_s, self._beat_s)
        if is_silent:
            self._break(session, f"has not answered for {limit_s:g} s ({GONE})")
        return bool(session.broken)

    def _leave(self, step: _Step, why: str) -> None:
        with self._changed:
            if step.is_written and step.verdict is None:  # the others may go on
                step.group.number += 1
            self._step, step.group.is_behind = None, True
            self._left = (step.group.name, step.group.number, why)

    # -- either thread -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    def _break(self, session: _Session, what: str) -> None:
        ended, until_s = "", time.monotonic() + 0.5
        while not ended and time.monotonic() < until_s:  # a killed process closes its connections before it ends
            ended = self._peers.get(0, Peer()).why_ended()
            time.sleep(0.01)
        with self._changed:
            where = "the store of the process group, which this rank or its launcher holds,"
            session.broken = session.broken or ended or f"{where} {what}"
            if session is self._session:
                self._failed = {0}
            self._changed.notify_all()

    # -- the thread of a session ---------------------------------------------------------------------------------------

    def _run(self, session: _Session) -> None:
        try:
            session.store = self._client = self._client or self._open_client()
            self._serve(session)
            self._say_farewell(session)
            with contextlib.suppress(Exception):  # the store is gone; the other ranks will have noticed
                self._beat(session, None)
        except _RetiredError:
            if self._session in (None, session):  # else a later one sends heartbeats
                with contextlib.suppress(Exception):
                    self._beat(session, None)  # says that this rank went on
        except Exception as error:  # noqa: BLE001  of the store; the caller must hear of it
            self._break(session, f"cannot be reached: {str(error).partition(chr(10))[0]}")

    def _serve(self, session: _Session) -> None:
        due_s, now_s = 0.0, time.monotonic()
        while True:
            before_s, now_s = now_s, time.monotonic()
            if now_s - before_s > NUM_MISSED * self._beat_s:
                for peer in self._peers.values():
                    peer.doubt()
            is_due = now_s >= due_s
            due_s = now_s + self._beat_s if is_due else due_s
            with self._changed:
                if session.is_closing:
                    return
                self._clock_s += min(now_s - before_s, 2 * self._beat_s)
                has_news, self._has_news = self._has_news, False
                step, group = self._step, self._step.group if self._step else self._doing[-1][0]
                if step is not None and not step.is_written:
                    step.since_s = self._clock_s  # the clock was behind when the caller made the step
            if step is not None and group.is_behind and not step.is_written:
                group.note(self._peek(session, group.key("verdict")))
                group.number = max(group.number, group.verdict.number + 1)  # the others ended it without this rank
            if is_due or has_news:
                self._beat(session, step)
            # A look right behind the entry comes too early: the leader has yet to read it.
            if is_due or (step is not None and (step.interrupt or not has_news)):
                self._look(session, group, step, is_due=is_due)
            pause_s = due_s - time.monotonic()
            if step is not None:
                first_s = max(POLL_S * max(1.0, len(group.members) / RANKS_PER_POLL), 0.1 * session.round_trip_s)
                pause_s = min(pause_s, max(first_s, POLL_SHARE * (self._clock_s - step.since_s)))
            with self._changed:
                self._changed.wait_for(lambda: session.is_closing or self._has_news, pause_s)

    def _say_farewell(self, session: _Session) -> None:
        name, number, ranks = session.unread
        until_s = time.monotonic() + FAREWELL_S
        while ranks := [rank for rank in ranks if self._peers[rank].is_in(name, number)]:
            if time.monotonic() > until_s:
                return
            time.sleep(5 * POLL_S)
            self._read_heartbeats(session, ranks)

    def _beat(self, session: _Session, step: _Step | None) -> None:
        with self._changed:
            self._num_beats += 1
            count, failed = self._num_beats, [*self._failed]
            (name, number, left), title, progress = self._left, "", None
            if self._doing:
                group, title, progress = self._doing[-1]
                group = group if step is None else step.group
                name, number = group.name, group.number
        at = None if progress is None else progress()  # without the lock: it may wait for another one
        detail, amount = ("", None) if at is None else (at.detail, at.amount)
        entry = None if step is None else step.entry
        heartbeat = Heartbeat(count, title, detail, amount, name, number, entry, failed, left, *self._process)
        session.store.set(_key(self._rank), heartbeat.encoded())
        if step is not None:
            step.is_written = True

    def _look(self, session: _Session, group: Group, step: _Step | None, *, is_due: bool) -> None:
        """Look at other ranks' heartbeats and at the verdict; write one if that is up to this rank."""
        number, key, is_leader = group.number, group.key("verdict"), self._rank == group.members[0]
        watched = group.members[1:] if is_leader else group.members[:1]
        self._read_heartbeats(session, watched if is_due else self._awaited(group) if is_leader else ())
        if is_due or not is_leader:
            group.note(self._peek(session, key))
        if group.verdict.number < number:
            lost = self._lost(group, step, watched) if is_due else {}
            new = None if step is None else self._new_verdict(group, step, lost)
            if new is None:
                return
            content = replace(
                new, number=number, payloads=(), num_parts=self._write_payloads(session, group, new)
            ).encoded()
            group.note(self._ask(session, "compare_set", key, group.content, content))
        if group.verdict.number >= number:
            self._act_on(session, group, step)

    def _awaited(self, group: Group) -> list[int]:
        place = group.name, group.number
        return [rank for rank in group.members[1:] if self._peers.get(rank, Peer()).entry_in(*place) is None]

    def _lost(self, group: Group, step: _Step | None, watched: Sequence[int]) -> dict[int, str]:
        waited_s = None if step is None else self._clock_s - step.since_s
        # What this rank did not come to, others need not have come to either.
        place = self.limits, group.name, -1 if group.is_behind else group.number, self._clock_s, waited_s
        lost = {rank: why for rank in watched if (why := self._peers[rank].why_lost(*place))}
        # Heartbeats were read before the verdict, so who is past this step without a verdict does not come to it.
        lost |= {rank: why for rank in watched if (why := self._peers[rank].why_past(group.name, group.number))}
        failed = {each for rank in watched for each in self._peers[rank].failed_in(group.name, group.number)}
        failed |= lost.keys()
        with self._changed:
            self._has_news = self._has_news or not failed <= self._failed
            self._failed |= failed
        return lost

    def _new_verdict(self, group: Group, step: _Step, lost: Mapping[int, str]) -> Verdict | None:
        title = step.entry.full_title
        if step.interrupt:
            return Verdict(title, [(self._rank, step.interrupt)], is_complete=False)
        if self._rank == group.members[0] and not self._awaited(group):
            found = {rank: self._peers[rank].entry_in(group.name, group.number) for rank in group.members[1:]}
            return verdict_on({self._rank: step.entry, **{rank: entry for rank, entry in found.items() if entry}})
        if lost:
            return Verdict(title, [*lost.items()], is_complete=False, may_be_skipped=self.limits.is_prompt)
        return None

    def _act_on(self, session: _Session, group: Group, step: _Step | None) -> None:
        """Act on a verdict on this rank's step, or on a later one."""
        verdict = group.verdict
        if step is not None and verdict.num_parts:
            keys = [group.key(f"payloads/{part}") for part in range(verdict.num_parts)]
            found = group.payloads or json.loads("".join(self._peek(session, key) for key in keys))
            verdict = replace(verdict, payloads=found)
        failed = dict(verdict.failures)
        # This rank aborted that step, or need not have come to it: it is not the one that this rank is in.
        is_earlier = not verdict.is_complete and self._rank in failed and (group.is_behind or verdict.may_be_skipped)
        with self._changed:
            if step is None or step is not self._step:  # the others went on without this rank
                self._failed |= set() if is_earlier else failed.keys()
                return
            self._failed, group.number = set(), verdict.number + 1
            if self._rank == group.members[0]:
                reached = [rank for rank in group.members[1:] if verdict.is_complete or rank not in failed]
                session.unread = group.name, verdict.number, reached
            if step.interrupt or not is_earlier:
                group.is_behind, self._step, step.verdict = False, None, verdict
            self._wake()

    def _write_payloads(self, session: _Session, group: Group, verdict: Verdict) -> int:
        """Write what the ranks brought beside the verdict, if they did; return the number of keys."""
        group.payloads = verdict.payloads
        text = json.dumps(verdict.payloads) if verdict.payloads else ""
        parts = [text[start : start + PART] for start in range(0, len(text), PART)]
        for part, content in enumerate(parts):
            session.store.set(group.key(f"payloads/{part}"), content)
        return len(parts)

    def _read_heartbeats(self, session: _Session, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank not in self._peers:  # multi_get waits for keys that are not there
                self._ask(session, "compare_set", _key(rank), "", _NOTHING)
                self._peers[rank] = Peer()
        if len(ranks) > 1:
            found = self._ask(session, "multi_get", [*map(_key, ranks)])
        else:  # one round trip instead of two
            found = [self._peek(session, _key(rank)) for rank in ranks]
        for rank, content in zip(ranks, found, strict=True):
            if content != _NOTHING:
                self._peers[rank].note(Heartbeat.decoded(content), self._clock_s)

    def _peek(self, session: _Session, key: str) -> str:
        """Return the value of a key, or _NOTHING. `get` would wait for it."""
        return str(self._ask(session, "compare_set", key, _NOTHING, _NOTHING))

    def _ask(self, session: _Session, call: str, *arguments: Any) -> Any:
        asked_s = time.monotonic()
        answer = getattr(session.store, call)(*arguments)
        with self._changed:
            session.watch.answered_s = time.monotonic()
            session.round_trip_s = session.watch.answered_s - asked_s
            if session.broken or session is not self._session:
                raise _RetiredError
        return [each.decode() for each in answer] if isinstance(answer, list) else answer.decode()


def _key(rank: int) -> str:
    return f"rank/{rank}"
