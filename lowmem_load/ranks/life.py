"""Life signs of ranks: what each says of itself, and what another makes of it. Clocks are never compared.

[Note: gone or silent] A process of the same machine can be looked up, so its end is known at once. One of another
machine is taken to be gone when its life signs stop. Life signs come from a thread of their own, so a rank that gives
them but does not get on is silent: it waits for something, such as a file server, and gets much longer. What counts as
getting on is what the step says, such as bytes that were read. Of a step that runs others' code (it may download, wait
for somebody's lock, or compile) nothing is known, so it gets as long as the process group gives a collective.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_load.ranks.environment import positive_number

ANY_LINE = "*"
"""Stands for the name of a group that is not known: it could not be had."""

BUSY, WAITING, IDLE = "busy", "waiting", "idle"
"""What a rank does: a step of a load; it has done its step and waits for others; nothing here."""

SILENCE, GONE = "LOWMEM_LOAD_SILENCE_S", "LOWMEM_LOAD_GONE_S"
"""Variables of the environment that set the limits of the same names, seconds."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step is.

    Attributes:
        amount: grows as the step gets on.
        detail: for people: "512.0 MiB read, model-00003.safetensors".
    """

    amount: int
    detail: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How long ranks are waited for, seconds.

    Attributes:
        silence_s: while they give life signs, but do not get on.
        gone_s: while they give no life signs, where their process cannot be looked up.
        absence_s: while they have not come to the load.
        absence: for people: what sets `absence_s`, and what the ranks have to do.
    """

    silence_s: float = 300.0
    gone_s: float = 15.0
    absence_s: float = 1800.0
    absence: str = "the timeout of the process group; all ranks have to load the same models in the same order"

    @classmethod
    def from_environment(cls, absence_s: float) -> Limits:
        """Return the limits that the environment sets, else the defaults.

        Raises:
            ConfigError: a variable holds no positive number.
        """
        defaults = cls()
        silence_s = positive_number(SILENCE, defaults.silence_s, "seconds")
        return cls(silence_s, positive_number(GONE, defaults.gone_s, "seconds"), absence_s)


@dataclass(frozen=True, slots=True)
class LifeSign:
    """What a rank says of itself.

    Attributes:
        count: of its life signs so far.
        state: BUSY, WAITING or IDLE.
        step: what it does.
        detail: how far it is.
        mark: another one whenever it has got on.
        is_measured: whether its step says how far it is.
        line: name of the group that it does this in.
        number: of the exchange of that group that it will come to next.
        leaves: how often it has gone away from exchanges of that group that others may wait in.
        left: why it went away the last time.
        session: see [Note: sessions] in `ranks/exchanges.py`.
        pid_space, pid, started: which process it is; see the functions of these names.
        host: name of its machine.
    """

    count: int
    state: str
    step: str
    detail: str
    mark: str
    is_measured: bool
    line: str
    number: int
    leaves: int
    left: str
    session: str
    pid_space: str
    pid: int
    started: str
    host: str

    def encoded(self) -> str:
        """Return it as JSON."""
        return json.dumps([getattr(self, name) for name in self.__slots__])

    @classmethod
    def decoded(cls, content: bytes) -> LifeSign:
        """Return what `encoded` made JSON of."""
        values: list[Any] = json.loads(content)
        return cls(*values)

    @property
    def has_ended(self) -> bool | None:
        """Whether its process has ended; None where that cannot be known from here."""
        if not self.pid_space or self.pid_space != pid_space():
            return None
        now = started(self.pid)
        return now is not None and now != self.started

    @property
    def who(self) -> str:
        """Which process, for people."""
        return f"pid {self.pid} on {self.host}"

    @property
    def doing(self) -> str:
        """What it said last, for people."""
        if self.state == IDLE:
            return "between loads"
        return f"{'after' if self.state == WAITING else 'while'} {self.step}" + (f", {self.detail}" * bool(self.detail))


@functools.cache
def pid_space() -> str:
    """Return what tells the process numbers that hold here from those of other machines and containers; "" if none."""
    try:
        return _boot_id() and f"{_boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not told here
        return ""


