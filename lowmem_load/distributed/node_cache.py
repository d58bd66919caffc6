"""What the first rank of a node finds out, for the others of it: records in memory that all processes of the node read.

[Note: node cache] The first rank of each node makes an anonymous file in memory, which ends with its process, and
appends records to it; the others open it through /proc and look for the record that they need. So nothing goes through
the network or the store, and nothing is left behind. A rank waits only for what the first one may still write: the
first one ends each stage, and all of it, with a mark, whether it fails or not. If that comes without the record, if the
first rank has ended, or if its memory cannot be opened, each rank finds out for itself. So a failure is that of every
rank, as without a cache.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.nodes import Nodes, node_name, start_time
from lowmem_load.distributed.shared_memory import make_memory, new_name, open_memory
from lowmem_load.distributed.store_channel import StoppedError

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


class NodeCache(contextlib.AbstractContextManager["NodeCache"]):
    """The records of one load. Until `meet`, and outside of stages, each rank finds out all by itself.

    Args:
        ranks: that load together.

    Attributes:
        offer: what the other ranks have to know before they meet, JSON data.
        source: the rank that finds things out for this one: itself, or the first one of its node.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks, self.source = ranks, ranks.rank
        name = new_name()
        self._descriptor = _made(name) if ranks.hears_of_failures else -1
        self.offer: list[Any] = [node_name(ranks.rank), os.getpid(), self._descriptor, name]
        self._writes = False
        self._pid, self._started = 0, start_time(0)
        self._places: dict[str, tuple[int, int]] = {}  # of contents, by key: offset and bytes
        self._end = 0  # of the records that this rank has seen
        self._stage, self._num_stages = "", 0

    def meet(self, offers: Sequence[Any]) -> Nodes:
        """Return which ranks share a node, by their offers; the first of each node finds out for it from now on."""
        names = [f"rank {rank}" if self._ranks.is_fake else name for rank, (name, *_) in enumerate(offers)]
        nodes = Nodes(self._ranks.rank, tuple(names))
        _, self._pid, theirs, name = offers[nodes.first]
        self._started, self._writes = start_time(self._pid), nodes.first == nodes.rank
        if len(nodes.neighbours) == 1 or theirs < 0:
            self._let_go()
        elif not self._writes:
            self._let_go()
            self._descriptor = _opened(self._pid, theirs, name)
        if self._descriptor >= 0:  # a first rank writes in any case, since others may wait for it
            self.source = nodes.first
        return nodes

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Within the block the ranks do the same, and find things out together. Stages do not nest."""
        self._num_stages += 1
        self._stage = str(self._num_stages)
        try:
            yield
        finally:
            if self._writes and self._descriptor >= 0:
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

    def __exit__(self, *_: object) -> None:
        """Let go of the memory; nobody waits any more for what this rank has not written by now."""
        if self._writes and self._descriptor >= 0:
            with contextlib.suppress(OSError):  # no memory; whoever waits hears of this rank otherwise
                self._append(_NO_MORE, b"")
        self._let_go()

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, key: str, content: bytes) -> None:
        name = key.encode()
        left = memoryview(_SIZES.pack(len(name), len(content)) + name + content)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _awaited(self, key: str) -> bytes:
        """Return the content of a record; nothing if it does not come any more."""
        num_looks = 0
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
                self._ranks.check()
            except StoppedError as error:
                # A first rank that fails ends its stage before it tells of that: this one is to fail alike then.
                stopped = error
                continue
            time.sleep(min(LOOK_EVERY_S, num_looks * LOOK_FIRST_S))
        offset, nbytes = self._places[key]
        return _read(self._descriptor, offset, nbytes)

    def _has_ended(self) -> bool:
        now = start_time(self._pid)
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
