"""Keeps the sources of one load open, as few as need be, and notices when one is no longer what it was.

[Note: one descriptor] Headers, samples and data of a file are read from one open source. A file that is replaced by
renaming another over it is then read as it was, to the end: its bytes are there for as long as it is open. Only what
had to be closed meanwhile, because more than `MAX_OPEN_SOURCES` are in use, is opened by its path again; another file
there is an error, as one that was written to in place always is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lowmem_load.errors import CheckpointError
from lowmem_load.io.source import ByteSource, Opener
from lowmem_load.planning.load_plan import PlannedFile

MAX_OPEN_SOURCES = 96
"""Beyond these only what is being read is open. Limits begin at 256 files (macOS; 1024 on most Linux), of which the job
uses some; few checkpoints have more files than this, and opening one again costs microseconds to milliseconds."""


@dataclass(slots=True)
class _Entry:
    """One path: how many read it now, and the source once the first of them has opened it, under `lock`."""

    num_readers: int = 0
    source: ByteSource | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class OpenSources:
    """Opens sources when they are read, and again after they were closed. Any number of threads may use it.

    Each must stay what it was: planned against, or else when it was first opened. It is compared when it is opened
    and before it is closed, so that whatever was read in between is of that version.

    Args:
        open_source: opens one.
    """

    def __init__(self, open_source: Opener) -> None:
        self._retries_of_closed = 0
        self._open = open_source
        self._versions: dict[str, str] = {}
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently read first
        self._lock = threading.Lock()

    @property
    def num_retries(self) -> int:
        """Of all sources, as far as they count them."""
        return self._retries_of_closed + sum(map(_retries_of, self._entries.values()))

    def expect(self, files: Iterable[PlannedFile]) -> None:
        """From now on refuse a file that is not what it was when it was planned against.

        Raises:
            CheckpointError: it was another when it was read before.
        """
        for file in files:
            self._check(file.path, self._versions.setdefault(file.path, file.version), file.version)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[ByteSource]:
        """Give the open source of a path within a block; it stays open after it if there are not too many.

        Raises:
            CheckpointError: it cannot be opened, or changed; or another changed that is closed for it.
        """
        with self._lock:
            entry = self._entries.setdefault(path, _Entry())
            self._entries.move_to_end(path)
            entry.num_readers += 1
        try:
            with entry.lock:
                if entry.source is None:
                    entry.source = self._opened(path)
            yield entry.source
        finally:
            with self._lock:
                entry.num_readers -= 1
        self._close_idle()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a source that is open is no longer what it was."""
        for entry in self._entries.values():
            self._check_entry(entry)

    def close(self) -> None:
        """Close all, unchecked: nobody reads any more."""
        self._retries_of_closed = self.num_retries
        _close(self._entries.values())
        self._entries.clear()

    def _close_idle(self) -> None:
        """Close what was read the longest time ago, as far as more than `MAX_OPEN_SOURCES` are open."""
        if len(self._entries) <= MAX_OPEN_SOURCES:
            return
        with self._lock:
            num_surplus = len(self._entries) - MAX_OPEN_SOURCES
            if num_surplus <= 0:
                return
            idle = [path for path, entry in self._entries.items() if not entry.num_readers][:num_surplus]
            surplus = [self._entries.pop(path) for path in idle]
            self._retries_of_closed += sum(map(_retries_of, surplus))
        try:
            for entry in surplus:
                self._check_entry(entry)
        finally:
            _close(surplus)

    def _opened(self, path: str) -> ByteSource:
        source = self._open(path)
        try:
            self._check_source(source)
        except CheckpointError:
            source.close()
            raise
        return source

    def _check_entry(self, entry: _Entry) -> None:
        if entry.source is not None:
            self._check_source(entry.source)

    def _check_source(self, source: ByteSource) -> None:
        version = source.version
        self._check(source.path, version, self._versions.setdefault(source.path, version))

    @staticmethod
    def _check(path: str, version: str, expected: str) -> None:
        if version != expected:
            raise CheckpointError(
                f"{path}: was replaced or written to after its header was read; load again once nobody writes to it"
            )


def _retries_of(entry: _Entry) -> int:
    return getattr(entry.source, "num_retries", 0)


def _close(entries: Iterable[_Entry]) -> None:
    with contextlib.ExitStack() as closing:  # the others are closed even if one cannot be
        for entry in entries:
            if entry.source is not None:
                closing.callback(entry.source.close)
