"""A rank's line to the others of its group, through the store of torch.distributed: exchanges, and life signs.

A collective cannot say who is late, and ends with its group's timeout. Through the store each rank says what it does,
once a second, and hears of the others: whoever fails, ends or gets stuck is named by all, whatever they do meanwhile.

[Note: exchanges] The first rank of the group collects one small object of every rank, and answers with all of them, or
with the ranks that it no longer waits for. Exchanges are numbered; all ranks come to the same ones, in the same order.
A rank that begins anew leaves out those that were given up while it was away; one that is in the middle is told. What
of this lies in the store: `ranks/exchanges.py`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lowmem_load.ranks.exchanges import Exchanges, LostError
from lowmem_load.ranks.life import (
    ANY_LINE,
    BUSY,
    GONE,
    IDLE,
    WAITING,
    LifeSign,
    Limits,
    Position,
    Progress,
    Sighting,
    pid_space,
    started,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SIGN_EVERY_S = 1.0
"""Seconds between life signs, and between looks at others'."""

LOOKS_PER_S = 200
"""Life signs that the first rank reads: it sees all of a larger group in several seconds."""

FAREWELL_S = 5.0
"""Seconds that the first rank waits until its last answer was read, since the store may end with its process."""


class _Exchange:
    """One that the line's thread carries on: `steps` yields None until it yields the contents of all ranks."""

    def __init__(self, content: str = "") -> None:
        self.content = content
        self.number = -1
        self.steps: Iterator[list[str] | None] = iter(())
        self.since = time.monotonic()
        self.done = threading.Event()
        self.is_cancelled = False
        self.contents: list[str] = []
        self.error: BaseException | None = None


