"""What the first rank of a node finds out, for the others of it: records in memory that all processes of the node read.

[Note: board] The first rank of each node makes an anonymous file in memory, which ends with its process, and appends
records to it; the others open it through /proc and look for the record that they need. So nothing goes through the
network or the store, and nothing is left behind. A rank waits only for what the first one may still say: a stage ends
with a mark, as all of it does, however the first rank leaves; where that has come without the record, where the first
rank has ended, or where its memory cannot be opened, each finds out for itself. So a failure is that of every rank, as
without a board.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lowmem_load.ranks.group import RankGroup, StoppedError
from lowmem_load.ranks.life import started
from lowmem_load.ranks.nodes import Nodes, meet
from lowmem_load.ranks.shared_memory import make_memory, new_name, open_memory

T = TypeVar("T")

_SIZES = struct.Struct("<QQ")
"""What a record begins with: bytes of its key, and of its content; both follow."""

_NO_MORE = ""
"""Key of the last record."""

LOOK_EVERY_S = 0.002
"""Seconds between looks of a rank that has waited for a record for some time: about one percent of a core."""

LOOK_FIRST_S = 0.0001
"""Before the second look. Ranks of a node are seldom further apart, so the waits grow from here."""

LOOKS_PER_CHECK = 100
"""Of so many looks, one is also at the first rank's process."""


class Board:
    """The records of one load.

    Args:
        ranks: that load together.
        nodes: that they run on.
        descriptor: of the memory, for this board alone; -1 where nothing is shared.
        pid: of the process whose memory it is.

    Attributes:
        source: the rank that finds things out for this one: itself, or the first one of its node.
    """

    def __init__(self, ranks: RankGroup, nodes: Nodes, descriptor: int = -1, pid: int = 0) -> None:
        self.source = nodes.first if descriptor >= 0 else nodes.rank
        self._ranks, self._descriptor = ranks, descriptor
        self._writes = self.source == nodes.rank and descriptor >= 0
        self._pid, self._started = pid, started(pid)
        self._places: dict[str, tuple[int, int]] = {}  # of contents, by key: offset and bytes
        self._end = 0  # of the records that this rank has seen
        self._stage, self._num_stages = "", 0

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Within the block the ranks do the same, and find things out together. Stages do not nest."""
        self._num_stages += 1
        self._stage = str(self._num_stages)
        try:
            yield
        finally:
            if self._writes:
                self._append(self._stage, b"")
            self._stage = ""

    def once(self, key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Return what one rank of the node finds, within a stage; outside of one what this rank finds.

        Args:
            key: of what is to be found, equal on all ranks of the node.
            find: finds it, and may fail.
            pack: makes bytes of it; none where the others had better find it themselves.
            unpack: undoes `pack`.

        Raises:
            StoppedError: another rank has failed meanwhile.
        """
        if not self._stage or self._descriptor < 0:
            return find()
        key = f"{self._stage} {key}"
        if self._writes:
            found = find()
            self._append(key, pack(found))
            return found
        content = self._awaited(key)
        if not content:
            return find()
        return unpack(content)

    def close(self) -> None:
        """Let go of the memory; nobody waits any more for what this rank has not said by now."""
        if self._descriptor < 0:
            return
        if self._writes:
            with contextlib.suppress(OSError):  # no memory; whoever waits has others to hear from
                self._append(_NO_MORE, b"")
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _append(self, key: str, content: bytes) -> None:
        name = key.encode()
        left = memoryview(_SIZES.pack(len(name), len(content)) + name + content)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _awaited(self, key: str) -> bytes:
        """Return the content of a record; nothing if it does not come any more."""
        num_looks, check = 0, self._ranks.watch()
        stopped: StoppedError | None = None
        while key not in self._places:
            if self._stage in self._places or _NO_MORE in self._places:
                return b""
            self._look()
            if not self._places.keys().isdisjoint((key, self._stage, _NO_MORE)):
                continue
            if stopped is not None:
                raise stopped
            num_looks += 1
            if num_looks % LOOKS_PER_CHECK == 0 and self._has_ended():
                return b""
            try:
                check()
            except StoppedError as error:
                # A first rank that fails ends its stage before it tells of that: this one is to fail alike then.
                stopped = error
                continue
            time.sleep(min(LOOK_EVERY_S, num_looks * LOOK_FIRST_S))
        offset, nbytes = self._places[key]
        return _read(self._descriptor, offset, nbytes)

    def _has_ended(self) -> bool:
        now = started(self._pid)
        return now is not None and (not now or now != self._started)

    def _look(self) -> None:
        """Take note of records that have come. The size of a file in memory grows after its bytes are there."""
        nbytes = os.fstat(self._descriptor).st_size
        while nbytes - self._end >= _SIZES.size:
            key_nbytes, content_nbytes = _SIZES.unpack(_read(self._descriptor, self._end, _SIZES.size))
            start = self._end + _SIZES.size + key_nbytes
            if start + content_nbytes > nbytes:
                return
            key = _read(self._descriptor, start - key_nbytes, key_nbytes).decode()
            self._places[key] = start, content_nbytes
            self._end = start + content_nbytes


@contextlib.contextmanager
def board(
    ranks: RankGroup, said: T, exchange: Callable[[Any], list[Any]] | None = None
) -> Iterator[tuple[Board, Nodes, list[T]]]:
    """Yield a board for the ranks of each node, which ranks these are, and what each rank says, as `meet` does.

    Collective: one exchange, see `meet`.
    """
    name = new_name()
    descriptor = _made(name) if ranks.world_size > 1 and not ranks.is_fake else -1
    with contextlib.ExitStack() as closing:
        if descriptor >= 0:
            closing.callback(os.close, descriptor)
        nodes, found = meet(ranks, (os.getpid(), descriptor, name, said), exchange)
        pid, theirs, name, _ = found[nodes.first]
        opened = -1
        if len(nodes.neighbours) > 1 and theirs >= 0:
            if nodes.first == nodes.rank:  # in any case, since the others may wait for what it writes
                closing.pop_all()
                opened = descriptor
            else:
                opened = _opened(pid, theirs, name)
        ours = Board(ranks, nodes, opened, pid)
        closing.callback(ours.close)
        yield ours, nodes, [each for *_, each in found]


def _made(name: str) -> int:
    """Return a descriptor of a new file in memory; -1 where the system has none, or gives none."""
    try:
        return make_memory(name)
    except OSError:  # not Linux; a sandbox, or too many files are open
        return -1


def _opened(pid: int, descriptor: int, name: str) -> int:
    """Return a descriptor of the memory of this name that a process has open; -1 if that cannot be had."""
    try:
        return open_memory(pid, descriptor, name, os.O_RDONLY)
    except OSError:  # the process has ended or closed it, or may not be looked into
        return -1


def _read(descriptor: int, offset: int, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        found += os.pread(descriptor, nbytes - len(found), offset + len(found))
    return bytes(found)