def machine() -> str:
    """Return what tells this machine, as booted now, from others: files of equal version on it are the same file."""
    return _boot_id() or platform.node()


@functools.cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def started(pid: int) -> str | None:
    """Return when a process of this machine started; "" if it has ended; None if that cannot be found out."""
    try:
        fields = _fields(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # no descriptor is free, say
        return None
    return "" if fields[0] in "ZX" else fields[19]  # state and starttime, see proc(5)


def computing() -> Callable[[], Progress]:
    """Return what says how far a step is that only computes, in the calling thread: the processor time of that."""
    native_id = threading.get_native_id()
    return lambda: _processor_time(native_id)


def _processor_time(native_id: int) -> Progress:
    try:
        fields = _fields(f"/proc/self/task/{native_id}/stat")
    except OSError:  # not Linux
        return Progress(int(time.process_time() * 10), "")
    return Progress((int(fields[11]) + int(fields[12])) // 10, "")  # utime and stime, in ticks of 10 ms, see proc(5)


def _fields(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


@dataclass(slots=True)
class Sighting:
    """What this rank has seen of another; times are of this rank's clock, seconds.

    Attributes:
        sign: the latest one.
    """

    sign: LifeSign | None = None
    _seen: float = 0.0
    _got_on: float = 0.0

    def note(self, sign: LifeSign, now: float) -> None:
        """Take the latest life sign."""
        before, self.sign = self.sign, sign
        if before is None or (sign.count, sign.pid) != (before.count, before.pid):
            self._seen = now
        if before is None or (sign.mark, sign.state) != (before.mark, before.state):
            self._got_on = now

    def trouble(self, now: float, limits: Limits, waited_s: float | None, position: Position) -> str:
        """Return why the other is waited for no longer; "" if it is.

        Args:
            now: this rank's clock, seconds.
            limits: how long is waited.
            waited_s: since when this rank has waited, if it does.
            position: of this rank.
        """
        sign = self.sign
        if sign is None:
            return _absent(waited_s, limits)
        has_ended = sign.has_ended
        if has_ended:
            return f"its process ({sign.who}) has ended, {sign.doing}"
        if waited_s is not None and position.is_behind(sign):
            return f"is not in step with the others: it did not take part, and is now {sign.doing}"
        if sign.state == WAITING and sign.line != position.line:
            return _absent(waited_s, limits)
        if sign.state == IDLE:
            is_news = waited_s is not None and position.concerns(sign)
            return sign.left if is_news and sign.left else _absent(waited_s, limits)
        if has_ended is None and now - self._seen > limits.gone_s:
            return (
                f"has given no life sign for more than {limits.gone_s:g} s ({GONE}); its process ({sign.who}) or its "
                f"machine has ended or cannot be reached; last seen {sign.doing}"
            )
        quiet_s, limit_s, origin = now - self._seen, limits.silence_s, SILENCE
        if sign.state == BUSY and quiet_s <= limit_s:  # it gives life signs; a stopped process here gives none
            quiet_s = now - self._got_on
            if not sign.is_measured:
                limit_s, origin = max(limit_s, limits.absence_s), "the timeout of the process group"
        if quiet_s <= limit_s:
            return ""
        return (
            f"has made no progress for more than {limit_s:g} s ({origin}), {sign.doing}; look what its process "
            f"({sign.who}) waits for"
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Where this rank is: in which exchange of which group and session, and how often it has gone away, by group."""

    line: str
    session: str
    number: int
    leaves: Mapping[str, int]

    def is_behind(self, sign: LifeSign) -> bool:
        """Return whether another rank of the same group has gone on."""
        return sign.line == self.line and sign.session == self.session and sign.number > self.number

    def concerns(self, sign: LifeSign) -> bool:
        """Return whether another rank went away from exchanges that this one is to make, more often than it did."""
        mine = sign.line == self.line and (sign.session == self.session or not sign.session or not self.session)
        return (mine or sign.line == ANY_LINE) and sign.leaves > self.leaves.get(sign.line, 0)


def _absent(waited_s: float | None, limits: Limits) -> str:
    if waited_s is None or waited_s <= limits.absence_s:
        return ""
    return f"has not come to this point in {limits.absence_s:g} s, {limits.absence}"
