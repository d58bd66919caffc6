"""This process's channel to the other ranks: steps and heartbeats, through the store of torch.distributed.

A collective cannot say who is late, and ends with its group's timeout. Through the store, whoever fails, ends or gets
stuck is named by all, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers in the same order. In step n each
rank writes its entry under `group/n/rank`. The leader, the group's first rank, gets all entries in one call and writes
the verdict under `group/n/done`, which the others wait for. Nobody polls. A verdict is written by compare_set, so the
first one counts, and a rank passes number n by it alone: all ranks go on or raise alike.
- A rank that fails says so at once under `group/n/failed`. Busy ranks look there each second; then `check` raises.
- A rank that is lost is named in a verdict by the leader, and a leader that is lost by any other rank. Then the leader
  puts placeholders where entries are missing, so that it does not wait for them.
- A rank that leaves by itself says in its heartbeat which step it does not come to. When it is back it skips those that
  were ended without it, and a step that scripts are likely to run on some ranks only. So all are in line again, and a
  load that failed may be tried again.
- What all have read is deleted: entries by their ranks, verdicts by the last rank once all have come to the next step.

[Note: threads] A call of the store may wait for as long as the store likes, and no signal interrupts it. So the caller
makes none. One thread carries out steps, one sends and reads heartbeats; each has its own client of the store. Who has
nothing to do meanwhile (the caller in a step, else the thread of the steps) counts the seconds in which no call of the
heartbeat thread returned. The interpreter's lock holds up the counting as it holds up the threads, so that a rank that
computes for long does not take the store for silent, nor the seconds it was stopped for others' silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowmem_load.distributed.heartbeat import ANY_GROUP, BUSY, GONE, IDLE, WAITING, Heartbeat, Limits, Watched
from lowmem_load.distributed.processes import Progress, pid_space, started
from lowmem_load.distributed.verdict import Entry, Verdict, spell_ranks, verdict_on

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 1.0
"""Seconds between heartbeats, and between looks at others'."""

FAREWELL_S = 5.0
"""Seconds that the leader waits until its last verdict was read, since the store may end with its process."""


_ABSENT = b"absent"
"""In the place of the entry of a rank that has not come to a step whose verdict is written."""


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


class _RetiredError(Exception):
    """The store has answered a thread that nobody waits for any longer."""


@dataclass(slots=True)
class Group:
    """A group of ranks, and how far this rank is in its steps.

    Attributes:
        name: unique in the store.
        members: its ranks, as ranks in the world; the first one is the leader.
        may_be_behind: whether the next step may have been ended without this rank.
        number: of the step that this rank comes to next.
        old: keys of verdicts that other ranks may not have read yet.
    """

    name: str
    members: tuple[int, ...]
    may_be_behind: bool
    number: int = 0
    old: list[str] = field(default_factory=list)

    def key(self, what: int | str) -> str:
        """Return where something of the next step lies in the store."""
        return f"{self.name}/{self.number}/{what}"


@dataclass(eq=False, slots=True)
class _Step:
    """A step that this rank has come to."""

    group: Group
    entry: Entry
    since_s: float  # by the clock for others' silence
    verdict: futures.Future[Verdict] = field(default_factory=futures.Future)
    is_written: bool = False  # whether the entry lies in the store
    interrupted: str = ""


@dataclass(eq=False, slots=True)
class _Session:
    """The threads of one load, and what they have for themselves."""

    clients: list[Store | None]
    threads: list[threading.Thread] = field(default_factory=list)
    steps: queue.SimpleQueue[_Step | None] = field(default_factory=queue.SimpleQueue)
    wake: threading.Event = field(default_factory=threading.Event)
    is_closing: threading.Event = field(default_factory=threading.Event)
    groups: set[str] = field(default_factory=set)  # to whose steps this rank has come
    broken: dict[int, str] = field(default_factory=dict)  # what is the matter with the store, by rank
    has_answered: bool = False  # whether the store has, since the last look
    silent_s: float = 0.0


