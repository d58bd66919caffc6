"""What ranks know of each other: the heartbeat that each writes once a second, and who is silent or has not come. Pure.

[Note: lost ranks] Clocks of different machines are never compared: a rank counts the seconds in which it saw no change.
- A rank whose heartbeats stop is lost: its process or its machine has ended, stands still, or cannot be reached. This
  the others judge.
- A rank whose heartbeats come but which makes no progress may wait for a file server, so it gets much longer. This the
  rank judges itself: its heartbeats come from a thread, which sees that the step stands still. Progress is what the
  step reports, such as bytes read. A step that runs other people's code, which may download or compile, reports none,
  and gets as long as the process group gives a collective.
- A rank that has not come to a step may come later. The others wait for as long, and say on stderr for whom.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lowmem_load.distributed.environment import positive_number
from lowmem_load.errors import listed
from lowmem_load.text import spell_ranks

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Environment variables that set the limits of the same names, seconds."""

SAME_ORDER = "all ranks have to do the same loads and saves in the same order"

NOTICE_S = 30.0
"""Seconds that a rank waits before it says for whom. Before each further line it waits twice as long."""

MAX_SHOWN = 4
"""Ranks of which such a line says what they do."""


class Progress(NamedTuple):
    """How far a step is."""

    amount: int  # grows as the step makes progress
    detail: str  # for messages: "512.0 MiB read, model-00003.safetensors"


def computing() -> Callable[[], Progress]:
    """Return the progress of a step that only computes, in the calling thread: the processor time of the thread."""
    has_clock = hasattr(time, "pthread_getcpuclockid")  # not on macOS
    clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clock else time.CLOCK_PROCESS_CPUTIME_ID
    return lambda: Progress(int(10 * time.clock_gettime(clock)), "")


class Limits(NamedTuple):
    """How long a rank waits, seconds."""

    silence_s: float = 300.0  # for its own step, which makes no progress
    # For a rank that sends no heartbeats, and for the store. Their thread may wait for the interpreter's lock while the
    # rank runs C code, so less would give up ranks that are only busy.
    gone_s: float = 25.0
    absence_s: float = 1800.0  # for a rank that has not come to the step, and for a step that reports no progress

    @classmethod
    def from_environment(cls, absence_s: float, *, is_prompt: bool = False) -> Limits:
        """Return the limits that the environment sets, else the defaults."""
        silence_s = positive_number(SILENCE, cls().silence_s, "seconds")
        gone_s = positive_number(GONE, cls().gone_s, "seconds")
        return cls(silence_s, gone_s, silence_s if is_prompt else absence_s)

    def why_stuck(self, beat: Heartbeat, still_s: float, *, is_measured: bool) -> str:
        """Return why this rank, busy with what its heartbeat says, has to give itself up; "" if it has not."""
        limit_s, origin = self.silence_s, SILENCE
        if not is_measured:
            limit_s, origin = max(self.silence_s, self.absence_s), "the timeout of the process group"
        if still_s <= limit_s:
            return ""
        return (
            f"has made no progress for more than {limit_s:g} s ({origin}), {beat.last_seen}; look what its "
            f"process ({beat.who}) waits for"
        )

    @property
    def absence(self) -> str:
        """Why a rank that has not come is given up."""
        return f"has not come to this point in {self.absence_s:g} s; {SAME_ORDER}"


class Entry(NamedTuple):
    """What one rank brings to a step. JSON data, as a heartbeat is."""

    title: str  # equal on all ranks that are at the same step
    error: str | None = None  # of this rank
    is_stopped: bool = False  # whether this rank only stopped because another one failed
    digest: str = ""  # of values that must be equal on all ranks
    num_parts: int = 0  # of its payload, which are keys of the store
    loop: str = ""  # that the step belongs to; see `RankGroup.step`


class Heartbeat(NamedTuple):
    """What a rank writes about itself."""

    who: str  # the process, for messages: pid and host
    group: str  # name of the group of its step
    number: int  # of the step in the group
    title: str = ""  # of the step; "" between loads
    detail: str = ""  # how far that is, for messages
    seconds: int = 0  # that it has been at this, for messages
    num_beats: int = 0  # that it has written so far
    entry: Entry | None = None  # that this rank brings to the step; None until it has done its part

    @classmethod
    def decoded(cls, content: str) -> Heartbeat:
        """Return the heartbeat that was written as JSON."""
        beat = cls(*json.loads(content))
        return beat._replace(entry=beat.entry and Entry(*beat.entry))

    @property
    def last_seen(self) -> str:
        """What the rank did, for messages."""
        if not self.title:
            return "between loads"
        doing = f"{'after' if self.entry else 'while'} {self.title}"
        return f"{doing}, {self.detail}" if self.detail else doing


class Peer:
    """What this rank knows of another one. Its seconds pass with this rank's own heartbeats."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self._silent_s = 0.0  # since its heartbeat changed

    def note(self, heartbeat: Heartbeat, seconds: float) -> None:
        """Take the latest heartbeat, so many seconds after the one before."""
        self._silent_s = self._silent_s + seconds if heartbeat == self.heartbeat else 0.0
        self.heartbeat = heartbeat

    def is_at(self, group: str, number: int) -> bool:
        """Return whether the peer is in this step."""
        beat = self.heartbeat
        return beat is not None and bool(beat.title) and (beat.group, beat.number) == (group, number)

    def entry_at(self, group: str, number: int) -> Entry | None:
        """Return the entry that the peer has brought to this step."""
        return self.heartbeat.entry if self.heartbeat and self.is_at(group, number) else None

    @property
    def absence(self) -> str:
        """What is known of a peer that has not come."""
        beat = self.heartbeat
        return "has not called lowmem_load" if beat is None else f"was last seen {beat.last_seen} ({beat.who})"

    def why_lost(self, limits: Limits, group: str, waited_s: float) -> str:
        """Return why this rank, which has waited so long in a step of this group, gives up the peer; "" if not yet."""
        beat = self.heartbeat
        if beat is not None and beat.title and self._silent_s > limits.gone_s:
            return (
                f"has sent no heartbeat for more than {limits.gone_s:g} s ({GONE}): its process ({beat.who}) or its "
                f"machine has ended, stands still or cannot be reached; last seen {beat.last_seen}"
            )
        # A peer that is busy gives itself up. One that waits elsewhere may wait for this rank.
        is_busy = beat is not None and bool(beat.title) and (beat.entry is None or beat.group == group)
        return "" if is_busy or waited_s <= limits.absence_s else limits.absence


def say_who_is_absent(rank: int, waited_s: float, place: str, absent: Mapping[int, str]) -> None:
    """Write to stderr for whom a rank waits, where, and what is known of them. It never fails."""
    details = listed([f"rank {other} {text}" for other, text in absent.items()], MAX_SHOWN)
    whom = f"rank(s) {spell_ranks([*absent])} ({details})"
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"lowmem_load: rank {rank} has waited {waited_s:.0f} s {place} for {whom}; {SAME_ORDER}\n")
        sys.stderr.flush()
