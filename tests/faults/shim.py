"""The fault library, compiled from shim.c, and the rules by which it acts on one process.

Rules lie in a file that the process and whoever plays the fault both map: switched on and off at any time, and read
back to see whether, how often and when a rule was acted on.
"""

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
NUM_RULES = 16
PATH_BYTES = 256


class Unavailable(RuntimeError):
    """Something that this machine lacks; the message is the reason to skip."""


class Call(IntFlag):
    OPEN = 1
    READ = 2
    FSTAT = 4
    WRITE = 8
    CLOSE = 16
    MKDIR = 32
    MEMORY = 128


class Action(IntEnum):
    COUNT = 0
    FAIL = 1
    SHORT = 2
    SLOW = 3
    HOLD = 4


@dataclass(frozen=True)
class Rule:
    """What happens to calls of one kind; see `struct rule` in shim.c. `times` -1 is for ever.

    `skip` matching calls pass first; `mark` is part of the path of a folder that must have been made before; `size` is
    the range of the bytes that MEMORY asks for.
    """

    calls: Call
    path: str = ""
    action: Action = Action.COUNT
    argument: int = 0
    skip: int = 0
    times: int = -1
    mark: str = ""
    size: tuple[int, int] = (0, -1)


class _Entry(ctypes.Structure):
    _fields_ = (
        ("mark", ctypes.c_char * PATH_BYTES),
        ("path", ctypes.c_char * PATH_BYTES),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("skip", ctypes.c_int64),
        ("times", ctypes.c_int64),
        ("argument", ctypes.c_int64),
        ("calls", ctypes.c_int32),
        ("action", ctypes.c_int32),
        ("first_fired_ns", ctypes.c_int64),
        ("enabled", ctypes.c_int32),
        ("marked", ctypes.c_int32),
        ("num_matched", ctypes.c_int32),
        ("num_fired", ctypes.c_int32),
        ("released", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Control:
    """The rules of one process, from outside of it."""

    def __init__(self, file: Path) -> None:
        nbytes = NUM_RULES * ctypes.sizeof(_Entry)
        with file.open("wb+") as opened:
            opened.truncate(nbytes)
            self._memory = mmap.mmap(opened.fileno(), nbytes)
        self._entries = (_Entry * NUM_RULES).from_buffer(self._memory)

    def set(self, rules: Iterable[Rule]) -> None:
        """Replaces all rules."""
        self.clear()
        for entry, rule in zip(self._entries, rules, strict=False):
            entry.path, entry.calls, entry.action = rule.path.encode(), rule.calls, rule.action
            entry.first, entry.last = rule.size
            entry.skip, entry.times, entry.argument, entry.mark = (
                rule.skip,
                rule.times,
                rule.argument,
                rule.mark.encode(),
            )
            entry.marked = entry.num_matched = entry.num_fired = entry.released = entry.first_fired_ns = 0
            entry.enabled = 1  # last: from now on the process sees it

    def clear(self) -> None:
        """Switches all rules off; what is held goes on."""
        for entry in self._entries:
            entry.enabled = 0

    def release(self) -> None:
        """Lets go on what the rules hold; they hold nothing any more."""
        for entry in self._entries:
            entry.released = 1

    def num_matched(self, number: int = 0) -> int:
        """Calls so far that the rule is about."""
        return int(self._entries[number].num_matched)

    def num_fired(self, number: int = 0) -> int:
        """Calls so far that the rule was acted on."""
        return int(self._entries[number].num_fired)

    def fired_at(self, number: int = 0) -> float:
        """When that was first, by `time.perf_counter`."""
        return int(self._entries[number].first_fired_ns) / 1e9


def attach(file: str) -> None:
    """Has this process, which the library is preloaded into, act by the rules in `file`."""
    size = ctypes.CDLL(None).faults_attach(file.encode())
    if size != ctypes.sizeof(_Entry):
        raise RuntimeError(f"{file}: the library says {size}, its rules have {ctypes.sizeof(_Entry)} bytes")


def build(folder: Path) -> Path:
    """Returns the library, compiled into `folder` unless it is there.

    Raises:
        Unavailable: there is no compiler, or it fails, or this is not Linux.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not sys.platform.startswith("linux"):
        raise Unavailable("faults are made by LD_PRELOAD and /proc, which only Linux has")
    if compiler is None:
        raise Unavailable("no C compiler (gcc or cc) for tests/faults/shim.c")
    made = folder / f"faults-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / made.name
        command = [compiler, "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", target, SOURCE, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"{compiler} cannot compile shim.c: {done.stderr.strip()[-500:]}")
        os.replace(target, made)
    return made
