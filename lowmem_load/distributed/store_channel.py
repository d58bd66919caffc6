"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers. In step n each rank writes its
entry to `group/n/rank`. The leader, the group's first rank, gets all entries in one call and writes the verdict to
`group/n/verdict`, which the others wait for. compare_set writes it, so the first verdict counts on all ranks.
- The leader watches the heartbeats of all ranks, the others those of the leader. Who finds a rank lost, or is
  interrupted, writes a verdict that says so. Then the leader writes `_ABSENT` for missing entries, to stop waiting for
  them. Heartbeats name the ranks that failed, so that busy ranks stop; see `check`.
- A rank that aborts says in its heartbeat which step it does not come to. When it is back, it passes the steps that
  were ended without it. So all ranks are in line again, and a load that failed may be tried again.
- Each rank deletes its entry, and the leader the verdict, once it was read. `group/n/read/rank` says that a rank has
  read it. The leader waits for that at the end, since the store may end with its process.

[Note: threads] No signal interrupts a call of the store, which may take for ever, so the caller makes none. One thread
sends and reads heartbeats, and one carries out the current step; each has its own client. The caller waits for the
verdict in short waits, and looks whether the store still answers.
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
from typing import TYPE_CHECKING

from lowmem_load.distributed import heartbeat as beats
from lowmem_load.distributed.nodes import pid_space, start_time
from lowmem_load.distributed.store_client import StoreClient
from lowmem_load.distributed.verdict import Entry, Verdict, spell_ranks, verdict_on

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 1.0
"""Seconds between heartbeats."""

