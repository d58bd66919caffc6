"""The rows of the matrix: faults, the moments of a load at which they strike, and what must come of each."""

import errno
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tests.faults.shim import Action, Call
from tests.faults.team import SILENCE_S
from tests.faults.worker import MARK

LIMIT_S = 10.0
"""Until every rank has raised, counted from the fault."""
SHARD = "-00002-of-"
ANY_SHARD = ".safetensors"
SHORT_GROUP_S = 8.0
"""Timeout of the process group in rows where a rank is slower than that."""

Expect = Literal["loads", "raises", "either", "interrupted", "own error", "dies", "silent"]
"""What must come of a row.

loads: as if nothing had been. raises: one error of ours, with equal texts, on all ranks. either: one of these two.
interrupted, own error: KeyboardInterrupt, or another error of its own, on the faulty rank; on the others a RankError
that names it. dies: the others raise a RankError that names the faulty one. silent: so they do, within the deadline for
silence; the faulty one raises when it can go on.
"""


@dataclass(frozen=True)
class Scene:
    """What an act may touch: the faulty rank's process, its files, and a model of the same shapes."""

    pid: int
    shard: Path
    other_shard: Path


@dataclass(frozen=True)
class Moment:
    """A point of a load, fixed by a system call that the faulty rank makes there: the first, middle or last on a path.

    Where a phase has none of its own, entering a function of the package (`mark`) makes one: see `worker.marking`. With
    `own_copy` the faulty rank has files of its own, as on another machine.
    """

    phase: str
    calls: Call = Call.OPEN
    path: str = ""
    mark: str = ""
    at: Literal["first", "middle", "last"] = "first"
    own_copy: bool = False


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    `times` -1 is for ever; `calls` replaces the moment's; `act` is done to the held rank; `undo` lets it go on
    after the others have raised; the error's text on all ranks must contain `match`, in which {rank} is the faulty one.
    """

    name: str
    expect: Expect
    action: Action = Action.HOLD
    argument: int = 0
    times: int = 1
    calls: Call | None = None
    size: tuple[int, int] = (0, -1)
    act: Callable[[Scene], None] | None = None
    undo: Callable[[Scene], None] | None = None
    match: str = r"rank {rank}\b"
    limit_s: float = LIMIT_S
    group_timeout_s: float = 1800.0


@dataclass(frozen=True)
class Case:
    """One row: a fault at a moment of one of `worker.JOBS`, on one rank of so many."""

    fault: Fault
    moment: Moment
    rank: int
    world_size: int
    job: str = "load"
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.fault.name}, {self.moment.phase}, rank {self.rank} of {self.world_size}, {self.job}"

    @property
    def keeps_ranks(self) -> bool:
        """Whether the set of ranks is as good as before afterwards."""
        return self.fault.expect not in ("dies", "silent")


# -- moments ---------------------------------------------------------------------------------------------------------

ARGUMENTS = Moment("arguments", Call.READ, "/ds.json")
DESCRIBING = Moment("describing", Call.READ, SHARD)
COMPARING = Moment("comparing", Call.READ, SHARD, mark="agree_on_bytes", own_copy=True)
PLANNING = Moment("planning", Call.MKDIR, f"{MARK}make_plan")
PREPARING = Moment("preparing", Call.MKDIR, f"{MARK}prepare")
FIRST = Moment("reading, first", Call.READ, ANY_SHARD, mark="execute")
MIDDLE, LAST = replace(FIRST, phase="reading, middle", at="middle"), replace(FIRST, phase="reading, last", at="last")
MEMORY = Moment("reading, memory", Call.MEMORY)
FINISHING = Moment("finishing", Call.FSTAT, ANY_SHARD, mark="execute", at="last")
SENDING = Moment("before sending", Call.MKDIR, f"{MARK}_exchange")
RECEIVING = Moment("sending and receiving", Call.MKDIR, f"{MARK}_finish")
BROADCASTING = Moment("broadcasting", Call.MKDIR, f"{MARK}broadcast")
FILLING = Moment("filling", Call.READ, "/saved", mark="_fill")
READS = (DESCRIBING, COMPARING, FIRST, MIDDLE, LAST)
HELD = (ARGUMENTS, DESCRIBING, COMPARING, PLANNING, PREPARING, FIRST, MIDDLE, LAST, FINISHING)
MAKING_ENGINE = Moment("making the engine", Call.MKDIR, f"{MARK}move_to")

# -- faults of files -------------------------------------------------------------------------------------------------


def _errno(code: int, how: str, expect: Expect, calls: Call | None = None) -> Fault:
    times = {"once": 1, "3 times": 3, "for ever": -1}[how]
    what = f"{errno.errorcode[code]} of {(calls or Call.READ).name.lower()}"
    return Fault(f"{what} {how}", expect, Action.FAIL, code, times, calls)


READ_FAULTS = (
    _errno(errno.EIO, "once", "loads"),
    _errno(errno.EIO, "for ever", "raises"),
    _errno(errno.ESTALE, "once", "loads"),
    _errno(errno.ESTALE, "for ever", "raises"),
    _errno(errno.EAGAIN, "3 times", "loads"),
    _errno(errno.EINTR, "3 times", "loads"),  # for ever: Python itself would never give up
    _errno(errno.ENXIO, "once", "raises"),
    Fault("a read of 1 byte", "loads", Action.SHORT, 1),
    Fault("reads of 61 bytes for ever", "loads", Action.SHORT, 61, -1),
    Fault("end of file", "raises", Action.SHORT, 0, -1),
)
OPEN_FAULTS = (
    _errno(errno.EMFILE, "once", "raises", Call.OPEN),
    _errno(errno.EIO, "once", "loads", Call.OPEN),
    _errno(errno.ESTALE, "for ever", "raises", Call.OPEN),
    _errno(errno.ENOENT, "for ever", "raises", Call.OPEN),
    _errno(errno.EACCES, "once", "raises", Call.OPEN),
)
FSTAT_FAULTS = (
    _errno(errno.EIO, "once", "loads", Call.FSTAT),
    _errno(errno.ESTALE, "for ever", "raises", Call.FSTAT),
)
CLOSE_FAULT = Fault("EIO of close", "either", Action.FAIL, errno.EIO, -1, Call.CLOSE)
NO_MEMORY = Fault("no memory", "raises", Action.FAIL, errno.ENOMEM, 1, Call.MEMORY, size=(20_000, 35_000))
SLOW = Fault("100 kB/s", "loads", Action.SLOW, 100_000, -1)
CRAWLING = Fault(
    "slower than the group's timeout",
    "loads",
    Action.SLOW,
    60_000,
    -1,
    group_timeout_s=SHORT_GROUP_S,
)

# -- changed files ---------------------------------------------------------------------------------------------------


def _renamed_over(scene: Scene) -> None:
    new = scene.shard.with_name("new")
    shutil.copy(scene.other_shard, new)
    os.replace(new, scene.shard)


def _renamed_over_alike(scene: Scene) -> None:
    new = scene.shard.with_name("new")
    shutil.copy(scene.shard, new)
    os.replace(new, scene.shard)


def _overwritten(scene: Scene) -> None:
    with scene.shard.open("r+b") as file:
        file.write(scene.other_shard.read_bytes())


def _truncated(scene: Scene) -> None:
    os.truncate(scene.shard, scene.shard.stat().st_size // 2)


def _appended(scene: Scene) -> None:
    with scene.shard.open("ab") as file:
        file.write(b"x" * 100)


def _unlinked(scene: Scene) -> None:
    scene.shard.unlink()


def _forbidden(scene: Scene) -> None:
    scene.shard.chmod(0)


def _made_a_pipe(scene: Scene) -> None:
    scene.shard.unlink()
    os.mkfifo(scene.shard)


def _made_a_folder(scene: Scene) -> None:
    scene.shard.unlink()
    scene.shard.mkdir()


CHANGES = tuple(
    Fault(name, "either", act=act, match="")
    for name, act in {
        "renamed over by another": _renamed_over,
        "renamed over by its copy": _renamed_over_alike,
        "overwritten in place": _overwritten,
        "truncated": _truncated,
        "appended to": _appended,
        "unlinked": _unlinked,
        "chmod 0": _forbidden,
        "replaced by a pipe": _made_a_pipe,
        "replaced by a folder": _made_a_folder,
    }.items()
)
CHANGED_AT = (
    Moment("before describing", Call.OPEN, SHARD),
    Moment("before reading", Call.MKDIR, f"{MARK}execute"),
    MIDDLE,
    FINISHING,
)

# -- signals ---------------------------------------------------------------------------------------------------------


def _sent(number: int) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        os.kill(scene.pid, number)

    return act


def _stopped_briefly(scene: Scene) -> None:
    os.kill(scene.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(scene.pid, signal.SIGCONT)


def _does_nothing(_: Scene) -> None:
    pass


INTERRUPT = Fault("SIGINT", "interrupted", act=_sent(signal.SIGINT), match=r"rank {rank}: KeyboardInterrupt")
INTERRUPT_ANYWHERE = replace(INTERRUPT, match=r"rank {rank}: (left .*: )?KeyboardInterrupt")
"""It may strike a rank that waits for the others."""
PAUSE = Fault("SIGSTOP for a second", "loads", act=_stopped_briefly)
DEATHS = tuple(
    Fault(name, "dies", act=_sent(number), limit_s=SILENCE_S + LIMIT_S)
    for name, number in {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}.items()
)
STOP = Fault(
    "SIGSTOP",
    "silent",
    act=_sent(signal.SIGSTOP),
    undo=_sent(signal.SIGCONT),
    limit_s=SILENCE_S + LIMIT_S,
)
HANG = Fault(
    "a call that hangs",
    "silent",
    act=_does_nothing,
    undo=_does_nothing,
    limit_s=SILENCE_S + LIMIT_S,
)

UNMEASURED = (ARGUMENTS, PREPARING)
"""In which code of others runs, so that nobody can tell getting on from waiting: there the group's timeout counts."""
HANG_UNMEASURED = replace(
    HANG, name="a call that hangs in others' code", group_timeout_s=SHORT_GROUP_S, limit_s=SHORT_GROUP_S + LIMIT_S
)

