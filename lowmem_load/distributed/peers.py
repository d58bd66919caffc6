"""The messages of ranks to each other, and the judgements that follow from them: who failed, who is lost. Pure.

[Note: lost ranks] Clocks of different machines are never compared: a rank counts the seconds in which it saw no change.
- A rank whose heartbeats stop is lost: its process or its machine has ended, stands still, or cannot be reached. The
  others judge this.
- A rank whose heartbeats come but which makes no progress may wait for a file server, so it gets much longer. It judges
  this itself, in the thread that sends its heartbeats. Progress is what the step reports, such as bytes read. A step
  that runs other people's code, which may download or compile, reports none, and gets as long as the process group
  gives a collective.
- A rank that has not come to a step may come later. The others wait for as long, and log for whom.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowmem_load.distributed.environment import positive_number
from lowmem_load.text import spell_ranks

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Environment variables that set the limits of the same names, seconds."""

SAME_ORDER = "all ranks have to do the same loads and saves in the same order"
STOPPED = "stopped because another rank has failed"
MAX_FAILURES = 1_000_000  # characters of all messages of a verdict together, which every rank reads

# The parts of one error's text that differ between ranks: addresses, and the indices of devices (cuda:1).
_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=[a-z]:)[0-9]+")


def packed(value: Any) -> bytes:
    """Return JSON data as the store has them: its values are bounded, and the ranks tell it similar things."""
    return zlib.compress(json.dumps(value).encode(), 1)


def unpacked(content: bytes) -> Any:
    """Return the JSON data of a value of the store."""
    return json.loads(zlib.decompress(content))


class Entry(NamedTuple):
    """A rank's part of a step. Like heartbeats and verdicts it is JSON data, which the store has compressed."""

    title: str  # equal on all ranks that are at the same step; "" of a rank that does not come to it
    error: str | None = None  # of this rank; "" if it has only stopped because another one has failed
    digest: str = ""  # of values that must be equal on all ranks
    payload: str = ""  # for all ranks


class Heartbeat(NamedTuple):
    """A rank's words about itself."""

    who: str = ""  # the process, for messages: pid and host
    step: str = ""  # key of its verdict: the name of its group, and its number there
    title: str = ""  # of what the rank does; "" between loads
    detail: str = ""  # how far that is, for messages
    seconds: float = 0.0  # that it has been at this
    entry: Entry | None = None  # that it brings to the step; None until it has done its part

    @classmethod
    def read(cls, content: bytes) -> Heartbeat:
        """Return the heartbeat that a key of the store has."""
        beat = cls(*unpacked(content))
        return beat._replace(entry=beat.entry and Entry(*beat.entry))

    @property
    def doing(self) -> str:
        """The rank's present work, for messages."""
        doing = f"{'after' if self.entry else 'while'} {self.title}" if self.title else "between loads"
        return f"{doing}, {self.detail}" if self.detail else doing

    @property
    def last_seen(self) -> str:
        """The last sign of a rank that has not come."""
        return f"was last seen {self.doing} ({self.who})" if self.who else "has not called lowmem_load"

    def is_at(self, step: str) -> bool:
        """Return whether the rank is in this step."""
        return bool(self.title) and self.step == step


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

    @property
    def absence(self) -> str:
        """Why a rank that has not come is given up."""
        return f"has not come to this point in {self.absence_s:g} s; {SAME_ORDER}"

    def why_stuck(self, beat: Heartbeat, still_s: float, *, is_measured: bool) -> str:
        """Return why this rank, busy with what its heartbeat says, has to give itself up; "" if it has not."""
        limit_s, origin = self.silence_s, SILENCE
        if not is_measured:
            limit_s, origin = max(self.silence_s, self.absence_s), "the timeout of the process group"
        text = f"has made no progress for more than {limit_s:g} s ({origin}), {beat.doing}"
        return f"{text}; look what its process ({beat.who}) waits for" if still_s > limit_s else ""

    def why_lost(self, beat: Heartbeat, silent_s: float, step: str, waited_s: float) -> str:
        """Return why this rank gives up another one, whose last heartbeat came `silent_s` ago; "" if not yet.

        This rank is in `step`, where it has waited `waited_s`; 0 while it is busy.
        """
        if beat.title and silent_s > self.gone_s:
            return (
                f"has sent no heartbeat for more than {self.gone_s:g} s ({GONE}): its process ({beat.who}) or its "
                f"machine has ended, stands still or cannot be reached; last seen {beat.doing}"
            )
        group, its_group = step.rpartition("/")[0], beat.step.rpartition("/")[0]
        if beat.title and (beat.entry is None or its_group == group):
            return ""  # it is busy, and gives itself up, or waits in this step, too
        if beat.title and its_group.partition("/")[0] == group.partition("/")[0] and waited_s > self.gone_s:
            return f"waits elsewhere, {beat.doing}; {SAME_ORDER}"  # one of them is in a loop of this group
        return self.absence if waited_s > self.absence_s else ""


class Verdict(NamedTuple):
    """The outcome of a step."""

    failures: Sequence[tuple[int, str]] = ()  # ranks of the world that failed, and their messages
    title: str = ""  # of the step, as its leader or a rank that is stuck calls it; "" where another rank has written it
    is_alike: bool = False  # whether all ranks failed with the same message
    differs: bool = False  # whether the digests of the ranks differ, and nothing else is wrong
    payloads: Sequence[str] = ()  # of all ranks, if one has any


def verdict_on(entries: Mapping[int, Entry], title: str = "") -> Verdict:
    """Return the verdict on the entries of all ranks, by rank in the world, in the group's order.

    Errors count before different titles, and those before different digests. A rank that has only stopped is named only
    if no other rank failed.
    """
    errors = {rank: entry.error for rank, entry in entries.items() if entry.error is not None}
    failures = (
        {rank: error for rank, error in errors.items() if error}
        or dict.fromkeys(errors, STOPPED)
        or differences("is at", "are at", {rank: repr(entry.title) for rank, entry in entries.items()})
    )
    is_alike = len(errors) == len(entries) and len({_OF_ONE_PROCESS.sub("#", text) for text in errors.values()}) == 1
    if failures:
        max_chars = max(200, MAX_FAILURES // len(failures))
        return Verdict([(rank, text[:max_chars]) for rank, text in failures.items()], title, is_alike)
    if len({entry.digest for entry in entries.values()}) > 1:
        return Verdict(title=title, differs=True)
    payloads = [entry.payload for entry in entries.values()]
    return Verdict(title=title, payloads=payloads if any(payloads) else ())


def differences(this: str, others: str, values: Mapping[int, str]) -> dict[int, str]:
    """Return, of each rank whose value is not that of most, a text that says so."""
    # Of equally frequent values, the lowest rank's is the usual one.
    usual = Counter(values.values()).most_common(1)[0][0]
    where = f"where rank(s) {spell_ranks([rank for rank in values if values[rank] == usual])} {others} {usual}"
    return {rank: f"{this} {value}, {where}" for rank, value in values.items() if value != usual}
