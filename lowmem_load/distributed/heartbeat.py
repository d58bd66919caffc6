"""Heartbeats: what a rank writes about itself each second, and how another rank judges it by them. Pure but for /proc.

[Note: lost ranks] Clocks of different machines are never compared: a rank counts the seconds in which it saw no change.
- A process of the same machine can be looked up, so its end is known at once. A lookup counts only after one found that
  very process, with its start time: clones of one virtual machine have equal boot ids and process numbers.
- A process that cannot be looked up is lost when its heartbeats stop. They come from a thread, which may wait for the
  interpreter's lock; so the limit is `BUSY_FACTOR` times as long for a rank that runs code as for one that waits.
- A rank whose heartbeats come but which makes no progress may wait for a file server, so it gets much longer. Progress
  is what the step reports, such as bytes read. A step that runs other people's code, which may download or compile,
  reports none, and gets as long as the process group gives a collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lowmem_load.distributed.environment import positive_number
from lowmem_load.distributed.nodes import pid_space, start_time
from lowmem_load.distributed.verdict import Entry

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Environment variables that set the limits of the same names, seconds."""

SAME_ORDER = "all ranks have to do the same loads and saves in the same order"

NO_CALL = "has not called lowmem_load"
"""What is known of a rank that has sent no heartbeat."""

BUSY_FACTOR = 1.5
"""A busy rank may send no heartbeat for this many times as long as one that waits; see [Note: lost ranks]."""


class Progress(NamedTuple):
    """How far a step is."""

    amount: int  # grows as the step makes progress
    detail: str  # for messages: "512.0 MiB read, model-00003.safetensors"