# -- the rest --------------------------------------------------------------------------------------------------------

MARKED_BLOCK = Moment("in the block", Call.READ, "/ds.json")
USERS_ERROR = Fault("the user's own error", "own error", Action.SLOW, 1_000_000_000)
FAILURE = _errno(errno.EIO, "once", "raises", Call.MKDIR)
"""Of a function that is marked, where no system call of its own can fail."""
NO_CONFIG = _errno(errno.EIO, "for ever", "own error")
READ_CONFIG = Moment("transformers reads config.json", Call.READ, "/config.json")


PLACES = ((0, 2), (1, 2), (0, 3), (2, 3))
"""Faulty ranks, and numbers of ranks."""


def cases() -> list[Case]:
    """Returns each fault at each of its moments and jobs once, on ranks and numbers of ranks in turn.

    Those of one set of ranks come together, and in it those that keep their ranks first.
    """
    rows = [replace(row, **_placed(row, *place)) for row, place in zip(_cases(), itertools.cycle(PLACES), strict=False)]
    return sorted(rows, key=_order)


def _placed(row: Case, rank: int, world_size: int) -> dict[str, Any]:
    if row.fault is STOP and row.moment is MAKING_ENGINE:  # rank 0, going on, waits for the group's timeout
        rank = world_size - 1
    arguments = {"fails_on": rank} if row.fault is USERS_ERROR else {}
    return {"rank": rank, "world_size": world_size, "arguments": arguments}


