"""What ranks tell each other, and what follows from it: who failed, who is lost. Pure.

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
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowmem_load.distributed.environment import positive_number
from lowmem_load.errors import listed
from lowmem_load.text import spell_ranks

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Environment variables that set the limits of the same names, seconds."""

SAME_ORDER = "all ranks have to do the same loads and saves in the same order"
NOTICE_S = 30.0  # that a rank waits before it says for whom; before each further line it waits twice as long
MAX_SHOWN = 4  # ranks of which such a line says what they do
MAX_FAILURES = 1_000_000  # characters of all messages of a verdict together, which every rank reads

# The parts of one error's text that differ between ranks: addresses, and the indices of devices (cuda:1).
_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")


class Progress(NamedTuple):
    """How far a step is."""

    amount: int  # grows as the step makes progress
    detail: str  # for messages: "512.0 MiB read, model-00003.safetensors"


def computing() -> Callable[[], Progress]:
    """Return the progress of a step that only computes, in the calling thread: the processor time of the thread."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
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
            f"has made no progress for more than {limit_s:g} s ({origin}), {beat.doing}; look what its process "
            f"({beat.who}) waits for"
        )

    @property
    def absence(self) -> str:
        """Why a rank that has not come is given up."""
        return f"has not come to this point in {self.absence_s:g} s; {SAME_ORDER}"


class Entry(NamedTuple):
    """What one rank brings to a step. JSON data, as heartbeats and verdicts are."""

    title: str  # equal on all ranks that are at the same step; "" of a rank that does not come to it
    error: str | None = None  # of this rank
    is_stopped: bool = False  # whether this rank only stopped because another one failed
    digest: str = ""  # of values that must be equal on all ranks
    num_parts: int = 0  # of its payload, which are keys of the store


class Verdict(NamedTuple):
    """The outcome of a step."""

    failures: Sequence[tuple[int, str]] = ()  # ranks of the world that failed, and their messages
    is_alike: bool = False  # whether all ranks failed with the same message
    num_parts: int = 0  # of the payloads of all ranks
    title: str = ""  # of the step, as its leader or a rank that is stuck calls it; "" where another rank has written it
    differs: bool = False  # whether the digests of the ranks differ, and nothing else is wrong


class Heartbeat(NamedTuple):
    """What a rank writes about itself."""

    who: str = ""  # the process, for messages: pid and host
    step: str = ""  # key of its verdict: the name of its group, and its number there
    title: str = ""  # of what the rank does; "" between loads
    detail: str = ""  # how far that is, for messages
    seconds: float = 0.0  # that it has been at this
    entry: Entry | None = None  # that it brings to the step; None until it has done its part

    @classmethod
    def decoded(cls, content: str) -> Heartbeat:
        """Return the heartbeat that was written as JSON."""
        beat = cls(*json.loads(content))
        return beat._replace(entry=beat.entry and Entry(*beat.entry))

    @property
    def doing(self) -> str:
        """What the rank does, for messages."""
        doing = f"{'after' if self.entry else 'while'} {self.title}" if self.title else "between loads"
        return f"{doing}, {self.detail}" if self.detail else doing

    def is_at(self, step: str) -> bool:
        """Return whether the rank is in this step."""
        return bool(self.title) and self.step == step


@dataclass(slots=True)
class Peer:
    """What this rank knows of another one. Its seconds pass with this rank's own heartbeats."""

    beat: Heartbeat = Heartbeat()  # noqa: RUF009  it does not change
    content: str = ""  # of the key
    silent_s: float = 0.0  # since that changed

    def note(self, content: str, seconds: float) -> None:
        """Take the content of the rank's key, so many seconds after the one before."""
        self.silent_s += seconds
        if content != self.content:
            self.beat, self.content, self.silent_s = Heartbeat.decoded(content), content, 0.0

    @property
    def absence(self) -> str:
        """What is known of a peer that has not come."""
        return f"was last seen {self.beat.doing} ({self.beat.who})" if self.content else "has not called lowmem_load"

    def why_lost(self, limits: Limits, step: str, waited_s: float) -> str:
        """Return why this rank, which has waited so long in a step, gives up the peer; "" if not yet."""
        beat = self.beat
        if beat.title and self.silent_s > limits.gone_s:
            return (
                f"has sent no heartbeat for more than {limits.gone_s:g} s ({GONE}): its process ({beat.who}) or its "
                f"machine has ended, stands still or cannot be reached; last seen {beat.doing}"
            )
        group, its_group = step.rpartition("/")[0], beat.step.rpartition("/")[0]
        if beat.title and (beat.entry is None or its_group == group):
            return ""  # it is busy, and gives itself up, or waits in this step, too
        if beat.title and its_group.partition("/")[0] == group.partition("/")[0] and waited_s > limits.gone_s:
            return f"waits elsewhere, {beat.doing}; {SAME_ORDER}"  # one of them is in a loop of this group
        return limits.absence if waited_s > limits.absence_s else ""


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


def say_who_is_absent(rank: int, waited_s: float, place: str, absent: Mapping[int, str]) -> None:
    """Write to stderr for whom a rank waits, where, and what is known of them. It never fails."""
    details = listed([f"rank {other} {text}" for other, text in absent.items()], MAX_SHOWN)
    whom = f"rank(s) {spell_ranks([*absent])} ({details})"
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"lowmem_load: rank {rank} has waited {waited_s:.0f} s {place} for {whom}; {SAME_ORDER}\n")
        sys.stderr.flush()
