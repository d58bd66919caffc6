"""Heartbeats: what a rank writes about itself each second, and how another rank judges it by them. Pure.

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
from collections.abc import Callable, Mapping, Sequence
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
    has_clock = hasattr(time, "pthread_getcpuclockid")  # not on macOS
    clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clock else time.CLOCK_PROCESS_CPUTIME_ID
    return lambda: Progress(int(10 * time.clock_gettime(clock)), "")


class Limits(NamedTuple):
    """How long a rank waits for others, seconds."""

    silence_s: float = 300.0  # for a rank that sends heartbeats but makes no progress
    # For a rank that sends no heartbeats, and for the store. Their thread may wait for the interpreter's lock while the
    # rank runs C code, so less would give up ranks that are only busy.
    gone_s: float = 25.0
    absence_s: float = 1800.0  # for a rank that has not come to the step

    @classmethod
    def from_environment(cls, absence_s: float, *, is_prompt: bool = False) -> Limits:
        """Return the limits that the environment sets, else the defaults."""
        silence_s = positive_number(SILENCE, cls().silence_s, "seconds")
        gone_s = positive_number(GONE, cls().gone_s, "seconds")
        return cls(silence_s, gone_s, silence_s if is_prompt else absence_s)


class Heartbeat(NamedTuple):
    """What a rank writes about itself."""

    who: str  # the process, for messages: pid and host
    group: str  # name of the group of its step
    number: int  # of the step in the group
    title: str  # of the step; "" between loads
    amount: int | None = None  # how far that is; None where the step does not report it
    entry: Entry | None = None  # that this rank brings to the step; None until it has done its part
    detail: str = ""  # how far that is, for messages
    num_beats: int = 0  # that it has written so far
    token: str = ""  # of the rank in this life, and those that it knows; see [Note: lives] in `store_channel.py`
    lives: Sequence[str] = ()
    left: Mapping[str, str] = {}  # loops that the rank has left, and why

    @classmethod
    def decoded(cls, content: str) -> Heartbeat:
        """Return the heartbeat that was written as JSON."""
        beat = cls(*json.loads(content))
        return beat._replace(entry=beat.entry and Entry(*beat.entry), lives=tuple(beat.lives))

    @property
    def step(self) -> tuple[str, int]:
        """Name of the group and number of the step."""
        return self.group, self.number

    @property
    def error(self) -> str:
        """The error that the rank brings to its step; "" for none."""
        return (self.entry and self.entry.error) or ""

    def has_not_met(self, group: str) -> bool:
        """Return whether the rank is in this group and has not met its leader, or is the leader."""
        return self.group == f"{group.rpartition('/')[0]}/{self.token}"

    @property
    def last_seen(self) -> str:
        """What the rank did, for messages."""
        did = f"{'after' if self.entry else 'while'} {self.title}" + f", {self.detail}" * bool(self.detail)
        return did if self.title else "between loads"


class Peer:
    """What this rank knows of another one. Its seconds pass with this rank's own heartbeats."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.is_met = True  # whether the heartbeat is of this life; see [Note: lives] in `store_channel.py`
        self._silent_s = self._still_s = 0.0  # since its number changed, and since anything else did

    def note(self, heartbeat: Heartbeat, seconds: float, *, is_met: bool = True) -> None:
        """Take the latest heartbeat, so many seconds after the one before."""
        self.is_met = is_met
        before, self.heartbeat = self.heartbeat, heartbeat
        is_still = before is not None and heartbeat._replace(num_beats=before.num_beats, detail=before.detail) == before
        self._silent_s = self._silent_s + seconds if heartbeat == before else 0.0
        self._still_s = self._still_s + seconds if is_still else 0.0

    def is_at(self, step: tuple[str, int]) -> bool:
        """Return whether the peer is in this step: name of the group, number."""
        return self.heartbeat is not None and self.heartbeat.step == step and bool(self.heartbeat.title)

    def entry_at(self, step: tuple[str, int]) -> Entry | None:
        """Return the entry that the peer has brought to this step."""
        return self.heartbeat.entry if self.heartbeat and self.is_at(step) else None

    @property
    def absence(self) -> str:
        """What is known of a peer that has not come."""
        return NO_CALL if self.heartbeat is None else f"was last seen {self.heartbeat.last_seen} ({self.heartbeat.who})"

    def why_lost(self, limits: Limits, step: tuple[str, int], waited_s: float | None) -> str:
        """Return the reason for giving up on the peer, seen from this rank's step; "" if there is none.

        `waited_s` is None for a busy rank.
        """
        beat, (group, number) = self.heartbeat, step
        if beat is not None and beat.group == group and beat.number > number:
            return f"has gone on without the others, last seen {beat.last_seen}"
        is_here = beat is not None and bool(beat.title) and self.is_met
        if beat is not None and is_here and self._silent_s > limits.gone_s:
            return (
                f"has sent no heartbeat for more than {limits.gone_s:g} s ({GONE}): its process ({beat.who}) or its "
                f"machine has ended, stands still or cannot be reached; last seen {beat.last_seen}"
            )
        if beat is None or not is_here or (beat.entry and beat.group != group):
            has_left = beat is not None and bool(beat.error) and (is_here or beat.has_not_met(group))
            if beat is not None and has_left and self._still_s > limits.gone_s:
                return beat.error  # those it waits for, in a step of another group, may wait for this rank
            is_late = waited_s is not None and waited_s > limits.absence_s
            return f"has not come to this point in {limits.absence_s:g} s; {SAME_ORDER}" if is_late else ""
        limit_s, origin = limits.silence_s, SILENCE
        if beat.amount is None:
            limit_s, origin = max(limit_s, limits.absence_s), "the timeout of the process group"
        if beat.entry or self._still_s <= limit_s:
            return ""
        return (
            f"has made no progress for more than {limit_s:g} s ({origin}), {beat.last_seen}; look what its "
            f"process ({beat.who}) waits for"
        )
