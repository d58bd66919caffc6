"""Keeps the sources of one load open, and notices files that change meanwhile.

[Note: one descriptor] Header, sample and data of a file are read from one open source. If another file is renamed over
it, the load reads the old one to its end, whose bytes exist while it is open. Only if more than `MAX_OPEN_SOURCES` are
in use are some closed and opened again by their path; if another file is there then, that is an error. So is a file
that is written to in place, at any time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from lowmem_load.errors import CheckpointError
from lowmem_load.io.remote_file import RemoteFile
from lowmem_load.io.source import ByteSource, Opener
from lowmem_load.planning.load_plan import PlannedFile

MAX_OPEN_SOURCES = 96
"""Sources that stay open when nobody reads them. A process may open 256 files (macOS) or 1024 (most Linux), and the job
opens others. Few checkpoints have more files, but a ZeRO checkpoint has some for each rank that wrote it."""


@dataclass(slots=True)
class _Entry:
    """One path: how many threads read it, and its source, which the first of them opens under `lock`."""

    num_readers: int = 0
    source: ByteSource | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class OpenSources:
    """Opens sources when they are read. Any number of threads may use it.

    A source must keep the version that was planned against, or that it had when it was first opened. The version is
    compared after opening and before closing, so everything that is read in between has that version.
    """

    def __init__(self, open_source: Opener) -> None:
        self._open = open_source
        self.on_wait: Callable[[], object] = int  # called while a remote source waits; may raise to end it
        self._versions: dict[str, str] = {}
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently read first
        self._lock = threading.Lock()

    def expect(self, files: Iterable[PlannedFile]) -> None:
        """Refuse files that have another version than was planned against. Raises CheckpointError if one had before."""
        for file in files:
            self._check(file.path, file.version)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[ByteSource]:
        """Yield the open source of a path. It stays open afterwards unless there are too many.

        Raises CheckpointError if it cannot be opened or has changed, or if another has that is closed to make room.
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
        """Raise CheckpointError if an open source has changed."""
        self._check_all(self._entries.values())

    def interrupt(self) -> bool:
        """End requests to remote stores, which then raise; return whether there are such sources."""
        remote = [entry.source for entry in list(self._entries.values()) if isinstance(entry.source, RemoteFile)]
        for source in remote:
            source.close()
        return bool(remote)

    def close(self) -> None:
        """Close all sources without a check. Nobody may read them any more."""
        _close(self._entries.values())
        self._entries.clear()

    def _close_idle(self) -> None:
        with self._lock:
            num_surplus = len(self._entries) - MAX_OPEN_SOURCES
            if num_surplus <= 0:
                return
            idle = [path for path, entry in self._entries.items() if not entry.num_readers][:num_surplus]
            surplus = [self._entries.pop(path) for path in idle]
        try:
            self._check_all(surplus)
        finally:
            _close(surplus)

    def _opened(self, path: str) -> ByteSource:
        source = self._open(path)
        if isinstance(source, RemoteFile):
            source.on_wait = self.on_wait
        try:
            self._check(path, source.version)
        except CheckpointError:
            source.close()
            raise
        return source

    def _check_all(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            if entry.source is not None:
                self._check(entry.source.path, entry.source.version)

    def _check(self, path: str, version: str) -> None:
        if self._versions.setdefault(path, version) != version:
            raise CheckpointError(
                f"{path}: was replaced or written to after its header was read; load again once nobody writes to it"
            )


def _close(entries: Iterable[_Entry]) -> None:
    with contextlib.ExitStack() as closing:  # if one cannot be closed, the others are
        for entry in entries:
            if entry.source is not None:
                closing.callback(entry.source.close)
