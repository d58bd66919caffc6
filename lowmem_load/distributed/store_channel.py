"""Agreement of ranks through the store of torch.distributed: steps with a verdict, and heartbeats.

A collective cannot say who is late, and fails only with its group's timeout. Through the store all ranks learn which
rank failed, ended or got stuck, whatever they do meanwhile.

[Note: steps] The steps of a group are numbered, and all ranks pass the same numbers.
- Each rank has one key, its heartbeat: in which step it is, how far, and, when it has done its part, its entry.
- Each step has one key, its verdict. compare_set writes it, so the first one counts. The leader, the group's first
  rank, writes it when it has read all entries. Who gives up another rank, or leaves the step, writes that instead.
- The leader watches the heartbeats of all ranks, the others that of the leader. All look for the verdict, and for the
  key that a rank writes when it fails: then busy ranks stop.
- With its verdict a step is over, and all ranks go on to the next number. So a load that failed may be tried again.
- An entry says that the rank has read all of the steps before. So when all entries are there, older keys may go.

[Note: lives] A store may outlive its groups, as that of torchrun's agent does, and has what ranks of an earlier group
wrote, with the same numbers of steps. Ranks may have made different numbers of groups before this one. So each rank
draws a token, and the steps of a group have that of its leader in their keys. A rank that comes to its first step of a
group does not know it: it writes its own token in its heartbeat, and the leader answers under this token. Whoever
writes a leader's token into a heartbeat has met it, and is of this life. Until then a rank has the group for itself.

[Note: loops] A rank may leave a loop that all ranks began, alone or with all others, at any time. So it does not write
the verdict on a step, to which nobody may come, but has in its heartbeats that it has left. A step of the loop to which
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
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowmem_load.distributed.absence import NOTICE_S, absent_text, say_who_is_absent
from lowmem_load.distributed.heartbeat import GONE, Heartbeat, Limits, Peer, Progress
from lowmem_load.distributed.verdict import Entry, Verdict, verdict_on

logger = logging.getLogger(__name__)

BEAT_S, MIN_BEATS = 1.0, 5  # seconds between heartbeats; in how many of them the store must answer at least
POLL_S, POLL_GROWTH = 0.001, 1.05  # seconds before a waiting rank looks, for each 16 ranks; how later pauses grow
PART = 4 * 2**20  # characters of a value: torch's store ends a connection that sends 8 MiB (libuv backend, torch 2.13)
FAREWELL_S = 2.0  # seconds that the leader waits for who has to read its last verdict: the store may end with it
MAX_LEFT = 8  # loops that a rank remembers to have left
_NOTHING = "-"  # stands for the value of a key that is not there


class StoppedError(BaseException):
    """Ends this rank's part of a step because another rank has failed; the verdict says how."""


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks, and this rank's next step. The first one of its members is the leader."""

    name: str  # unique among the groups of this life
    members: tuple[int, ...]  # as ranks in the world
    life: str  # the leader's token; this rank's own until it has met the leader
    number: int = 0
    num_deleted: int = 0  # verdicts, which the leader deletes

    @property
    def key(self) -> str:
        """Prefix of its keys. See [Note: lives]."""
        return f"{self.name}/{self.life}"

    def is_led_by(self, rank: int) -> bool:
        """Return whether this rank of the world is its leader."""
        return rank == self.members[0]


class _Place(NamedTuple):
    """What this rank does. Two threads use it, so it does not change. Compared by identity."""

    group: Group
    title: str = ""  # "" between loads
    progress: weakref.ref[Callable[[], Progress]] | None = None  # a thread that hangs must not keep what it refers to
    number: int = 0
    entry: Entry | None = None

    @property
    def step(self) -> tuple[str, int]:
        """Key of the group and number of the step."""
        return self.group.key, self.number

    @property
    def key(self) -> str:
        """The key of the verdict."""
        return f"{self.group.key}/{self.number}"