class Line:
    """This rank's line to the other ranks of a group of at least two. Used by one thread at a time.

    What has to do with the store is done by a thread of its own, which runs while the line is open: so the caller waits
    with a limit even where the store does not answer.

    Args:
        store: for this line alone.
        name: of the group.
        members: the group's ranks, as ranks in the world.
        rank: of this process in the group.
        leaves: how often this process has gone away from exchanges, by group, and ranks that it has given up for that:
            of one that did so less often it hears old news. Shared by all lines of a process, and kept by them.

    Attributes:
        pid: of the process that the line belongs to.
        limits: how long other ranks are waited for.
        silence_s: for how long the store has not answered when the next exchange begins, as far as the caller knows.
        trouble: what is the matter with other ranks that will make the next exchange fail, by rank in the world, as far
            as this rank has heard.
    """

    def __init__(self, store: Store, name: str, members: Sequence[int], rank: int, leaves: dict[str, int]) -> None:
        self.pid = os.getpid()
        self.limits = Limits()
        self.silence_s = 0.0
        self.trouble: dict[int, str] = {}
        self._store, self._name, self._members, self._rank = store, name, members, rank
        self._leaves = leaves
        self._exchanges = Exchanges(store, name, members, rank, leaves)
        self._steps: list[tuple[str, Callable[[], Progress] | None]] = []
        self._left: tuple[str, str] | None = None  # group and reason
        self._warning = ""  # why this rank will have failed when it comes to the next exchange
        self._num_signs = 0
        self._sightings: dict[int, Sighting] = {}
        self._lost: dict[int, str] = {}  # as of the last look
        self._num_looks = 0
        self._looked = self._next_look = 0.0
        self._watched_s = 0.0  # the clock for others' silence: it does not count while this process itself is stopped
        self._answered = 0.0  # when the store last did
        self._current: _Exchange | None = None
        self._work: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def doing(self, step: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Within the block give life signs and look at others'. Blocks nest.

        Args:
            step: what is done there: "reading".
            progress: says how far it is; asked in another thread. None: nothing is known of that.
        """
        self._steps.append((step, progress))
        try:
            if self._thread is None:
                self._open()
            yield
        finally:
            self._steps.pop()
            if not self._steps:
                self._close()

    def exchange(self, content: str) -> list[str]:
        """Return the contents of all ranks, by rank. Collective; within `doing`.

        Raises:
            LostError: a rank is not waited for any longer, or the store cannot be reached.
        """
        current = _Exchange(content)
        current.steps = (self._collect if self._rank == 0 else self._submit)(current)
        self._current, self._left = current, None
        self._work.put(current)
        answered, silence_s, self.silence_s = self._answered, self.silence_s, 0.0
        try:
            while not current.done.wait(SIGN_EVERY_S) and silence_s <= self.limits.gone_s:
                # Counted, not measured: while all of this process was stopped, nobody waited.
                silence_s = 0.0 if self._answered != answered else silence_s + SIGN_EVERY_S
                answered = self._answered
        except BaseException:  # an interrupt, or whatever a signal handler raises
            self.leave("was interrupted while it waited for the other ranks")
            current.is_cancelled = True
            current.done.wait(SIGN_EVERY_S)
            raise
        finally:
            self._current = None
        if not current.done.is_set():
            current.is_cancelled = True
            silence = f"has not answered for {self.limits.gone_s:g} s ({GONE})"
            self.leave(f"went on without the others: the store of the process group {silence}")
            raise LostError(self._unreachable(silence))
        if current.error is not None:
            raise current.error
        return current.contents

    def leave(self, why: str, *, any_line: bool = False) -> None:
        """Say that this rank does not come to the next exchange; it may do so after all. Local.

        Args:
            why: "streaming() was left by ValueError: ...".
            any_line: whether exchanges of whatever group are meant.
        """
        name = ANY_LINE if any_line else self._name
        self._leaves[name] = self._leaves.get(name, 0) + 1
        self._left = name, why
        if self._thread is None:  # else the last life sign will say it
            with self.doing("leaving"):
                pass

    @property
    def num_signs(self) -> int:
        """How many life signs this rank has tried to give: as long as the store answers, one more each second."""
        return self._num_signs

    def warn(self, why: str) -> None:
        """Tell the others at once that this rank will have failed when it comes to the next exchange. Local."""
        self._warning, self._next_look = why, 0.0
        self._work.put(_Exchange())

    # -- the line's own thread -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._sightings, self._lost = {}, {}
        self._next_look, self._answered = 0.0, time.monotonic()
        self._looked = self._answered
        self._work = queue.SimpleQueue()  # of its own: a thread that the store keeps waiting may outlive its time
        self._thread = threading.Thread(target=self._run, args=[self._work], name="lowmem_load-line", daemon=True)
        self._thread.start()

    def _close(self) -> None:
        thread, self._thread = self._thread, None
        self._work.put(None)
        if thread is not None:
            # Not for a store that has been waited for already.
            thread.join(max(0.1, self._answered + self.limits.gone_s - time.monotonic()))

    def _run(self, queued: queue.SimpleQueue[_Exchange | None]) -> None:
        broken: LostError | None = None
        skipped = False
        while True:
            until_look = None if broken is not None else max(0.0, self._next_look - time.monotonic())
            try:
                work = queued.get(timeout=until_look)
            except queue.Empty:
                work = _Exchange()
            if work is None:
                break
            try:
                if broken is not None:
                    raise broken
                if not skipped:
                    self._exchanges.skip_old()
                    skipped = True
                self._carry_on(work)
            except LostError as error:
                work.error = error
            except Exception as error:  # noqa: BLE001  of the store; whoever waits must hear of it
                broken = LostError(self._unreachable(f"cannot be reached: {str(error).partition(chr(10))[0]}"))
                work.error, self.trouble = broken, self.trouble or broken.ranks
            if work is self._current:  # before the caller goes on: the next look must not take this for that
                self._current, self._warning, self._lost, self.trouble = None, "", {}, {}
            work.done.set()  # the caller goes on meanwhile
            with contextlib.suppress(Exception):  # of the store: the next exchange will notice
                self._exchanges.acknowledge()
                if work.contents:
                    self._exchanges.clear(work.number - 1)
        if broken is None:
            with contextlib.suppress(Exception):  # the store is gone: the others will have noticed
                self._say_farewell()

    def _unreachable(self, what: str) -> dict[int, str]:
        sighting = self._sightings.get(0)
        sign = sighting.sign if sighting is not None else None
        if sign is not None and sign.has_ended:
            return {self._members[0]: f"its process ({sign.who}) has ended, {sign.doing}"}
        return {0: f"the store of the process group, which this rank or its launcher holds, {what}"}

    def _carry_on(self, work: _Exchange) -> None:
        work.number, self._lost = self._exchanges.number, {}
        self._look()
        while not work.is_cancelled:
            contents = next(work.steps, [])
            if contents is not None:
                work.contents = contents
                self._answered = time.monotonic()
                return
            now = self._answered = time.monotonic()
            # A twentieth of what was waited so far; and a large group must not wear out the store.
            least_s, most_s = min(2e-5 * len(self._members), 2e-4), 0.02 + 2e-4 * len(self._members)
            time.sleep(min(max(least_s, (now - work.since) / 20), most_s))
            self._look()
        if self._rank == 0 and self._left is not None:
            leaves = {self._name: self._leaves[self._name]}
            self._exchanges.settle_without(work.number, {self._members[0]: self._left[1]}, leaves)

    def _look(self) -> None:
        """Give a life sign, and look at those of others, if it is time."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._watched_s += min(now - self._looked, 2 * SIGN_EVERY_S)
        self._looked, self._next_look = now, now + SIGN_EVERY_S
        self._store.set(_sign_key(self._members[self._rank]), self._sign().encoded())
        if self._rank == 0:
            others = range(1, len(self._members))
            self._lost = self._troubles([others[(self._num_looks + n) % len(others)] for n in others[:LOOKS_PER_S]])
            self._num_looks += min(LOOKS_PER_S, len(others))
            if self._lost and self._current is None:
                self._exchanges.warn(self._exchanges.number, self._lost)
        else:
            self._lost = self._troubles([0])
        current = self._current
        if self._warning:
            number = self._exchanges.number if current is None or current.number < 0 else current.number
            self._exchanges.warn(number, {self._members[self._rank]: self._warning})
        heard = dict(self._lost or self._exchanges.warning())
        heard.pop(self._members[self._rank], None)
        self.trouble = self.trouble or heard

    def _sign(self) -> LifeSign:
        self._num_signs += 1
        steps = tuple(self._steps)  # the caller's thread goes on meanwhile
        step, progress = steps[-1] if steps else ("", None)
        at = progress() if progress is not None else None
        line, why = self._left or (self._name, "")
        return LifeSign(
            count=self._num_signs,
            state=IDLE if not steps else WAITING if self._current else BUSY,
            step=step,
            detail=at.detail if at else "",
            mark=f"{self._exchanges.number} {step} {at.amount if at else ''}",
            is_measured=at is not None,
            line=line,
            number=self._exchanges.number,
            leaves=self._leaves.get(line, 0),
            left=why,
            session=self._exchanges.session,
            pid_space=pid_space(),
            pid=os.getpid(),
            started=started(os.getpid()) or "",
            host=platform.node(),
        )

    def _troubles(self, ranks: Sequence[int]) -> dict[int, str]:
        current = self._current
        waited_s = None if current is None else time.monotonic() - current.since
        number = self._exchanges.number if current is None else current.number
        position = Position(self._name, self._exchanges.session, number, self._leaves)
        found = {}
        for rank in ranks:
            trouble = self._sight(rank).trouble(self._watched_s, self.limits, waited_s, position)
            if trouble:
                found[self._members[rank]] = trouble
        return found

    def _sight(self, rank: int) -> Sighting:
        """Return what this rank has seen of another, its latest life sign included."""
        sighting = self._sightings.setdefault(rank, Sighting())
        key = _sign_key(self._members[rank])
        if self._store.check([key]):
            sign = LifeSign.decoded(self._store.get(key))
            sighting.note(sign, self._watched_s)
            if rank == 0 and sign.line == self._name and sign.state != IDLE and sign.session != self._exchanges.session:
                self._exchanges.join(sign.session)
        return sighting

    def _collect(self, current: _Exchange) -> Iterator[list[str] | None]:
        """Carry on an exchange on the first rank."""
        number, exchanges, others = current.number, self._exchanges, range(1, len(self._members))
        while not exchanges.have_given(number, others):
            lost = {
                rank: why
                for rank, why in self._lost.items()
                if not exchanges.have_given(number, [self._members.index(rank)])
            }
            if lost or exchanges.is_settled(number):
                yield exchanges.settle_without(number, lost, self._leaves_of(lost))
            yield None
        found = exchanges.settle_with(number, [current.content, *(exchanges.given(number, rank) for rank in others)])
        yield found

    def _submit(self, current: _Exchange) -> Iterator[list[str] | None]:
        """Carry on an exchange on another rank."""
        told = ""  # the session in which this rank has contributed
        number, exchanges = current.number, self._exchanges
        while not told or not exchanges.is_settled(number):
            if not told:
                self._sight(0)
            if exchanges.session != told:
                told, number = exchanges.session, exchanges.number
                current.number = number
                exchanges.give(number, current.content)
                if current.is_cancelled:  # the store took so long that the caller has gone on
                    return
                exchanges.number = number + 1
            if self._lost:
                break
            yield None
        if not told:  # the first rank was never there
            exchanges.take_leaves(self._leaves_of(self._lost))
            raise LostError(self._lost)
        contents = exchanges.settle_without(number, self._lost, self._leaves_of(self._lost))
        if contents[self._rank] != current.content:
            late = "came too late: the others have gone on with what it had said before it gave them up"
            raise LostError({self._members[self._rank]: late})
        yield contents

    def _leaves_of(self, lost: Iterable[int]) -> dict[str, int]:
        """Return how often ranks that are given up have gone away, by line: that is settled now."""
        signs = [self._sightings[self._members.index(rank)].sign for rank in lost]
        return {sign.line: sign.leaves for sign in signs if sign is not None and sign.left}

    def _say_farewell(self) -> None:
        self._exchanges.wait_until_read(min(FAREWELL_S, self.limits.gone_s))
        self._store.set(_sign_key(self._members[self._rank]), self._sign().encoded())


def _sign_key(rank_in_world: int) -> str:
    """Return where a rank's life signs are: the same for all its groups."""
    return f"sign {rank_in_world}"
