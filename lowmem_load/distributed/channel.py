"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers.
- Each rank has one key, its heartbeat: in which step it is, how far, and, when it has done its part, its entry.
- Each step has one key, its verdict. compare_set writes it, so the first one counts. The leader, the group's first
  rank, writes it when it has read all entries. Who gives up another rank or itself, or leaves the step, writes that
  instead. It stays for ranks that come later.
- The leader watches the heartbeats of all ranks, the others that of the leader. All look for the verdict, and for the
  key that a rank writes when it fails: then busy ranks stop.
- With its verdict a step is over, and all ranks go on to the next number. So a load that failed may be tried again.
- An entry says that the rank has read the verdict before. So when all entries are there, that may go.

[Note: nested steps] A step of some ranks may lie within one of more ranks. If the outer one fails, a rank in the inner
one gives that up: it may wait there for the rank that failed, which waits for it in the outer one.

[Note: loops] A rank may leave a loop that all ranks began, alone or with all others, at any time. So it does not write
the verdict on a step, to which nobody may come, but a key that says that it has left. A step of the loop to which
others come fails with that. If this rank comes to another step meanwhile, which has the same number, it goes on to the
next number, as the others do.

[Note: one thread] A call of the store may take for ever, and no signal interrupts it. So one thread makes all calls,
and the caller waits for it in short waits. If it does not come back, the caller goes on without it, and every later
step of this process group fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import queue
import re
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lowmem_load.distributed.peers import (
    GONE,
    NOTICE_S,
    Entry,
    Heartbeat,
    Limits,
    Peer,
    Progress,
    say_who_is_absent,
)
from lowmem_load.errors import LowMemLoadError
from lowmem_load.text import spell_ranks

logger = logging.getLogger(__name__)

BEAT_S, MIN_BEATS = 1.0, 5  # seconds between heartbeats; in how many of them the store must answer at least
POLL_S, POLL_GROWTH = 0.001, 1.05  # seconds before a waiting rank looks, for each 16 ranks; how later pauses grow
PART = 4 * 2**20  # characters of a value: torch's store ends a connection that sends 8 MiB (libuv backend, torch 2.13)
FAREWELL_S = 2.0  # seconds that the leader waits for who has to read its last verdict: the store may end with it
MAX_LEFT = 8  # loops that a rank remembers to have left
MAX_FAILURES = 1_000_000  # characters of all messages of a verdict together, which every rank reads

_NOTHING = "-"  # stands for the value of a key that is not there

# The parts of one error's text that differ between ranks: addresses, and the indices of devices (cuda:1).
_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


class Verdict(NamedTuple):
    """The outcome of a step. JSON data."""

    failures: Sequence[tuple[int, str]] = ()  # ranks of the world that failed, and their messages
    is_alike: bool = False  # whether all ranks failed with the same message
    num_parts: int = 0  # of the payloads of all ranks
    title: str = ""  # of the step, as its leader or a rank that is stuck calls it; "" where another rank has written it
    loop: str = ""  # that the step belonged to, where it failed because a rank has left that
    differs: bool = False  # whether the digests of the ranks differ, and nothing else is wrong


