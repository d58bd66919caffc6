"""Heartbeats: what a rank writes about itself each second, and how another rank judges it by them. Pure but for /proc.

[Note: lost ranks] Clocks of different machines are never compared: a rank counts the seconds in which it saw no change.
- A rank whose heartbeats stop is lost: its process or its machine has ended, stands still, or cannot be reached.
- A rank whose heartbeats come but which makes no progress may wait for a file server, so it gets much longer. Progress
  is what the step reports, such as bytes read. A step that runs other people's code, which may download or compile,
  reports none, and gets as long as the process group gives a collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lowmem_load.distributed.environment import positive_number
from lowmem_load.distributed.verdict import Entry

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Environment variables that set the limits of the same names, seconds."""

SAME_ORDER = "all ranks have to do the same loads and saves in the same order"


NO_CALL = "has not called lowmem_load"
"""What is known of a rank that has sent no heartbeat."""


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
    # For a rank that sends no heartbeats, and for the store. Their thread may wait for the interpreter's lock while the
    # rank runs C code, so less would give up ranks that are only busy.
    gone_s: float = 25.0
    absence_s: float = 1800.0  # for a rank that has not come to the step

    @classmethod
    def from_environment(cls, absence_s: float) -> Limits:
        """Return the limits that the environment sets, else the defaults."""
        silence_s = positive_number(SILENCE, cls().silence_s, "seconds")
        return cls(silence_s, positive_number(GONE, cls().gone_s, "seconds"), absence_s)


class Heartbeat(NamedTuple):
    """What a rank writes about itself."""

    num_beats: int  # that it has written so far, this one included
    who: str  # the process, for messages: pid and host
    group: str  # name of the group of its step
    number: int  # of the step in the group
    title: str  # of the step; "" between loads
    amount: int | None = None  # how far that is; None where the step does not report it
    detail: str = ""  # how far that is, for messages
    entry: Entry | None = None  # that this rank brings to the step; None until it has done its part

    @classmethod
    def decoded(cls, content: str) -> Heartbeat:
        """Return the heartbeat that was written as JSON."""
        beat = cls(*json.loads(content))
        return beat._replace(entry=beat.entry and Entry(*beat.entry))

    @property
    def last_seen(self) -> str:
        """What the rank did, for messages."""
        did = f"{'after' if self.entry else 'while'} {self.title}" + f", {self.detail}" * bool(self.detail)
        return did if self.title else "between loads"


class Peer:
    """What this rank knows of another one. Seconds are those of this rank's own clock."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.changed_s = self._progress_s = 0.0  # when its number changed, and when anything else did

    def note(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take the latest heartbeat."""
        before = self.heartbeat
        if before is not None and heartbeat.num_beats <= before.num_beats:  # a connection that hung delivers it late
            return
        self.heartbeat, self.changed_s = heartbeat, now_s
        if before is None or heartbeat._replace(num_beats=0, detail="") != before._replace(num_beats=0, detail=""):
            self._progress_s = now_s

    def seen_at(self, group: str, number: int) -> Heartbeat | None:
        """Return the latest heartbeat, if the peer is in this step."""
        beat = self.heartbeat
        return beat if beat is not None and (beat.group, beat.number) == (group, number) and beat.title else None

    def absence(self, group: str, number: int) -> str:
        """Return what is known of a peer that is not in this step; "" if it is."""
        if self.seen_at(group, number):
            return ""
        beat = self.heartbeat
        return NO_CALL if beat is None else f"was last seen {beat.last_seen} ({beat.who})"

    def why_lost(self, limits: Limits, group: str, number: int, now_s: float, waited_s: float | None) -> str:
        """Return the reason for giving up on the peer, seen from this rank's step; "" if there is none.

        `waited_s` is None for a busy rank.
        """
        beat, still_s = self.heartbeat, now_s - self._progress_s
        if beat is not None and beat.group == group and beat.number > number:
            return f"has gone on without the others, last seen {beat.last_seen}"
        if beat is not None and beat.title and now_s - self.changed_s > limits.gone_s:
            return (
                f"has sent no heartbeat for more than {limits.gone_s:g} s ({GONE}): its process ({beat.who}) or its "
                f"machine has ended, stands still or cannot be reached; last seen {beat.last_seen}"
            )
        if beat is None or not beat.title or (beat.entry and beat.group != group):
            if beat is not None and beat.entry and beat.entry.error and still_s > limits.gone_s:
                return beat.entry.error  # those it waits for, in a step of another group, may wait for this rank
            is_late = waited_s is not None and waited_s > limits.absence_s
            return f"has not come to this point in {limits.absence_s:g} s; {SAME_ORDER}" if is_late else ""
        limit_s, origin = limits.silence_s, SILENCE
        if beat.amount is None:
            limit_s, origin = max(limit_s, limits.absence_s), "the timeout of the process group"
        if beat.entry or still_s <= limit_s:
            return ""
        return (
            f"has made no progress for more than {limit_s:g} s ({origin}), {beat.last_seen}; look what its "
            f"process ({beat.who}) waits for"
        )