class StoreChannel:
    """Steps and heartbeats of one process. Used by one thread at a time, but for `check`.

    Args:
        open_client: returns a new client of the store, for one thread alone, whose calls wait for ever.
        rank: of this process in the world.
        beat_s: see `BEAT_S`.

    Attributes:
        pid: of this process.
    """

    def __init__(self, open_client: Callable[[], Store], rank: int, beat_s: float = BEAT_S) -> None:
        self.pid = os.getpid()
        self._open_client, self._rank, self._beat_s = open_client, rank, beat_s
        self._session: _Session | None = None
        self._clients: list[Store | None] = [None, None]
        self._lock = threading.RLock()  # for all that follows, and for groups, steps and sessions
        self._groups: dict[str, Group] = {}
        self._doing: list[tuple[Group | None, str, Callable[[], Progress] | None]] = []
        self._step: _Step | None = None  # that this rank waits in
        self._limits = Limits()
        self._aborted: tuple[str, int, str] | None = None
        self._trouble: dict[int, str] = {}
        self._is_troubled = threading.Event()
        self._num_beats = 0
        self._read: list[str] = []  # keys that nobody needs any more
        self._watched: dict[int, Watched] = {}
        self._watched_s = 0.0  # the clock for others' silence, which stands still while this process does

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        with self._lock:
            has_aborted_any = self._aborted is not None and self._aborted[0] == ANY_GROUP
            return self._groups.setdefault(name, Group(name, members, may_be_behind=has_aborted_any))

    @contextlib.contextmanager
    def doing(self, group: Group | None, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Within the block send heartbeats. Blocks nest.

        Args:
            group: in which something is done; None if it is not known.
            title: what is done.
            progress: says how far that is; asked in another thread. None: nothing is known of that.
        """
        with self._lock:
            self._doing.append((group, title, progress))
        try:
            if self._session is None:
                self._session = self._open()
            yield
        finally:
            with self._lock:
                self._doing.pop()
                ended = None if self._doing else self._session
            if ended is not None:
                self._session = None
                self._close(ended)

    def set_limits(self, limits: Limits) -> None:
        """Say how long other ranks are waited for."""
        with self._lock:
            self._limits = limits

    def agree(self, group: Group, entry: Entry) -> Verdict:
        """Bring an entry to the group's next step; return the verdict. Collective; within `doing`."""
        session = self._session
        assert session is not None
        with self._lock:
            step = self._step = _Step(group, entry, self._watched_s)
            self._aborted = None
        session.steps.put(step)
        while not self._is_broken(session):
            try:
                return step.verdict.result(self._beat_s)
            except futures.TimeoutError:
                self._count_silence(session)
            except BaseException as interrupt:
                self._interrupt(session, step, type(interrupt).__name__)
                raise
        self._leave(step, f"went on without the others: {next(iter(session.broken.values()))}")
        return Verdict(entry.whole_title, list(session.broken.items()))

    def abort(self, group: Group | None, why: str) -> None:
        """Say that this rank does not come to the next step of a group; None for whatever group. Local."""
        with self._lock:
            for each in self._groups.values() if group is None else [group]:
                each.may_be_behind = True
            self._aborted = (ANY_GROUP, 0, why) if group is None else (group.name, group.number, why)
        with self.doing(group, "leaving"):
            pass  # the last heartbeat says it

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        if self._is_troubled.is_set():
            with self._lock:
                raise StoppedError(f"stopped because of rank(s) {spell_ranks(sorted(self._trouble))}")

    def _open(self) -> _Session:
        session = _Session(self._clients)
        self._set_trouble({})
        for number, (name, work) in enumerate({"steps": self._run_steps, "heartbeat": self._run_beats}.items()):
            arguments = session, number, work
            thread = threading.Thread(target=self._run, args=arguments, name=f"lowmem_load-{name}", daemon=True)
            session.threads.append(thread)
            thread.start()
        return session

    def _close(self, session: _Session) -> None:
        session.steps.put(None)
        for thread in session.threads:  # that of the steps first, since others have to hear that this rank is done
            thread.join(2 * self._beat_s if self._is_broken(session) else FAREWELL_S + self._limits.gone_s)
            session.is_closing.set()
            session.wake.set()
        if any(thread.is_alive() for thread in session.threads):
            self._clients = [None, None]  # the old ones are in use for as long as the store does not answer

    def _interrupt(self, session: _Session, step: _Step, interrupt: str) -> None:
        """End a step because the caller was interrupted while it waited; it may have been ended already."""
        why = f"was interrupted while it waited for the other ranks: {interrupt}"
        with self._lock:
            step.interrupted = why
        session.wake.set()
        found, _ = futures.wait([step.verdict], 2 * self._beat_s)
        if not found or self._rank not in dict(step.verdict.result().failures):  # the others go on
            self._leave(step, why)

    def _leave(self, step: _Step, why: str) -> None:
        with self._lock:
            group, self._step = step.group, None
            group.may_be_behind = True
            self._aborted = group.name, group.number + (step.is_written and not step.verdict.done()), why

    # -- any of the threads --------------------------------------------------------------------------------------------

    def _ask(self, session: _Session, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call of the store does."""
        answer = call(*arguments)
        with self._lock:
            session.has_answered = True
        if self._is_broken(session):
            raise _RetiredError
        return answer

    def _is_broken(self, session: _Session) -> bool:
        with self._lock:
            return bool(session.broken)

    def _count_silence(self, session: _Session) -> None:
        with self._lock:
            session.silent_s = 0.0 if session.has_answered else session.silent_s + self._beat_s
            session.has_answered, limit_s = False, self._limits.gone_s
        if session.silent_s > limit_s:
            self._break(session, f"has not answered for {limit_s:g} s ({GONE})")

    def _break(self, session: _Session, what: str) -> None:
        """Give the store up."""
        ended, until = "", time.monotonic() + 0.5
        while not ended and time.monotonic() < until:  # a process that is killed closes its connections before it ends
            with self._lock:
                ended = self._watched.get(0, Watched()).why_ended()
            time.sleep(0.01)
        with self._lock:
            where = "the store of the process group, which this rank or its launcher holds,"
            session.broken = session.broken or {0: ended or f"{where} {what}"}
            self._set_trouble(session.broken)

    def _set_trouble(self, found: Mapping[int, str]) -> None:
        """Let `check` raise because of these ranks, if there are any."""
        with self._lock:
            self._trouble = dict(found)
            (self._is_troubled.set if found else self._is_troubled.clear)()

    def _run(self, session: _Session, number: int, work: Callable[[_Session, Store], None]) -> None:
        try:
            client = session.clients[number] = session.clients[number] or self._open_client()
            work(session, client)
        except _RetiredError:
            pass
        except Exception as error:  # noqa: BLE001  of the store; whoever waits must hear of it
            self._break(session, f"cannot be reached: {str(error).partition(chr(10))[0]}")

    # -- the thread of the steps ---------------------------------------------------------------------------------------

    def _run_steps(self, session: _Session, client: Store) -> None:
        step: _Step | None = None
        while True:
            try:
                following = session.steps.get(timeout=self._beat_s)
            except queue.Empty:
                self._count_silence(session)
                continue
            if following is None:
                break
            step = following
            self._carry_out(session, client, step)
        if step is not None and step.group.members[0] == self._rank:
            self._wait_until_read(session, client, step)

    def _carry_out(self, session: _Session, client: Store, step: _Step) -> None:
        group, is_over = step.group, False
        if group.may_be_behind or group.name not in session.groups:
            session.groups.add(group.name)
            while self._is_ended(session, client, group):
                self._pass(group, has_failed=True)
        while not is_over:
            if step.entry.error is not None and not step.entry.is_stopped:
                self._ask(session, client.set, group.key("failed"), json.dumps([[self._rank, step.entry.error]]))
            verdict = self._verdict(session, client, step)
            with self._lock:
                if step.is_written:
                    self._read.append(group.key(self._rank))
                if not verdict.failures:  # all have come, so all have read the verdicts before
                    self._read, group.old = [*self._read, *group.old], []
                # Else the verdict is on what this rank said when it left.
                is_over = not (group.may_be_behind and self._rank in verdict.lost)
                self._step = None if is_over else step
                self._pass(group, has_failed=bool(verdict.failures))
                group.may_be_behind = not is_over
                self._set_trouble({})
            session.wake.set()  # its heartbeat tells the leader that this rank has read the verdict
        step.verdict.set_result(verdict)

    def _is_ended(self, session: _Session, client: Store, group: Group) -> bool:
        """Return whether the others have ended the next step of a group without this rank, which does not matter."""
        if not self._ask(session, client.check, [group.key("done")]):
            return False
        if group.may_be_behind:
            return True
        verdict = Verdict.decoded(self._ask(session, client.get, group.key("done")))
        return verdict.may_be_skipped and self._rank in verdict.lost

    def _verdict(self, session: _Session, client: Store, step: _Step) -> Verdict:
        group, others = step.group, step.group.members[1:]
        if self._rank == group.members[0]:
            found = self._ask(session, client.multi_get, [group.key(rank) for rank in others])
            if _ABSENT not in found:
                entries = {self._rank: step.entry, **dict(zip(others, map(Entry.decoded, found), strict=True))}
                verdict = verdict_on(entries).encoded()
                return Verdict.decoded(self._ask(session, client.compare_set, group.key("done"), "", verdict))
        else:
            self._ask(session, client.set, group.key(self._rank), step.entry.encoded())
            with self._lock:
                step.is_written = True
        return Verdict.decoded(self._ask(session, client.get, group.key("done")))

    def _pass(self, group: Group, *, has_failed: bool) -> None:
        """Go on to the next step of a group; the last rank notes what is to be deleted."""
        with self._lock:
            if self._rank == group.members[-1]:
                group.old += [group.key("failed")] * has_failed + [group.key("done")]
            group.number += 1

    def _wait_until_read(self, session: _Session, client: Store, step: _Step) -> None:
        group, lost = step.group, step.verdict.result().lost
        keys = [_beat_key(rank) for rank in group.members[1:] if rank not in lost]
        until, pause_s = time.monotonic() + FAREWELL_S, 1e-3
        while keys and time.monotonic() < until:
            if self._ask(session, client.check, keys):
                beats = zip(keys, map(Heartbeat.decoded, self._ask(session, client.multi_get, keys)), strict=True)
                keys = [key for key, beat in beats if beat.numbers.get(group.name, 0) < group.number]
            time.sleep(pause_s * bool(keys))
            pause_s = min(2 * pause_s, 0.1)

    # -- the heartbeat thread ------------------------------------------------------------------------------------------

    def _run_beats(self, session: _Session, client: Store) -> None:
        now, look_at = time.monotonic(), time.monotonic() + self._beat_s / 4
        try:
            while not session.is_closing.is_set():
                client.set(_beat_key(self._rank), self._heartbeat().encoded())
                before, now = now, time.monotonic()
                with self._lock:
                    self._watched_s += min(now - before, 2 * self._beat_s)
                    step = self._step
                if now >= look_at:
                    self._look(session, client)
                    look_at = now + self._beat_s
                elif step is not None and step.interrupted:
                    self._end_step(session, client, step, {})
                self._delete_read(session, client)
                session.wake.wait(max(0.0, look_at - time.monotonic()))
                session.wake.clear()
            self._delete_read(session, client)
        finally:
            with contextlib.suppress(Exception):  # the store is gone: the others will have noticed
                client.set(_beat_key(self._rank), self._heartbeat().encoded())

    def _delete_read(self, session: _Session, client: Store) -> None:
        with self._lock:
            keys, self._read = self._read, []
        for key in keys:
            self._ask(session, client.delete_key, key)

    def _heartbeat(self) -> Heartbeat:
        with self._lock:
            self._num_beats += 1
            count, aborted, is_waiting = self._num_beats, self._aborted, self._step is not None
            numbers = {name: group.number for name, group in self._groups.items()}
            group, title, progress = self._doing[-1] if self._doing else (None, "", None)
        state = IDLE if not title else WAITING if is_waiting else BUSY
        at = None if progress is None else progress()  # code of others, which may take locks
        detail, amount = ("", None) if at is None else (at.detail, at.amount)
        return Heartbeat(
            *(count, state, title, detail, amount, "" if group is None else group.name, numbers, aborted),
            *(pid_space(), os.getpid(), started(os.getpid()) or "", platform.node()),
        )

    def _look(self, session: _Session, client: Store) -> None:
        """Look at other ranks' heartbeats, and whether one has failed; act on what is wrong."""
        with self._lock:
            step = self._step
            group = step.group if step is not None else self._doing[-1][0] if self._doing else None
            number, failed = (0, "") if group is None else (group.number, group.key("failed"))
        if group is None:
            self._ask(session, client.check, [_beat_key(self._rank)])
            return
        lost = self._lost(session, client, group, number, step)
        if step is not None:
            self._end_step(session, client, step, lost)
            return
        if lost:
            client.set(failed, json.dumps(list(lost.items())))
        elif self._ask(session, client.check, [failed]):
            lost = dict(json.loads(self._ask(session, client.get, failed)))
        with self._lock:
            if lost and self._step is None and group.number == number:
                self._set_trouble(lost)

    def _lost(self, session: _Session, client: Store, group: Group, number: int, step: _Step | None) -> dict[int, str]:
        """Return which ranks are not waited for any longer, and why: the leader looks at all, the others at it."""
        others = group.members[1:] if self._rank == group.members[0] else group.members[:1]
        with self._lock:
            known = set(self._watched)
        here = [rank for rank in others if rank in known or self._ask(session, client.check, [_beat_key(rank)])]
        found = self._ask(session, client.multi_get, [_beat_key(rank) for rank in here]) if here else []
        with self._lock:
            for rank, content in zip(here, found, strict=True):
                self._watched.setdefault(rank, Watched()).note(Heartbeat.decoded(content), self._watched_s)
            waited_s = None if step is None else self._watched_s - step.since_s
            # What this rank did not come to, others need not have come to either.
            place = self._limits, group.name, -1 if group.may_be_behind else number, self._watched_s, waited_s
            reasons = {rank: self._watched.get(rank, Watched()).why_lost(*place) for rank in others}
        return {rank: why for rank, why in reasons.items() if why}

    def _end_step(self, session: _Session, client: Store, step: _Step, failures: Mapping[int, str]) -> None:
        """End the step that this rank waits in if ranks failed in it, the caller was interrupted, or it has ended."""
        with self._lock:
            group, is_over = step.group, step is not self._step
            done, entries = group.key("done"), [group.key(rank) for rank in group.members[1:]]
            failures = {self._rank: step.interrupted} if step.interrupted else failures
        if is_over:
            return
        if failures:
            skipped = self._limits.may_be_skipped
            verdict = Verdict(step.entry.whole_title, list(failures.items()), list(failures), may_be_skipped=skipped)
            self._ask(session, client.compare_set, done, "", verdict.encoded())
        if self._rank == group.members[0] and (failures or self._ask(session, client.check, [done])):
            for key in entries:
                self._ask(session, client.compare_set, key, "", _ABSENT.decode())


def _beat_key(rank: int) -> str:
    """Return where the heartbeats of a rank of the world are."""
    return f"heartbeat/{rank}"