def subset() -> list[Case]:
    """Returns a row of each kind of outcome, each at another moment, rank and number of ranks."""
    few = {
        "load": (
            *(READ_FAULTS[3], READ_FAULTS[7], NO_MEMORY, SLOW, CRAWLING, CHANGES[0], CHANGES[3], CHANGES[7]),
            *(INTERRUPT, DEATHS[0], STOP, HANG, HANG_UNMEASURED),
        ),
        "stream": (READ_FAULTS[1], USERS_ERROR),
        "once": (READ_FAULTS[1], INTERRUPT_ANYWHERE, DEATHS[0]),
        "train": (DEATHS[0],),
        "resume": (READ_FAULTS[1],),
        "changed": (FAILURE, DEATHS[0]),
        "pack": (FAILURE,),
    }
    chosen, rows = list[Case](), cases()
    for job, faults in few.items():
        for fault in faults:
            same = [row for row in rows if row.job == job and row.fault.name == fault.name]
            chosen.append(same[len(chosen) * 7 % len(same)])
    return sorted(chosen, key=_order)


def _order(case: Case) -> tuple[int, float, bool]:
    return case.world_size, case.fault.group_timeout_s, not case.keeps_ranks


def _cases() -> Iterator[Case]:
    def at(fault: Fault, *moments: Moment, **options: Any) -> Iterator[Case]:
        for moment in moments:
            yield Case(fault, moment, *PLACES[0], **options)

    for fault in READ_FAULTS:
        yield from at(fault, *READS)
    for fault in OPEN_FAULTS:
        yield from at(fault, DESCRIBING)
    for fault in FSTAT_FAULTS:
        yield from at(fault, DESCRIBING, FINISHING)
    yield from at(CLOSE_FAULT, DESCRIBING, FINISHING)
    yield from at(NO_MEMORY, MEMORY)
    yield from at(SLOW, FIRST, MIDDLE)
    yield from at(CRAWLING, FIRST)
    for fault in CHANGES:
        yield from at(fault, *CHANGED_AT)
    for fault in (INTERRUPT, PAUSE, *DEATHS, STOP):
        yield from at(fault, *HELD)
    yield from at(HANG, *(moment for moment in HELD if moment not in UNMEASURED))
    yield from at(HANG_UNMEASURED, *UNMEASURED)
    for fault in (READ_FAULTS[1], INTERRUPT, DEATHS[0], STOP):
        yield from at(fault, DESCRIBING, MIDDLE, job="stream")
    yield from at(READ_FAULTS[1], FIRST, MIDDLE, LAST, job="once")
    for fault in (INTERRUPT_ANYWHERE, PAUSE, DEATHS[0], STOP, HANG):
        yield from at(fault, MIDDLE, SENDING, RECEIVING, job="once")
    yield from at(USERS_ERROR, MARKED_BLOCK, job="stream")
    yield from at(NO_CONFIG, READ_CONFIG, job="stream")
    yield from at(READ_FAULTS[1], ARGUMENTS)
    yield from at(READ_FAULTS[1], ARGUMENTS, job="train")
    for fault in (INTERRUPT, DEATHS[0], STOP):
        yield from at(fault, ARGUMENTS, job="train")
        yield from at(fault, MAKING_ENGINE, job="train")
    for fault in (FAILURE, INTERRUPT_ANYWHERE, DEATHS[0], HANG):
        yield from at(fault, BROADCASTING, job="changed")
        yield from at(fault, BROADCASTING, job="pack")
    for fault in (READ_FAULTS[1], INTERRUPT_ANYWHERE, DEATHS[0], HANG):
        yield from at(fault, FILLING, job="resume")