FAREWELL_S = 5.0
"""Seconds that the leader waits at most until all ranks have read its last verdict."""

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
        verdicts: keys of those that other ranks may not have read yet; for the leader only.
    """

    name: str
    members: tuple[int, ...]
    is_behind: bool = False
    number: int = 0
    verdicts: list[str] = field(default_factory=list)

    @property
    def leader(self) -> int:
        """The rank that writes the verdicts."""
        return self.members[0]

    def key(self, what: int | str, number: int) -> str:
        """Return the key of something of a step."""
        return f"{self.name}/{number}/{what}"


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
    """The threads of one load: the heartbeats', then that of the latest step."""

    watch: beats.StoreWatch
    threads: list[threading.Thread] = field(default_factory=list)
    broken: str = ""
    is_closing: bool = False
    awaited: list[str] = field(default_factory=list)  # keys that the leader waits for at the end


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
        self.pid, self.limits = os.getpid(), beats.Limits()
        self._open_client, self._rank, self._beat_s = open_client, rank, beat_s
        self._clients: dict[str, Store] = {}  # by name of the thread
        self._changed = threading.Condition()  # its lock is for all that follows, and for groups, steps and sessions
        self._session: _Session | None = None
        self._groups: dict[str, Group] = {}
        self._doing: list[tuple[Group | None, str, Callable[[], beats.Progress] | None]] = []
        self._step: _Step | None = None  # that this rank waits in
        self._failed: set[int] = set()  # ranks, in the current step
        self._aborted: dict[str, int] = {}  # see `Heartbeat`
        self._why_aborted = ""
        self._num_beats = 0
        self._peers: dict[int, beats.Peer] = {}
        self._clock_s = 0.0  # stands still while this process is stopped

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        with self._changed:
            return self._groups.setdefault(name, Group(name, members, is_behind=beats.ANY_GROUP in self._aborted))

    @contextlib.contextmanager
    def doing(
        self, group: Group | None, title: str, progress: Callable[[], beats.Progress] | None = None
    ) -> Iterator[None]:
        """Send heartbeats within the block. Blocks nest.

        Args:
            group: in which something is done; None if it is not known.
            title: what is done.
            progress: how far that is; called in another thread. None if it is not known.
        """
        with self._changed:
            self._doing.append((group, title, progress))
            if self._session is None:
                self._failed = set()
                self._session = _Session(beats.StoreWatch(time.monotonic()))
                self._start(self._session, "heartbeat", self._send_heartbeats)
        try:
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
                self._failed = {self._rank}
        try:
            if not session.broken:
                self._start(session, "step", partial(self._carry_out, step=step, previous=session.threads[-1]))
            while step.verdict is None and not self._is_broken(session):
                with self._changed:
                    self._changed.wait_for(lambda: step.verdict is not None or session.broken, self._beat_s)
        except BaseException as interrupt:
            self._interrupt(session, step, type(interrupt).__name__)
            raise
        if step.verdict is None:
            self._leave(step, f"went on without the others: {session.broken}")
        return step.verdict or Verdict(entry.full_title, [(0, session.broken)], is_complete=False)

    def abort(self, group: Group | None, why: str) -> None:
        """Say that this rank does not come to the next step of a group; None for every group. Local."""
        with self._changed:
            self._aborted, self._why_aborted = {beats.ANY_GROUP: 0} if group is None else {}, why
            for each in self._groups.values() if group is None else [group]:
                each.is_behind = True
                self._aborted[each.name] = each.number
        with self.doing(group, "leaving"):
            pass  # the last heartbeat says so

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        session = self._session
        if session is not None and (self._failed or self._is_broken(session)):
            with self._changed:
                raise StoppedError(f"stopped because of rank(s) {spell_ranks(sorted(self._failed))}")

    def _close(self) -> None:
        session = self._session
        assert session is not None
        with self._changed:
            session.is_closing = True
            self._changed.notify_all()
        try:
            for thread in session.threads:
                thread.join(2 * self._beat_s if session.broken else FAREWELL_S + self.limits.gone_s)
        finally:
            self._session = None
            if any(thread.is_alive() for thread in session.threads):
                self._clients = {}  # those threads use the old ones for as long as the store does not answer

    def _is_broken(self, session: _Session) -> bool:
        """Return whether the store cannot be used; look whether it is silent."""
        limit_s = self.limits.gone_s
        with self._changed:
            is_silent = not session.broken and session.watch.is_silent(time.monotonic(), limit_s, self._beat_s)
        if is_silent:
            self._break(session, f"has not answered for {limit_s:g} s ({beats.GONE})")
        return bool(session.broken)

    def _interrupt(self, session: _Session, step: _Step, interrupt: str) -> None:
        """End a step because the caller was interrupted while it waited, unless it has ended."""
        why = f"was interrupted while it waited for the other ranks: {interrupt}"
        with self._changed:
            step.interrupt = why  # which the next look of the heartbeat thread sees
            self._changed.wait_for(lambda: step.verdict is not None or session.broken, 2 * self._beat_s)
        if step.verdict is None or self._rank not in dict(step.verdict.failures):  # the others go on
            self._leave(step, why)

    def _leave(self, step: _Step, why: str) -> None:
        """Leave a step that may go on without this rank."""
        with self._changed:
            self._step, step.group.is_behind = None, True
            number = step.group.number + (step.is_written and step.verdict is None)
            self._aborted, self._why_aborted = {step.group.name: number}, why

    # -- any thread ----------------------------------------------------------------------------------------------------

    def _start(self, session: _Session, name: str, work: Callable[[_Session, StoreClient], None]) -> None:
        thread = threading.Thread(target=self._run, args=(session, name, work), name=f"lowmem_load-{name}", daemon=True)
        session.threads = [*session.threads[:1], thread]
        thread.start()

    def _run(self, session: _Session, name: str, work: Callable[[_Session, StoreClient], None]) -> None:
        try:
            store = self._clients[name] = self._clients.get(name) or self._open_client()
            work(session, StoreClient(store, partial(self._note_answer, session)))
        except _RetiredError:
            pass
        except Exception as error:  # noqa: BLE001  of the store; the caller must hear of it
            self._break(session, f"cannot be reached: {str(error).partition(chr(10))[0]}")

    def _note_answer(self, session: _Session) -> None:
        with self._changed:
            session.watch.answered_s = time.monotonic()
            if session.broken or session is not self._session:
                raise _RetiredError

    def _break(self, session: _Session, what: str) -> None:
        """Give the store up, and say why."""
        ended, until = "", time.monotonic() + 0.5
        while not ended and time.monotonic() < until:  # a process that is killed closes its connections before it ends
            with self._changed:
                ended = self._peers.get(0, beats.Peer()).why_ended()
            time.sleep(0.01)
        with self._changed:
            where = "the store of the process group, which this rank or its launcher holds,"
            session.broken = session.broken or ended or f"{where} {what}"
            if session is self._session:
                self._failed = {0}
            self._changed.notify_all()

    # -- the thread of a step ------------------------------------------------------------------------------------------

    def _carry_out(self, session: _Session, client: StoreClient, *, step: _Step, previous: threading.Thread) -> None:
        if previous is not session.threads[0]:
            previous.join()
        group = step.group
        while step.verdict is None:
            while group.is_behind and client.check([group.key("verdict", group.number)]):
                group.number += 1  # the others ended it without this rank
                self._clean_up(client, group, is_complete=False)
            verdict = self._exchange(client, step)
            failed = dict(verdict.failures)
            with self._changed:
                self._failed = set()
                # A verdict on an earlier step, which this rank aborted or need not have come to, is not on this entry.
                is_earlier = self._rank in failed and (group.is_behind or verdict.may_be_skipped)
                if verdict.is_complete or step.interrupt or not is_earlier:
                    if self._rank == group.leader:
                        reached = [rank for rank in group.members[1:] if verdict.is_complete or rank not in failed]
                        session.awaited = [group.key(f"read/{rank}", group.number) for rank in reached]
                    group.is_behind, self._step, step.verdict = False, None, verdict
                group.number += 1
                self._changed.notify_all()
            self._clean_up(client, group, is_complete=verdict.is_complete)

    def _exchange(self, client: StoreClient, step: _Step) -> Verdict:
        group, others, number = step.group, step.group.members[1:], step.group.number
        verdict_key = group.key("verdict", number)
        if self._rank != group.leader:
            client.set(group.key(self._rank, number), step.entry.encoded())
            step.is_written = True
            verdict = client.get(verdict_key)
            client.set(group.key(f"read/{self._rank}", number), "")
            return Verdict.decoded(verdict)
        found = client.multi_get([group.key(rank, number) for rank in others])
        if _ABSENT in found:
            return Verdict.decoded(client.get(verdict_key))
        entries = {self._rank: step.entry, **dict(zip(others, map(Entry.decoded, found), strict=True))}
        return Verdict.decoded(client.compare_set(verdict_key, "", verdict_on(entries).encoded()))

    def _clean_up(self, client: StoreClient, group: Group, *, is_complete: bool) -> None:
        """Delete what nobody needs after a step. Once all ranks came to it, they have read the verdicts before it."""
        number = group.number - 1
        if self._rank != group.leader:
            done = [group.key(self._rank, number), group.key(f"read/{self._rank}", number - 1)]
        else:
            done, kept = (group.verdicts, []) if is_complete else ([], group.verdicts)
            group.verdicts = [*kept, group.key("verdict", number)]
        for key in done:
            client.delete_key(key)

    # -- the heartbeat thread ------------------------------------------------------------------------------------------

    def _send_heartbeats(self, session: _Session, client: StoreClient) -> None:
        key, now = _beat_key(self._rank), time.monotonic()
        try:
            while True:
                client.set(key, self._heartbeat().encoded())
                with self._changed:
                    self._changed.wait_for(lambda: session.is_closing, self._beat_s)
                    before, now = now, time.monotonic()
                    self._clock_s += min(now - before, 2 * self._beat_s)
                if session.is_closing:
                    break
                self._look(client)
            if session.awaited and not session.broken:
                with contextlib.suppress(RuntimeError):  # a rank has ended meanwhile
                    client.wait(session.awaited, timedelta(seconds=FAREWELL_S))
        finally:
            with contextlib.suppress(Exception):  # the store is gone; the other ranks will have noticed
                client.set(key, self._heartbeat().encoded())

    def _heartbeat(self) -> beats.Heartbeat:
        with self._changed:
            self._num_beats += 1
            count, is_waiting, failed, aborted = self._num_beats, self._step is not None, [*self._failed], self._aborted
            group, title, progress = self._doing[-1] if self._doing else (None, "", None)
            name, number = ("", 0) if group is None else (group.name, group.number)
        state = beats.IDLE if not title else beats.WAITING if is_waiting else beats.BUSY
        at = None if progress is None else progress()  # without the lock: it may wait for another one
        detail, amount = ("", None) if at is None else (at.detail, at.amount)
        return beats.Heartbeat(
            *(count, state, title, detail, amount, name, number, failed, aborted, self._why_aborted),
            *(pid_space(), os.getpid(), start_time(os.getpid()) or "", platform.node()),
        )

    def _look(self, client: StoreClient) -> None:
        """Look at other ranks' heartbeats, and act on ranks that failed or are lost."""
        with self._changed:
            step, group = self._step, self._doing[-1][0] if self._doing else None
            group = step.group if step is not None else group
            number = 0 if group is None else group.number
        if group is None:
            self._read_heartbeats(client, [self._rank])  # only to see that the store answers
            return
        others = group.members[1:] if self._rank == group.leader else group.members[:1]
        self._read_heartbeats(client, others)
        with self._changed:
            waited_s = None if step is None else self._clock_s - step.since_s
            # What this rank did not come to, others need not have come to either.
            place = self.limits, group.name, -1 if group.is_behind else number, self._clock_s, waited_s
            peers = {rank: self._peers.get(rank, beats.Peer()) for rank in others}
            lost = {rank: why for rank, peer in peers.items() if (why := peer.why_lost(*place))}
            failed = {rank for peer in peers.values() for rank in peer.failed_in(group.name, number)} | lost.keys()
        if step is not None:
            self._end_step(client, step, number, {self._rank: step.interrupt} if step.interrupt else lost)
        elif not group.is_behind and client.check([key := group.key("verdict", number)]):
            verdict = Verdict.decoded(client.get(key))  # the others went on without this rank
            failed |= set() if verdict.may_be_skipped else dict(verdict.failures).keys()
        with self._changed:
            if failed and group.number == number and self._step is step:
                self._failed |= failed

    def _read_heartbeats(self, client: StoreClient, ranks: Sequence[int]) -> None:
        unknown = [rank for rank in ranks if rank not in self._peers]
        if unknown and not client.check(list(map(_beat_key, unknown))):  # some have not sent any
            unknown = [rank for rank in unknown if not client.check([_beat_key(rank)])]
            ranks = [rank for rank in ranks if rank not in unknown]
        found = client.multi_get(list(map(_beat_key, ranks))) if ranks else []
        with self._changed:
            for rank, content in zip(ranks, found, strict=True):
                self._peers.setdefault(rank, beats.Peer()).note(beats.Heartbeat.decoded(content), self._clock_s)

    def _end_step(self, client: StoreClient, step: _Step, number: int, lost: Mapping[int, str]) -> None:
        """End a step that this rank waits in if a rank is lost, or if another rank has ended it for that reason."""
        group, key, verdict = step.group, step.group.key("verdict", number), Verdict()
        if lost:
            may_be_skipped = self.limits.is_prompt and not step.interrupt
            ended = Verdict(step.entry.full_title, [*lost.items()], is_complete=False, may_be_skipped=may_be_skipped)
            verdict = Verdict.decoded(client.compare_set(key, "", ended.encoded()))
        elif self._rank == group.leader and client.check([key]):
            verdict = Verdict.decoded(client.get(key))
        if self._rank == group.leader and not verdict.is_complete:
            for rank in group.members[1:]:
                client.compare_set(group.key(rank, number), "", _ABSENT.decode())


def _beat_key(rank: int) -> str:
    """Return the key of the heartbeats of a rank of the world."""
    return f"heartbeat/{rank}"