def computing() -> Callable[[], Progress]:
    """Return the progress of a step that only computes, in the calling thread: the processor time of the thread."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def progress() -> Progress:
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # not Linux
            return Progress(int(time.process_time() * 10), "")
        return Progress((int(fields[11]) + int(fields[12])) // 10, "")  # utime, stime in ticks of 10 ms, see proc(5)

    return progress


class Limits(NamedTuple):
    """How long a rank waits for others, seconds."""

    silence_s: float = 300.0  # for a rank that sends heartbeats but makes no progress
    gone_s: float = 11.0  # for a rank that sends no heartbeats and cannot be looked up, and for the store
    absence_s: float = 1800.0  # for a rank that has not come to the step
    is_prompt: bool = False  # see `RankGroup.step`

    @classmethod
    def from_environment(cls, absence_s: float, *, is_prompt: bool = False) -> Limits:
        """Return the limits that the environment sets, else the defaults."""
        silence_s = positive_number(SILENCE, cls().silence_s, "seconds")
        gone_s = positive_number(GONE, cls().gone_s, "seconds")
        return cls(silence_s, gone_s, silence_s if is_prompt else absence_s, is_prompt)


class Heartbeat(NamedTuple):
    """What a rank writes about itself."""

    num_beats: int  # that it has written so far, this one included
    title: str  # of its step; "" between loads
    detail: str  # how far that is, for messages
    amount: int | None  # how far that is; None where the step does not report it
    group: str  # name of the group of the step
    number: int  # of the step in the group
    entry: Entry | None  # that this rank brings to the step; None until it has done its part
    failed: Sequence[int]  # ranks that failed in this step, as far as this rank knows
    pid_space: str  # this and the next two identify the process; see `nodes.py`
    pid: int
    started: str
    host: str
    absent: str = ""  # which ranks this one waits for, and what they do; see `StoreChannel`

    @classmethod
    def decoded(cls, content: str) -> Heartbeat:
        """Return the heartbeat that was written as JSON."""
        found = cls(*json.loads(content))
        return found._replace(entry=found.entry and Entry(*found.entry))

    @property
    def who(self) -> str:
        """The process, for messages."""
        return f"pid {self.pid} on {self.host}"

    @property
    def last_seen(self) -> str:
        """What the rank did, for messages."""
        if not self.title:
            return "between loads"
        return f"{'after' if self.entry else 'while'} {self.title}" + f", {self.detail}" * bool(self.detail)


class Peer:
    """What this rank knows of another one. Seconds are those of this rank's own clock."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self._changed_s = self._progress_s = 0.0  # when its number changed, and when anything else did
        self._was_found = False  # whether a lookup found the process alive

    def note(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take the latest heartbeat."""
        before = self.heartbeat
        if before is None or (heartbeat.pid, heartbeat.started) != (before.pid, before.started):
            self._was_found, before = False, None
        elif heartbeat.num_beats < before.num_beats:  # a connection that hung delivers it late
            return
        self.heartbeat = heartbeat
        if before is None:  # while it lives: it may end at once
            self.has_ended()
        if before is None or heartbeat.num_beats != before.num_beats:
            self._changed_s = now_s
        if before is None or heartbeat._replace(num_beats=0, detail="") != before._replace(num_beats=0, detail=""):
            self._progress_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Return for how long no heartbeat has come."""
        return now_s - self._changed_s

    def seen_in(self, group: str, number: int) -> Heartbeat | None:
        """Return the latest heartbeat, if the peer is in this step."""
        beat = self.heartbeat
        return beat if beat is not None and (beat.group, beat.number) == (group, number) else None

    def absence(self, group: str, number: int) -> str:
        """Return what is known of a peer that is not in this step; "" if it is."""
        beat, here = self.heartbeat, self.seen_in(group, number)
        if here is not None and here.title:
            return ""
        return NO_CALL if beat is None else f"was last seen {beat.last_seen} ({beat.who})"

    def has_ended(self) -> bool | None:
        """Look the process up; return None where this rank cannot know."""
        beat = self.heartbeat
        if beat is None or not beat.pid_space or beat.pid_space != pid_space():
            return None
        now = start_time(beat.pid)
        self._was_found = self._was_found or now == beat.started
        return None if now is None or not self._was_found else now != beat.started

    def why_ended(self) -> str:
        """Look the process up; return that it has ended, "" if it has not or this rank cannot know.

        It does not say what the peer did last: ranks that lose the store with it have seen different heartbeats.
        """
        beat = self.heartbeat
        return f"its process ({beat.who}) has ended" if beat and self.has_ended() else ""

    def why_lost(self, limits: Limits, group: str, now_s: float, waited_s: float | None) -> str:
        """Return the reason for giving up on the peer, seen from this rank's step; "" if there is none.

        `waited_s` is None for a busy rank.
        """
        beat = self.heartbeat
        if beat is not None and (ended := self.why_ended()):
            return f"{ended}, {beat.last_seen}"
        is_busy = beat is not None and beat.entry is None
        still_s, gone_s = self.silent_s(now_s), limits.gone_s * (BUSY_FACTOR if is_busy else 1)
        if beat is not None and beat.title and self.has_ended() is None and still_s > gone_s:
            return (
                f"has sent no heartbeat for more than {gone_s:g} s ({GONE}); its process ({beat.who}) or its "
                f"machine has ended or cannot be reached; last seen {beat.last_seen}"
            )
        if beat is None or not beat.title or (beat.entry and beat.group != group):
            if waited_s is None:
                return ""
            absent = f"has not come to this point in {limits.absence_s:g} s; {SAME_ORDER}"
            return absent if waited_s > limits.absence_s else ""
        limit_s, origin = limits.silence_s, SILENCE
        if is_busy and still_s <= limit_s:  # else its process is stopped: it sends nothing at all
            still_s = now_s - self._progress_s
            if beat.amount is None:
                limit_s, origin = max(limit_s, limits.absence_s), "the timeout of the process group"
        if still_s <= limit_s:
            return ""
        return (
            f"has made no progress for more than {limit_s:g} s ({origin}), {beat.last_seen}; look what its "
            f"process ({beat.who}) waits for"
        )
