"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers. In step n each rank writes its
entry to `group/n/rank`. The leader, the group's first rank, gets all entries in one call and writes the verdict to
`group/n/verdict`, which the others wait for. compare_set writes it, so the first verdict counts on all ranks.
- The leader watches the heartbeats of all ranks, the others those of the leader. A rank that is lost, or interrupted
  while it waits, is named in a verdict by whoever finds out. Then the leader writes `_ABSENT` for missing entries, so
  that it stops waiting for them. The leader's heartbeat also names failed ranks to ranks that are busy; see `check`.
- A rank that aborts says in its heartbeat which step it does not come to. When it is back, it passes the steps that
  were ended without it. So all ranks are in line again, and a load that failed may be tried again.
- Each rank deletes its entry and the leader the verdict, once all have read it. `group/n/read/rank` says that a rank
  has: the leader waits for that before its process, which may hold the store, goes on.

[Note: threads] No signal interrupts a call of the store, which may take for ever, so the caller makes none. One thread
sends and reads heartbeats, and one carries out the current step; each has its own client. The caller waits for the
verdict in short waits, and looks whether the store still answers the heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from lowmem_load.distributed.heartbeat import (
    ANY_GROUP,
    BUSY,
    GONE,
    IDLE,
    WAITING,
    Heartbeat,
    Limits,
    Peer,
    Progress,
    StoreWatch,
)
from lowmem_load.distributed.nodes import pid_space, start_time
from lowmem_load.distributed.verdict import Entry, Verdict, spell_ranks, verdict_on

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 1.0
"""Seconds between heartbeats."""

FAREWELL_S = 5.0
"""Seconds that the leader waits until all ranks have read its last verdict, as the store may end with its process."""

_ABSENT = b"absent"
"""Stands for the entry of a rank that was lost."""


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


class _RetiredError(Exception):
    """The store has answered a thread whose session is over."""


@dataclass(slots=True)
class Group:
    """A group of ranks, and how far this rank is in its steps.

    Attributes:
        name: unique in the store.
        members: its ranks, as ranks in the world; the first one is the leader.
        is_behind: whether other ranks may have ended the next step without this one.
        number: of the next step.
        unread: verdicts that other ranks may not have read yet; for the leader only.
    """

    name: str
    members: tuple[int, ...]
    is_behind: bool = False
    number: int = 0
    unread: list[str] = field(default_factory=list)

    def key(self, what: int | str, number: int | None = None) -> str:
        """Return the key of something of a step, by default the next one."""
        return f"{self.name}/{self.number if number is None else number}/{what}"


@dataclass(eq=False, slots=True)
class _Step:
    """A step that this rank has come to."""

    group: Group
    entry: Entry
    since_s: float
    is_written: bool = False
    interrupt: str = ""
    verdict: Verdict | None = None


@dataclass(eq=False, slots=True)
class _Session:
    """The threads of one load, and the state of the store during it."""

    watch: StoreWatch
    threads: list[threading.Thread] = field(default_factory=list)
    broken: str = ""
    is_closing: bool = False
    unread: list[str] = field(default_factory=list)  # keys that the leader waits for before it goes on