class StoreChannel:
    """Steps and heartbeats of one rank of the world. One thread at a time may use it, but for `check`."""

    def __init__(
        self,
        open_client: Callable[[], Any],
        rank: int,
        limits: Limits | None = None,
        beat_s: float = BEAT_S,
        is_live: Callable[[], bool] = lambda: True,
    ) -> None:
        self.limits = limits or Limits()
        self._open_client, self._rank, self._beat_s, self._is_live = open_client, rank, beat_s, is_live
        self._who = f"pid {os.getpid()} on {platform.node()}"
        self._token = secrets.token_hex(8)
        self._leaders = {rank: self._token}  # tokens of the leaders that it has met
        self._answered, self._met = set[str](), {rank}  # tokens to which it has told its own; ranks that know it
        self._groups: dict[str, Group] = {}
        self._blocks: list[_Place] = []  # that the caller is in
        nowhere = _Place(Group("", (rank,), self._token))
        self._place = self._failing = nowhere  # where it is; where it was when it heard of a failure
        self._last_words = nowhere  # why it has left a step, for those that come later
        self._questions = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], Any] | None]()
        self._broken = ""  # what is wrong with the store
        self._unanswered_s, self._counted_s = 0.0, time.monotonic()  # see `_note_silence`
        self._waited_s, self._notice_s = 0.0, 0.0  # for the other ranks, and until the next notice of who is absent
        self._num_beats = 0
        self._left: Mapping[str, str] = {}  # loops, and why
        self._peers: dict[int, Peer] = {}
        self._thread = threading.Thread(target=self._run, name="lowmem_load-store", daemon=True)

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of this name."""
        return self._groups.setdefault(name, Group(name, members, self._leaders.get(members[0], self._token)))

    @contextlib.contextmanager
    def doing(self, group: Group, title: str, progress: Callable[[], Progress] | None = None) -> Iterator[None]:
        """Send heartbeats within the block, with its title and progress. Blocks nest."""
        depth = len(self._blocks)
        try:
            self._blocks.append(_Place(group, title, progress and weakref.ref(progress)))
            logger.debug("rank %d: begins %r, of %s/%d", self._rank, title, group.key, group.number)
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
        payloads = self._ask(self._read_parts, f"{group.key}/payloads", verdict.num_parts)
        if self._broken:
            return Verdict([(0, self._broken)]), []
        if verdict.failures and not self._has_met(group):
            rank, why = verdict.failures[0]
            error = why if rank == self._rank else f"went on without the others: rank {rank} {why}"
            self._last_words = place._replace(entry=entry._replace(error=error))
        group.number += 1
        self._move(self._blocks[-1])
        if verdict.loop in self._left:  # it was a step of others
            return self.agree(group, entry, payload, leaves=leaves)
        return verdict, json.loads(payloads or "[]")

    def abort(self, group: Group, why: str) -> None:
        """Say that this rank does not come to the group's next step. Local."""
        with self.doing(group, "leaving"):
            while not self.agree(group, Entry("", why), leaves=True)[0].failures:
                pass  # that step ended well before this rank could say it

    def leave(self, loop: str, why: str) -> None:
        """Say that this rank comes to no further step of a loop. Local; for finalizers, which may run in any thread.

        So it waits for nothing. Steps of the loop fail that other ranks come to. See [Note: loops].
        """
        self._left = {**dict([*self._left.items()][1 - MAX_LEFT :]), loop: why}
        self._questions.put((Future(), lambda: self._send_heartbeat(self._place), ()))

    def check(self) -> None:
        """Raise StoppedError if another rank has failed, or if the store is silent. Local; any thread."""
        if self._blocks:
            self._note_silence()
            if self._broken or self._failing is self._place:
                raise StoppedError("stopped because another rank has failed")

    def end(self) -> None:
        """End the thread."""
        self._questions.put(None)

    def _move(self, block: _Place, entry: Entry | None = None) -> _Place:
        self._place = block._replace(number=block.group.number, entry=entry)
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
            while not self._broken:
                self._unanswered_s = 0.0
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
        except Exception as error:  # noqa: BLE001  such as MemoryError: the caller must hear of it, and why
            text, _, _ = str(error).partition("\n")
            self._break(f"cannot be reached or used: {type(error).__name__}: {text}")

    def _beat(self, place: _Place) -> None:
        """Send a heartbeat. Give up ranks that are lost, note whether the step fails, and say who is absent."""
        for group in [group for group in list(self._groups.values()) if group.is_led_by(self._rank)]:
            if not self._has_met(group) and self._is_live():  # it may have left before they came
                self._read_heartbeats(group, group.members[1:])
        if not place.title:
            return
        self._meet(place.group)
        self._send_heartbeat(place)
        leader, *followers = place.group.members
        peers = self._read_heartbeats(place.group, followers if self._rank == leader else [leader], self._beat_s)
        self._waited_s += self._beat_s
        waited_s = self._waited_s if place.entry else None
        reasons = {rank: peer.why_lost(self.limits, place.step, waited_s) for rank, peer in peers.items()}
        if any(reasons.values()):
            self._decide(place, Verdict([(rank, why) for rank, why in reasons.items() if why]))
        if place.entry:
            self._look_for_leavers(place, {self._rank: place.entry}, peers)
        elif self._has_failed(place):
            self._failing = place
        if place.entry and self._waited_s >= self._notice_s:
            self._notice_s *= 2
            absent = {rank: peer.absence for rank, peer in peers.items() if not peer.is_at(place.step)}
            if absent:
                say_who_is_absent(self._rank, self._waited_s, f"at {place.title!r}", absent_text(absent))

    def _look(self, place: _Place, leaves: bool) -> str:
        """Return the verdict on the step, which this rank writes if it can; "" if there is none."""
        assert place.entry is not None
        leader, *followers = place.group.members
        until_s = time.monotonic() + FAREWELL_S
        while not self._meet(place.group, place) and leaves and self._rank != leader and time.monotonic() < until_s:
            time.sleep(self._beat_s / 10)
        if leaves:
            return self._decide(place, Verdict([(self._rank, place.entry.error or "")]))
        if self._rank == leader:
            peers = self._read_heartbeats(place.group, followers)
            entries = {leader: place.entry}
            entries |= {rank: entry for rank, peer in peers.items() if (entry := peer.entry_at(place.step))}
            self._look_for_leavers(place, entries, peers)
            if len(entries) == len(peers) + 1:
                while place.group.num_deleted < place.number:
                    self._store.delete_key(f"{place.group.key}/{place.group.num_deleted}")
                    place.group.num_deleted += 1
                verdict = verdict_on(entries)._replace(title=place.title)
                return self._decide(place, self._share_payloads(place, entries, verdict))
        return self._peek(place.key)

    def _look_for_leavers(self, place: _Place, entries: Mapping[int, Entry], peers: Mapping[int, Peer]) -> None:
        """Fail a step of a loop that ranks have left. See [Note: loops]."""
        left = {self._rank: self._left, **{rank: peer.heartbeat.left for rank, peer in peers.items() if peer.heartbeat}}
        for loop in {entry.loop for entry in entries.values()}:
            if failures := [(rank, loops[loop]) for rank, loops in left.items() if loop in loops]:
                self._decide(place, Verdict(failures, loop=loop))

    def _has_failed(self, place: _Place) -> bool:
        """Return whether a step fails that this rank is busy with."""
        content = self._peek(place.key)
        if content and Verdict(*json.loads(content)).loop in self._left:
            return False
        return bool(content) or self._peek(f"{place.group.key}/failed") == str(place.number)

    def _decide(self, place: _Place, verdict: Verdict) -> str:
        """Write the verdict on the step, unless there is one; return the one that counts."""
        logger.debug("rank %d: verdict on %s: %s", self._rank, place.key, verdict.failures or "go on")
        return str(self._store.compare_set(place.key, "", json.dumps(verdict)).decode())

    def _part(self, place: _Place) -> None:
        """Say that this rank does nothing any more, or why it has left; as leader, wait until its verdict is read."""
        group, until_s = place.group, time.monotonic() + FAREWELL_S
        has_left = self._last_words.group is group and not self._has_met(group)
        self._send_heartbeat(self._last_words if has_left else place)
        while group.is_led_by(self._rank) and time.monotonic() < until_s:
            peers = self._read_heartbeats(group, group.members[1:])
            if not any(peer.is_at((group.key, place.number - 1)) for peer in peers.values()):
                break
            time.sleep(POLL_S)

    def _send_heartbeat(self, place: _Place) -> None:
        self._num_beats += 1
        report, progress = place.progress and place.progress(), None
        with contextlib.suppress(Exception):  # of other code; the step itself goes on
            progress = report() if report else None
        amount, detail = progress or (None, "")
        where = place.group.key, place.number, place.title
        known = self._token, [*self._leaders.values()], self._left
        beat = Heartbeat(self._who, *where, amount, place.entry, detail, self._num_beats, *known)
        self._store.set(f"rank/{self._rank}", json.dumps(beat))
        if place.entry and place.entry.error is not None:
            self._store.set(f"{place.group.key}/failed", str(place.number))

    def _has_met(self, group: Group) -> bool:
        """Return whether this rank has met the leader of a group, or as leader all of its members."""
        return self._met.issuperset(group.members) if group.is_led_by(self._rank) else group.life != self._token

    def _meet(self, group: Group, place: _Place | None = None) -> bool:
        """Look whether the leader of a group has answered; then send the heartbeat of the place anew."""
        leader = group.members[0]
        if leader != self._rank and not self._has_met(group):
            if leader not in self._leaders and (life := self._peek(f"life/{leader}/{self._token}")):
                self._leaders[leader] = life
            group.life = self._leaders.get(leader, self._token)
            if self._has_met(group) and place is not None:
                self._send_heartbeat(place)
        return self._has_met(group)

    def _read_heartbeats(self, group: Group, ranks: Sequence[int], seconds: float = 0.0) -> dict[int, Peer]:
        """Read what ranks wrote last, so many seconds after the last time that counted; as leader, answer new ones."""
        for rank in ranks:
            if rank not in self._peers:  # multi_get waits for keys that are not there
                self._store.compare_set(f"rank/{rank}", "", _NOTHING)
                self._peers[rank] = Peer()
        contents = self._store.multi_get([f"rank/{rank}" for rank in ranks]) if ranks else []
        for rank, content in zip(ranks, contents, strict=True):
            if content.decode() != _NOTHING:
                beat = Heartbeat.decoded(content.decode())
                self._peers[rank].note(beat, seconds, is_met=group.life in beat.lives)
                if group.is_led_by(self._rank):
                    self._answer(rank, beat)
        self._unanswered_s = 0.0
        return {rank: self._peers[rank] for rank in ranks}

    def _answer(self, rank: int, beat: Heartbeat) -> None:
        """Tell a rank this leader's token; the heartbeat may be of an earlier life. See [Note: lives]."""
        if self._token in beat.lives:
            self._met.add(rank)
        elif beat.token not in self._answered:
            self._answered.add(beat.token)
            self._store.set(f"life/{self._rank}/{beat.token}", self._token)

    def _share_payloads(self, place: _Place, entries: Mapping[int, Entry], verdict: Verdict) -> Verdict:
        """Write the payloads of all ranks, if there is one, where all can read them at once."""
        if verdict.failures or not any(entry.num_parts for entry in entries.values()):
            return verdict
        payloads = [self._read_parts(f"rank/{rank}", entry.num_parts) for rank, entry in entries.items()]
        return verdict._replace(num_parts=self._write_parts(f"{place.group.key}/payloads", json.dumps(payloads)))

    def _write_parts(self, key: str, text: str) -> int:
        """Write a text of any length; return the number of its parts. Parts are read before they are written again."""
        parts = [text[start : start + PART] for start in range(0, len(text), PART)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)
        return len(parts)

    def _read_parts(self, key: str, num_parts: int) -> str:
        keys = [f"{key}/{number}" for number in range(num_parts)]
        parts = self._store.multi_get(keys) if keys else []
        self._unanswered_s = 0.0  # other parts may follow
        return "".join(part.decode() for part in parts)

    def _peek(self, key: str) -> str:
        """Return the value of a key, "" if it is not there. `get` would wait for it."""
        value = str(self._store.compare_set(key, _NOTHING, _NOTHING).decode())
        return "" if value == _NOTHING else value