def verdict_on(entries: Mapping[int, Entry]) -> Verdict:
    """Return the verdict on the entries of all ranks, by rank in the world, in the group's order.

    Errors count before different titles, and those before different digests. A rank that stopped because of another
    one is named only if no other rank failed.
    """
    errors = {rank: entry.error for rank, entry in entries.items() if entry.error is not None}
    failures = (
        {rank: error for rank, error in errors.items() if not entries[rank].is_stopped}
        or errors
        or differences("is at", "are at", {rank: repr(entry.title) for rank, entry in entries.items()})
    )
    texts = {_OF_ONE_PROCESS.sub("#", error) for error in errors.values()}
    max_chars = max(200, MAX_FAILURES // max(1, len(failures)))
    return Verdict(
        failures=[(rank, text[:max_chars]) for rank, text in failures.items()],
        is_alike=len(errors) == len(entries) and len(texts) == 1,
        differs=not failures and len({entry.digest for entry in entries.values()}) > 1,
    )


def differences(this: str, others: str, values: Mapping[int, str]) -> dict[int, str]:
    """Return, of each rank whose value is not that of most, a text that says so."""
    # Of equally frequent values, the lowest rank's is the usual one.
    usual = Counter(values.values()).most_common(1)[0][0]
    where = f"where rank(s) {spell_ranks([rank for rank in values if values[rank] == usual])} {others} {usual}"
    return {rank: f"{this} {value}, {where}" for rank, value in values.items() if value != usual}


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, and this rank's next step. The first one of its members is the leader."""

    name: str  # unique among the groups of the store; prefix of its keys
    members: tuple[int, ...]  # as ranks in the world
    number: int = 0


class _Place(NamedTuple):
    """What this rank does. Two threads use it, so it does not change. Compared by identity."""

    group: Group
    title: str = ""  # "" between loads
    progress: weakref.ref[Callable[[], Progress]] | None = None  # a thread that hangs must not keep what it refers to
    number: int = 0
    entry: Entry | None = None
    since_s: float = 0.0

    @property
    def step(self) -> tuple[str, int]:
        """Name of the group and number of the step."""
        return self.group.name, self.number

    @property
    def key(self) -> str:
        """The key of the verdict."""
        return f"{self.group.name}/{self.number}"


class StoreChannel:
    """Steps and heartbeats of one rank of the world. One thread at a time may use it, but for `check`.

    Args:
        open_client: returns a client of the store for the channel's thread, in which it runs; it may wait.
        rank: of this process in the world.
        limits: how long it waits.
        beat_s: seconds between heartbeats.
        welcome: called with the ranks of which nothing has been heard, in the channel's thread.
    """

    def __init__(
        self,
        open_client: Callable[[], Any],
        rank: int,
        limits: Limits | None = None,
        beat_s: float = BEAT_S,
        welcome: Callable[[Sequence[int]], object] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._open_client, self._rank, self._beat_s, self._welcome = open_client, rank, beat_s, welcome
        self._store: Any = None
        self._who = f"pid {os.getpid()} on {platform.node()}"
        self._groups: dict[str, Group] = {}
        self._blocks: list[_Place] = []  # that the caller is in
        self._place = self._failing = _Place(Group("", (rank,)))  # where it is; where it was when it heard of a failure
        self._questions = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], Any] | None]()
        self._broken = ""  # what is wrong with the store
        self._unanswered_s, self._counted_s = 0.0, time.monotonic()  # see `_note_silence`
        self._waited_s, self._notice_s = 0.0, 0.0  # for the other ranks, and until the next notice of who is absent
        self._still_s = 0.0  # without progress
        self._last: tuple[_Place, int | None] | None = None  # where this rank was, and how far, at its last beat
        self._num_beats = 0
        self._left: tuple[str, ...] = ()  # loops
        self._peers: dict[int, Peer] = {}
        self._thread = threading.Thread(target=self._run, name="lowmem_load-store", daemon=True)

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        return self._groups.setdefault(name, Group(name, members))

    @contextlib.contextmanager
    def doing(self, group: Group, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        depth = len(self._blocks)
        try:
            self._blocks.append(_Place(group, title, progress and weakref.ref(progress)))
            logger.debug("rank %d: begins %r, of %s/%d", self._rank, title, group.name, group.number)
            place = self._move(self._blocks[-1])
            if not depth:
                self._ask(self._send_heartbeat, place)  # should this rank end at once, the others know it had come
            yield
        finally:
            del self._blocks[depth:]
            place = self._move(self._blocks[-1] if depth else _Place(group))
            if not depth:
                self._ask(self._part, place)

    def agree(
        self, group: Group, entry: Entry, payload: str = "", *, leaves: bool = False
    ) -> tuple[Verdict, list[str]]:
        """Bring an entry to the group's next step; return the verdict, and the payloads of all ranks if one has any.

        Collective, within `doing`. A rank that `leaves` the step fails it, unless the step is over, and does not wait.
        """
        self._waited_s, self._notice_s = 0.0, NOTICE_S
        pause_s = POLL_S * max(1.0, len(group.members) / 16)
        num_parts = self._ask(self._write_parts, f"rank/{self._rank}", payload) if payload else 0
        place = self._move(self._blocks[-1], entry._replace(num_parts=num_parts))
        logger.debug("rank %d: at step %s, %r: %s", self._rank, place.key, entry.title, entry.error or "done")
        self._ask(self._send_heartbeat, place)
        content = self._ask(self._look, place, leaves)
        while not content and not self._broken:
            time.sleep(pause_s)
            pause_s = min(self._beat_s, POLL_GROWTH * pause_s)
            content = self._ask(self._look, place, leaves)
        verdict = Verdict(*json.loads(content or "[]"))
        logger.debug("rank %d: %s is over: %s", self._rank, place.key, verdict.failures or "go on")
        payloads = self._ask(self._read_parts, f"{group.name}/payloads", verdict.num_parts)
        if self._broken:
            return Verdict([(0, self._broken)]), []
        group.number += 1
        self._move(self._blocks[-1])
        if verdict.loop in self._left:  # it was a step of others
            return self.agree(group, entry, payload, leaves=leaves)
        return verdict, json.loads(payloads or "[]")

    def abort(self, group: Group, why: str) -> None:
        """Say that this rank does not come to the group's next step. Local."""
        if self._thread.ident and self._store is None:
            self._break("was not reached yet")
            return
        with self.doing(group, "leaving"):
            while not self.agree(group, Entry("", why), leaves=True)[0].failures:
                pass  # that step ended well before this rank could say it

    def leave(self, loop: str, why: str) -> None:
        """Say that this rank comes to no further step of a loop. Local; for finalizers, which may run in any thread.

        So it waits for nothing. Steps of the loop fail that other ranks come to. See [Note: loops].
        """
        self._left = (*self._left[1 - MAX_LEFT :], loop)
        said = f"left/{loop}", "", json.dumps([self._rank, why])
        self._questions.put((Future(), lambda: self._store.compare_set(*said), ()))

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        if self._blocks:
            self._note_silence()
            if self._broken or self._failing is self._place:
                raise StoppedError("stopped because another rank has failed")

    @property
    def is_broken(self) -> bool:
        """Whether the caller has gone on without the store."""
        return bool(self._broken)

    def note_answer(self) -> None:
        """Note that the store has answered: for `open_client`, while it waits."""
        self._unanswered_s = 0.0

    def end(self) -> None:
        """End the thread."""
        self._questions.put(None)

    def _move(self, block: _Place, entry: Entry | None = None) -> _Place:
        self._place = block._replace(number=block.group.number, entry=entry, since_s=time.monotonic())
        return self._place

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns in the thread; None if the store is broken."""
        if not self._thread.ident:
            self._thread.start()
        answer = Future[Any]()
        self._questions.put((answer, function, arguments))
        while not self._broken:
            with contextlib.suppress(TimeoutError):
                return answer.result(self._beat_s)
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
            self._break(f"has not answered for {self.limits.gone_s:g} s ({GONE})")

    def _break(self, what: str) -> None:
        self._broken = self._broken or f"the store of the process group, which this rank or its launcher holds, {what}"

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_s = 0.0
        try:
            self._store = self._open_client()
            # Torch's own groups do not form in keys that are in use; and here are the verdicts of other steps.
            token = secrets.token_hex(8)
            if self._store.compare_set(f"used/{self._rank}", "", token).decode() != token:
                raise LowMemLoadError(
                    "the store of the process group has been used by an earlier one: give each a store of its own, or "
                    "a prefix"
                )
            while not self._broken:
                self.note_answer()
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + self._beat_s
                    self._beat(self._place)
                with contextlib.suppress(queue.Empty):
                    question = self._questions.get(timeout=max(0.0, next_s - time.monotonic()))
                    if question is None:
                        return
                    answer, function, arguments = question
                    if not self._broken:
                        answer.set_result(function(*arguments))
            # The caller has gone on, and the store is back.
            self._decide(self._place, Verdict([(self._rank, f"went on without the others: {self._broken}")]))
        except LowMemLoadError as error:
            self._broken = self._broken or str(error)
        except Exception as error:  # noqa: BLE001  such as MemoryError: the caller must hear of it, and why
            text, _, _ = str(error).partition("\n")
            self._break(f"cannot be reached or used: {type(error).__name__}: {text}")

    def _beat(self, place: _Place) -> None:
        """Send a heartbeat. Give up ranks that are lost, note whether the step fails, and say who is absent."""
        if not place.title:
            return
        self._judge_itself(place, self._send_heartbeat(place))
        leader, *followers = place.group.members
        peers = self._read_heartbeats(followers if self._rank == leader else [leader], self._beat_s)
        self._waited_s += self._beat_s
        waited_s = self._waited_s if place.entry else 0.0
        reasons = {rank: peer.why_lost(self.limits, place.group.name, waited_s) for rank, peer in peers.items()}
        if any(reasons.values()):
            self._decide(place, Verdict([(rank, why) for rank, why in reasons.items() if why]))
        self._look_outside(place)
        if place.entry is None:
            if self._fails(place.group):
                self._failing = place
        else:
            if left := self._left_of([place.entry]):
                self._decide(place, left)
            absent = {rank: peer.absence for rank, peer in peers.items() if not peer.is_at(*place.step)}
            if absent and self._waited_s >= self._notice_s:
                self._notice_s *= 2
                say_who_is_absent(self._rank, self._waited_s, f"at {place.title!r}", absent)

    def _judge_itself(self, place: _Place, beat: Heartbeat) -> None:
        """Give up this rank, in all steps that it is in, if it makes no progress. See [Note: lost ranks]."""
        progress = self._progress(place)
        now = place, progress and progress.amount
        if place.entry is not None or self._last != now:
            self._still_s, self._last = 0.0, now
            return
        self._still_s += self._beat_s
        if why := self.limits.why_stuck(beat, self._still_s, is_measured=place.progress is not None):
            for group in {id(block.group): block.group for block in [*self._blocks]}.values():
                # With one title: some ranks may raise in the inner step, and some already in the outer one.
                self._decide(_Place(group, number=group.number), Verdict([(self._rank, why)], title=place.title))

    def _look_outside(self, place: _Place) -> None:
        """Give up a step that lies within one of another group, if that fails. See [Note: nested steps]."""
        for block in [*self._blocks]:
            if block.group is not place.group and self._fails(block.group):
                self._failing = place
                if place.entry is not None:
                    self._decide(place, Verdict([(self._rank, f"stopped because {block.title} has failed")]))

    def _look(self, place: _Place, leaves: bool) -> str:
        """Return the verdict on the step, which this rank writes if it can; "" if there is none."""
        assert place.entry is not None
        if leaves:
            return self._decide(place, Verdict([(self._rank, place.entry.error or "")]))
        leader, *followers = place.group.members
        if self._rank == leader:
            peers = self._read_heartbeats(followers)
            entries = {leader: place.entry}
            entries |= {rank: entry for rank, peer in peers.items() if (entry := peer.entry_at(*place.step))}
            if len(entries) == len(place.group.members):
                self._store.delete_key(f"{place.group.name}/{place.number - 1}")
                verdict = self._left_of(entries.values()) or verdict_on(entries)
                return self._decide(place, self._share_payloads(place, entries, verdict._replace(title=place.title)))
        return peek(self._store, place.key)

    def _left_of(self, entries: Iterable[Entry]) -> Verdict | None:
        """Return the verdict on a step of a loop that a rank has left. See [Note: loops]."""
        for loop in {entry.loop for entry in entries} - {""}:
            if left := peek(self._store, f"left/{loop}"):
                return Verdict([json.loads(left)], loop=loop)
        return None

    def _fails(self, group: Group) -> bool:
        """Return whether a step of a group fails to which this rank has yet to bring its entry."""
        content = peek(self._store, f"{group.name}/{group.number}")
        if content:
            return Verdict(*json.loads(content)).loop not in self._left
        return peek(self._store, f"{group.name}/failed") == str(group.number)

    def _decide(self, place: _Place, verdict: Verdict) -> str:
        """Write the verdict on the step, unless there is one; return the one that counts."""
        logger.debug("rank %d: verdict on %s: %s", self._rank, place.key, verdict.failures or "go on")
        return str(self._store.compare_set(place.key, "", json.dumps(verdict)).decode())

    def _part(self, place: _Place) -> None:
        """Say that this rank does nothing any more; as leader, wait until its verdict is read."""
        self._send_heartbeat(place)
        (leader, *followers), until_s = place.group.members, time.monotonic() + FAREWELL_S
        while self._rank == leader and time.monotonic() < until_s:
            peers = self._read_heartbeats(followers)
            if not any(peer.is_at(place.group.name, place.number - 1) for peer in peers.values()):
                break
            time.sleep(POLL_S)

    def _send_heartbeat(self, place: _Place) -> Heartbeat:
        self._num_beats += 1
        progress, seconds = self._progress(place), int(time.monotonic() - place.since_s)
        detail = progress.detail if progress else ""
        beat = Heartbeat(self._who, *place.step, place.title, detail, seconds, self._num_beats, place.entry)
        self._store.set(f"rank/{self._rank}", json.dumps(beat))
        if place.entry and place.entry.error is not None:
            self._store.set(f"{place.group.name}/failed", str(place.number))
        return beat

    @staticmethod
    def _progress(place: _Place) -> Progress | None:
        report = place.progress and place.progress()
        with contextlib.suppress(Exception):  # of other code; the step itself goes on
            return report() if report else None
        return None

    def _read_heartbeats(self, ranks: Sequence[int], seconds: float = 0.0) -> dict[int, Peer]:
        """Read what ranks wrote last, so many seconds after the last time that counted."""
        for rank in ranks:
            if rank not in self._peers:  # multi_get waits for keys that are not there
                self._store.compare_set(f"rank/{rank}", "", _NOTHING)
                self._peers[rank] = Peer()
        contents = self._store.multi_get([f"rank/{rank}" for rank in ranks]) if ranks else []
        for rank, content in zip(ranks, contents, strict=True):
            if content.decode() != _NOTHING:
                self._peers[rank].note(Heartbeat.decoded(content.decode()), seconds)
        self.note_answer()
        missing = [rank for rank in ranks if self._peers[rank].heartbeat is None]
        if missing and self._welcome:
            self._welcome(missing)
        return {rank: self._peers[rank] for rank in ranks}

    def _share_payloads(self, place: _Place, entries: Mapping[int, Entry], verdict: Verdict) -> Verdict:
        """Write the payloads of all ranks, if there is one, where all can read them at once."""
        if verdict.failures or verdict.differs or not any(entry.num_parts for entry in entries.values()):
            return verdict
        payloads = [self._read_parts(f"rank/{rank}", entry.num_parts) for rank, entry in entries.items()]
        return verdict._replace(num_parts=self._write_parts(f"{place.group.name}/payloads", json.dumps(payloads)))

    def _write_parts(self, key: str, text: str) -> int:
        """Write a text of any length; return the number of its parts. Parts are read before they are written again."""
        parts = [text[start : start + PART] for start in range(0, len(text), PART)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)
        return len(parts)

    def _read_parts(self, key: str, num_parts: int) -> str:
        keys = [f"{key}/{number}" for number in range(num_parts)]
        parts = self._store.multi_get(keys) if keys else []
        self.note_answer()  # other parts may follow
        return "".join(part.decode() for part in parts)


def peek(store: Any, key: str) -> str:
    """Return the value of a key, "" if it is not there. `get` would wait for it."""
    value = str(store.compare_set(key, _NOTHING, _NOTHING).decode())
    return "" if value == _NOTHING else value


class Seen(NamedTuple):
    """What a rank wrote last, seen from outside of its job."""

    group: str  # prefix of the process group's keys
    rank: int
    heartbeat: Heartbeat
    is_silent: bool  # whether no heartbeat came while this process looked


def look_into(host: str, port: int, looks_s: float = 3 * BEAT_S) -> list[Seen]:
    """Return what the ranks of a job do, by the store in which their process groups meet."""
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise LowMemLoadError(f"no store of torch.distributed answers at {host}:{port}") from error
    if not hasattr(store, "list_keys"):
        raise LowMemLoadError("this release of torch cannot list the keys of a store; 2.13 can")
    found = [re.fullmatch(r"(.*lowmem_load/.*?)rank/(\d+)", key) for key in store.list_keys()]
    keys = sorted((match[1], int(match[2])) for match in found if match)

    def look() -> list[bytes]:
        return [store.get(f"{group}rank/{rank}") for group, rank in keys]

    before = look()
    time.sleep(looks_s)
    now = look()
    return [
        Seen(group, rank, Heartbeat.decoded(content.decode()), is_silent=content == earlier)
        for (group, rank), content, earlier in zip(keys, now, before, strict=True)
        if content.decode() != _NOTHING
    ]