class StoreChannel:
    """Steps and heartbeats of one process. One thread at a time may use it, but for `check`.

    Args:
        open_client: returns a new client of the store, for one thread, whose calls never time out.
        rank: of this process in the world.
        beat_s: see `BEAT_S`.

    Attributes:
        pid: of this process.
        limits: how long it waits for other ranks.
    """

    def __init__(self, open_client: Callable[[], Store], rank: int, beat_s: float = BEAT_S) -> None:
        self.pid, self.limits = os.getpid(), Limits()
        self._open_client, self._rank, self._beat_s = open_client, rank, beat_s
        self._clients: dict[str, Store] = {}  # by name of the thread
        self._changed = threading.Condition()  # its lock is for all that follows, and for groups, steps and sessions
        self._session: _Session | None = None
        self._groups: dict[str, Group] = {}
        self._doing: list[tuple[Group | None, str, Callable[[], Progress] | None]] = []
        self._step: _Step | None = None  # that this rank waits in
        self._failed: dict[int, str] = {}  # ranks that failed in the current step
        self._is_stopped = False  # whether they stop this rank, too
        self._aborted: dict[str, int] = {}
        self._why_aborted = ""
        self._num_beats, self._is_urgent = 0, False  # whether the next heartbeat must not wait
        self._peers: dict[int, Peer] = {}
        self._clock_s = 0.0  # counts while the heartbeat thread runs

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        with self._changed:
            return self._groups.setdefault(name, Group(name, members, is_behind=ANY_GROUP in self._aborted))

    @contextlib.contextmanager
    def doing(self, group: Group | None, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block. Blocks nest.

        Args:
            group: in which something is done; None if it is not known.
            title: what is done.
            progress: how far that is; called in another thread. None if it is not known.
        """
        with self._changed:
            self._doing.append((group, title, progress))
        try:
            if self._session is None:
                self._open()
            yield
        finally:
            with self._changed:
                self._doing.pop()
            if not self._doing:
                self._close()

    def agree(self, group: Group, entry: Entry) -> Verdict:
        """Bring an entry to the group's next step; return the verdict. Collective; within `doing`."""
        session = self._session
        assert session is not None
        with self._changed:
            step = self._step = _Step(group, entry, self._clock_s)
            self._aborted = {}
            if entry.error is not None and not entry.is_stopped:
                self._failed, self._is_urgent = {self._rank: entry.error}, True
                self._changed.notify_all()
        try:
            if not session.broken:
                self._start(session, "step", partial(self._carry_out, step=step, previous=session.threads[-1]))
            self._wait(session, step)
        except BaseException as interrupt:
            self._interrupt(session, step, type(interrupt).__name__)
            raise
        if step.verdict is None:
            self._leave(step, f"went on without the others: {session.broken}")
        return step.verdict or Verdict(entry.full_title, [(0, session.broken)], is_complete=False)

    def abort(self, group: Group | None, why: str) -> None:
        """Say that this rank does not come to the next step of a group; None for every group. Local."""
        with self._changed:
            for each in self._groups.values() if group is None else [group]:
                each.is_behind = True
                self._aborted[each.name] = each.number
            if group is None:
                self._aborted[ANY_GROUP] = 0
            self._why_aborted = why
        with self.doing(group, "leaving"):
            pass  # its last heartbeat says so

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        session = self._session
        if self._is_stopped or (session is not None and self._is_broken(session)):
            with self._changed:
                raise StoppedError(f"stopped because of rank(s) {spell_ranks(sorted(self._failed))}")

    def _open(self) -> None:
        with self._changed:
            self._session = session = _Session(StoreWatch(time.monotonic()))
            self._failed, self._is_stopped = {}, False
        self._start(session, "heartbeat", self._send_heartbeats)

    def _close(self) -> None:
        session = self._session
        if session is None:
            return
        with self._changed:
            session.is_closing = True
            self._changed.notify_all()
        try:
            for thread in reversed(session.threads):  # the steps' first: its last heartbeat is the last word
                thread.join(2 * self._beat_s if session.broken else FAREWELL_S + self.limits.gone_s)
        finally:
            with self._changed:
                self._session = None
                if any(thread.is_alive() for thread in session.threads):
                    self._clients = {}  # the store has them for as long as it does not answer

    def _wait(self, session: _Session, step: _Step) -> None:
        """Wait until a step has its verdict, or the store is broken."""
        while step.verdict is None and not self._is_broken(session):
            with self._changed:
                if step.verdict is None:
                    self._changed.wait(self._beat_s)

    def _is_broken(self, session: _Session) -> bool:
        """Return whether the store cannot be used; look whether it is silent."""
        limit_s = self.limits.gone_s
        with self._changed:
            is_silent = not session.broken and session.watch.is_silent(time.monotonic(), limit_s, self._beat_s)
        if is_silent:
            self._break(session, f"has not answered for {limit_s:g} s ({GONE})")
        return bool(session.broken)

    def _interrupt(self, session: _Session, step: _Step, interrupt: str) -> None:
        """End a step because the caller was interrupted while it waited, unless it has ended."""
        why, until_s = f"was interrupted while it waited for the other ranks: {interrupt}", 2 * self._beat_s
        with self._changed:
            step.interrupt, self._is_urgent = why, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: step.verdict is not None or session.broken, until_s)
        if step.verdict is None or self._rank not in dict(step.verdict.failures):  # the others go on
            self._leave(step, why)

    def _leave(self, step: _Step, why: str) -> None:
        """Give up a step that may go on without this rank."""
        with self._changed:
            self._step, step.group.is_behind = None, True
            number = step.group.number + (step.is_written and step.verdict is None)
            self._aborted, self._why_aborted = {step.group.name: number}, why

    # -- any thread ----------------------------------------------------------------------------------------------------

    def _start(self, session: _Session, name: str, work: Callable[[_Session, Store], None]) -> None:
        thread = threading.Thread(target=self._run, args=(session, name, work), name=f"lowmem_load-{name}", daemon=True)
        session.threads[1:] = []  # a finished step's, at most
        session.threads.append(thread)
        thread.start()

    def _run(self, session: _Session, name: str, work: Callable[[_Session, Store], None]) -> None:
        try:
            client = self._clients.get(name) or self._open_client()
            self._clients[name] = client
            work(session, client)
        except _RetiredError:
            pass
        except Exception as error:  # noqa: BLE001  of the store; the caller must hear of it
            self._break(session, f"cannot be reached: {str(error).partition(chr(10))[0]}")

    def _ask(self, session: _Session, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the store's answer to a call."""
        answer = call(*arguments)
        with self._changed:
            session.watch.answered_s = time.monotonic()
            if session.broken or session is not self._session:
                raise _RetiredError
        return answer

    def _break(self, session: _Session, what: str) -> None:
        """Give the store up, and say why."""
        ended, until = "", time.monotonic() + 0.5
        while not ended and time.monotonic() < until:  # a process that is killed closes its connections before it ends
            with self._changed:
                ended = self._peers.get(0, Peer()).why_ended()
            time.sleep(0.01)
        with self._changed:
            where = "the store of the process group, which this rank or its launcher holds,"
            session.broken = session.broken or ended or f"{where} {what}"
            if session is self._session:
                self._failed, self._is_stopped = {0: session.broken}, True
            self._changed.notify_all()

    # -- the thread of a step ------------------------------------------------------------------------------------------

    def _carry_out(self, session: _Session, client: Store, *, step: _Step, previous: threading.Thread) -> None:
        if previous is not session.threads[0]:
            previous.join()
        group, ask = step.group, partial(self._ask, session)
        while step.verdict is None:
            while group.is_behind and ask(client.check, [group.key("verdict")]):  # it was ended without this rank
                group.number += 1
                self._clean_up(ask, client, group, is_complete=False)
            verdict, number = self._exchange(ask, client, step), group.number
            failed = dict(verdict.failures)
            if self._rank != group.members[0]:
                client.set(group.key(f"read/{self._rank}"), "")
            with self._changed:
                self._failed, self._is_stopped = {}, False
                # A verdict on why this rank aborted an earlier step is not the one on this entry.
                if not group.is_behind or verdict.is_complete or step.interrupt or self._rank not in failed:
                    group.is_behind, self._step, step.verdict = False, None, verdict
                    others = group.members[1:] if self._rank == group.members[0] else ()
                    reached = [rank for rank in others if verdict.is_complete or rank not in failed]
                    session.unread = [group.key(f"read/{rank}", number) for rank in reached]
                group.number += 1
                self._changed.notify_all()
            self._clean_up(ask, client, group, is_complete=verdict.is_complete)

    def _exchange(self, ask: Callable[..., Any], client: Store, step: _Step) -> Verdict:
        group, others = step.group, step.group.members[1:]
        if self._rank == group.members[0]:
            found = ask(client.multi_get, [group.key(rank) for rank in others])
            if _ABSENT not in found:
                entries = {self._rank: step.entry, **dict(zip(others, map(Entry.decoded, found), strict=True))}
                verdict = verdict_on(entries).encoded()
                return Verdict.decoded(ask(client.compare_set, group.key("verdict"), "", verdict))
        else:
            client.set(group.key(self._rank), step.entry.encoded())
            step.is_written = True
        return Verdict.decoded(ask(client.get, group.key("verdict")))

    def _clean_up(self, ask: Callable[..., Any], client: Store, group: Group, *, is_complete: bool) -> None:
        """Delete what nobody needs after a step that this rank has passed.

        Once all ranks have come to a step, they have read the verdicts on those before.
        """
        number = group.number - 1
        if self._rank != group.members[0]:
            done = [group.key(self._rank, number), group.key(f"read/{self._rank}", number - 1)]
        else:
            done, group.unread = (group.unread, []) if is_complete else ([], group.unread)
            group.unread.append(group.key("verdict", number))
        for key in done:
            ask(client.delete_key, key)

    # -- the heartbeat thread ------------------------------------------------------------------------------------------

    def _send_heartbeats(self, session: _Session, client: Store) -> None:
        key, now = _beat_key(self._rank), time.monotonic()
        try:
            while True:
                client.set(key, self._heartbeat().encoded())
                with self._changed:
                    self._changed.wait_for(lambda: session.is_closing or self._is_urgent, self._beat_s)
                    self._is_urgent, before, now = False, now, time.monotonic()
                    self._clock_s += min(now - before, 2 * self._beat_s)  # not while this process was stopped
                if session.is_closing:
                    break
                self._look(partial(self._ask, session), client)
            if session.unread and not session.broken:
                with contextlib.suppress(RuntimeError):  # a rank has ended meanwhile
                    client.wait(session.unread, timedelta(seconds=FAREWELL_S))
        finally:
            with contextlib.suppress(Exception):  # the store is gone; the other ranks will have noticed
                client.set(key, self._heartbeat().encoded())

    def _heartbeat(self) -> Heartbeat:
        with self._changed:
            self._num_beats += 1
            count, is_waiting, failed, aborted = self._num_beats, self._step is not None, [*self._failed], self._aborted
            group, title, progress = self._doing[-1] if self._doing else (None, "", None)
            name, number = ("", 0) if group is None else (group.name, group.number)
        state = IDLE if not title else WAITING if is_waiting else BUSY
        at = None if progress is None else progress()  # other people's code, which may take locks
        detail, amount = ("", None) if at is None else (at.detail, at.amount)
        return Heartbeat(
            *(count, state, title, detail, amount, name, number, failed, aborted, self._why_aborted),
            *(pid_space(), os.getpid(), start_time(os.getpid()) or "", platform.node()),
        )

    def _look(self, ask: Callable[..., Any], client: Store) -> None:
        """Look at other ranks' heartbeats and act on ranks that failed or are lost."""
        with self._changed:
            step = self._step
            group = step.group if step is not None else self._doing[-1][0] if self._doing else None
            number = 0 if group is None else group.number
        if group is None:
            self._read_heartbeats(ask, client, [self._rank])  # the store must answer
            return
        others = group.members[1:] if self._rank == group.members[0] else group.members[:1]
        self._read_heartbeats(ask, client, others)
        lost, failed = self._judge(group, number, step, others)
        if step is not None:
            lost = {self._rank: step.interrupt} if step.interrupt else lost
            self._end_step(ask, client, step, number, lost)
        with self._changed:
            if (lost or failed) and group.number == number and self._step is step:
                self._failed.update(failed | lost)
                self._is_stopped = step is None

    def _read_heartbeats(self, ask: Callable[..., Any], client: Store, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if rank not in self._peers]
        if unknown and not ask(client.check, list(map(_beat_key, unknown))):  # some have not sent any
            unknown = [rank for rank in unknown if not ask(client.check, [_beat_key(rank)])]
            ranks = [rank for rank in ranks if rank not in unknown]
        found = ask(client.multi_get, list(map(_beat_key, ranks))) if ranks else []
        with self._changed:
            for rank, content in zip(ranks, found, strict=True):
                self._peers.setdefault(rank, Peer()).note(Heartbeat.decoded(content), self._clock_s)

    def _judge(
        self, group: Group, number: int, step: _Step | None, others: Sequence[int]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Return the ranks that are lost, each with the reason, and those that failed."""
        with self._changed:
            waited_s = None if step is None else self._clock_s - step.since_s
            # What this rank did not come to, others need not have come to either.
            place = self.limits, group.name, -1 if group.is_behind else number, self._clock_s, waited_s
            peers = {rank: self._peers.get(rank, Peer()) for rank in others}
            lost = {rank: why for rank, peer in peers.items() if (why := peer.why_lost(*place))}
            beats = [peer.heartbeat for peer in peers.values() if peer.heartbeat is not None]
            here = [beat for beat in beats if (beat.group, beat.number) == (group.name, number)]
            return lost, {rank: "failed" for beat in here for rank in beat.failed}

    def _end_step(
        self, ask: Callable[..., Any], client: Store, step: _Step, number: int, lost: Mapping[int, str]
    ) -> None:
        """End a step that this rank waits in if a rank is lost, or if another rank has ended it for that."""
        group, key, verdict = step.group, step.group.key("verdict", number), None
        is_leader = self._rank == group.members[0]
        if lost:
            ended = Verdict(step.entry.full_title, list(lost.items()), is_complete=False)
            verdict = Verdict.decoded(ask(client.compare_set, key, "", ended.encoded()))
        elif is_leader and ask(client.check, [key]):
            verdict = Verdict.decoded(ask(client.get, key))
        if is_leader and verdict is not None and not verdict.is_complete:
            for rank in group.members[1:]:  # so that the leader waits for no entry any more
                ask(client.compare_set, group.key(rank, number), "", _ABSENT.decode())


def _beat_key(rank: int) -> str:
    """Return where the heartbeats of a rank of the world are."""
    return f"heartbeat/{rank}"
