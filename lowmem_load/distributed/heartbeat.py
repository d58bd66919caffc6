"""Heartbeats: what a rank writes about itself each second, and how another rank judges it by that.

[Note: gone or silent] Clocks of different machines are never compared: a rank counts the seconds in which it saw no
change. A process of the same machine can be looked up, so its end is known at once, and while it lives it is never
taken for gone. A look is trusted only after it found that very process, with its start time: clones of one virtual
machine have equal boot ids and process numbers. A process that cannot be looked up is gone when its heartbeats stop.
They come from a thread of their own, which the interpreter's lock may keep waiting; so a rank that runs code gets half
as long again as one that only waits for others. A rank whose heartbeats come but which makes no progress is silent: it
waits for a file server, say, and gets much longer. What counts as progress is what its step says, such as bytes that
were read. Of a step that runs others' code (it may download or compile) nothing is known, so it gets as long as the
process group gives a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowmem_load.distributed.environment import positive_number
from lowmem_load.distributed.processes import pid_space, started
from lowmem_load.distributed.verdict import Stored

ANY_GROUP = "*"
"""Stands for the name of a group that is not known, since the caller gave something else."""

BUSY, WAITING, IDLE = "busy", "waiting", "idle"
"""What a rank does: its own part of a step; it has done that and waits for other ranks; nothing here."""

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Variables of the environment that set the limits of the same names, seconds."""

BUSY_FACTOR = 1.5
"""How much longer than one that waits a busy rank may send no heartbeat; see [Note: gone or silent]."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long ranks are waited for, seconds.

    Attributes:
        silence_s: while their heartbeats come, but they make no progress.
        gone_s: while no heartbeats come, where their process cannot be looked up.
        absence_s: while they have not come to the step.
        absence: for people: what sets `absence_s`, and what the ranks have to do.
        may_be_skipped: whether scripts are likely to run the step on some ranks only; see `Verdict`.
    """

    silence_s: float = 300.0
    gone_s: float = 15.0
    absence_s: float = 1800.0
    absence: str = "the timeout of the process group; all ranks have to load the same models in the same order"
    may_be_skipped: bool = False

    @classmethod
    def from_environment(cls, absence_s: float, demand: str = "") -> Limits:
        """Return the limits that the environment sets, else the defaults.

        Args:
            absence_s: see `Limits`.
            demand: what the ranks have to do; then `absence_s` is as short as `silence_s`.

        Raises:
            ConfigError: a variable holds no positive number.
        """
        silence_s = positive_number(SILENCE, cls().silence_s, "seconds")
        gone_s = positive_number(GONE, cls().gone_s, "seconds")
        if demand:
            return cls(silence_s, gone_s, silence_s, f"{SILENCE}; {demand}", may_be_skipped=True)
        return cls(silence_s, gone_s, absence_s)


@dataclass(frozen=True, slots=True)
class Heartbeat(Stored):
    """What a rank writes about itself.

    Attributes:
        count: of its heartbeats so far.
        state: BUSY, WAITING or IDLE.
        doing: its step.
        detail: how far that is, for people.
        amount: how far that is; None where the step does not say.
        group: name of the group of the step.
        numbers: by group, the number of the step that it comes to next.
        aborted: name of a group, or ANY_GROUP; number of the step of it that this rank does not come to; and why. None
            if it comes.
        pid_space, pid, started: which process it is; see the functions of these names.
        host: name of its machine.
    """

    count: int
    state: str
    doing: str
    detail: str
    amount: int | None
    group: str
    numbers: Mapping[str, int]
    aborted: tuple[str, int, str] | None
    pid_space: str
    pid: int
    started: str
    host: str

    @property
    def who(self) -> str:
        """Which process, for people."""
        return f"pid {self.pid} on {self.host}"

    @property
    def last_seen(self) -> str:
        """What the rank did, for people."""
        if self.state == IDLE:
            return "between loads"
        return f"{'after' if self.state == WAITING else 'while'} {self.doing}" + f", {self.detail}" * bool(self.detail)

    def why_aborted(self, group: str, number: int) -> str:
        """Return why this rank does not come to a step of a group; "" if it has not said so."""
        of, at, why = self.aborted or ("", 0, "")
        if of == ANY_GROUP:
            of, at = group, self.numbers.get(group, 0)
        return why if (of, at) == (group, number) else ""


class Watched:
    """What this rank knows of another one. Seconds are those of this rank's own clock."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self._seen_s = self._moved_s = 0.0  # when the latest heartbeat came, and when it told of progress
        self._was_found = False  # whether a look found the process of the heartbeat alive

    def note(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take the latest heartbeat."""
        before, self.heartbeat = self.heartbeat, heartbeat
        if before is None or (heartbeat.pid, heartbeat.started) != (before.pid, before.started):
            self._was_found, before = False, None
        if before is None or heartbeat.count != before.count:
            self._seen_s = now_s
        if before is None or replace(heartbeat, count=0, detail="") != replace(before, count=0, detail=""):
            self._moved_s = now_s

    def has_ended(self) -> bool | None:
        """Look the process up: return whether it has ended; None where that cannot be known from here."""
        heartbeat = self.heartbeat
        if heartbeat is None or not heartbeat.pid_space or heartbeat.pid_space != pid_space():
            return None
        now = started(heartbeat.pid)
        self._was_found = self._was_found or now == heartbeat.started
        return None if now is None or not self._was_found else now != heartbeat.started

    def why_ended(self) -> str:
        """Look the process up; return how it ended, "" if it did not or that is not known."""
        found = self.heartbeat
        return f"its process ({found.who}) has ended, {found.last_seen}" if found and self.has_ended() else ""

    def why_lost(self, limits: Limits, group: str, number: int, now_s: float, waited_s: float | None) -> str:
        """Return why the other rank is waited for no longer; "" if it is.

        Args:
            limits: how long it is waited for.
            group: name of the group in which it is waited for.
            number: of the step.
            now_s: this rank's clock.
            waited_s: for how long this rank has waited; None if it is still busy itself.
        """
        heartbeat, is_absent = self.heartbeat, waited_s is not None and waited_s > limits.absence_s
        absent = f"has not come to this point in {limits.absence_s:g} s, {limits.absence}" if is_absent else ""
        if heartbeat is None:
            return absent
        has_ended, state, who, last_seen = self.has_ended(), heartbeat.state, heartbeat.who, heartbeat.last_seen
        if has_ended:
            return self.why_ended()
        if state == IDLE or (state == WAITING and heartbeat.group != group):
            return absent if waited_s is None else heartbeat.why_aborted(group, number) or absent
        quiet_s, gone_s = now_s - self._seen_s, limits.gone_s * (BUSY_FACTOR if state == BUSY else 1)
        if has_ended is None and quiet_s > gone_s:
            return (
                f"has sent no heartbeat for more than {gone_s:g} s ({GONE}); its process ({who}) or its machine has "
                f"ended or cannot be reached; last seen {last_seen}"
            )
        limit_s, origin = limits.silence_s, SILENCE
        if state == BUSY and quiet_s <= limit_s:  # of a stopped process here no heartbeats come
            quiet_s = now_s - self._moved_s
            if heartbeat.amount is None:
                limit_s, origin = max(limit_s, limits.absence_s), "the timeout of the process group"
        if quiet_s <= limit_s:
            return ""
        return (
            f"has made no progress for more than {limit_s:g} s ({origin}), {last_seen}; look what its process ({who}) "
            "waits for"
        )
