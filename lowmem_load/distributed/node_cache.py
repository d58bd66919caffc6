"""Records that the first rank of a node finds out for the other ranks of the node.

[Note: node cache] The first rank of each node makes an anonymous file in memory and appends records to it. The other
ranks open it through /proc and look for the records that they need. Nothing goes through the network or the store, and
nothing is left behind: the file ends with the process. Ranks find out the same in stages. The first rank ends each
stage, and the whole cache, with a mark, also if it fails. If the mark comes without the record, if the first rank has
ended, or if its memory cannot be opened, each rank finds out for itself, and fails as it would without a cache.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.nodes import Nodes, make_memory, new_name, node_name, open_memory, start_time
from lowmem_load.distributed.store_channel import StoppedError

T = TypeVar("T")

_SIZES = struct.Struct("<QQ")
"""The head of a record: the bytes of its key and of its content, which follow."""

_NO_MORE = ""
"""Key of the last record."""

LOOK_EVERY_S = 0.002
"""Seconds between looks of a rank that has waited for a record for some time; that takes one percent of a core."""

LOOK_FIRST_S = 0.0001
"""Seconds before the second look; the waits grow from here, as ranks of a node are seldom further apart."""

LOOKS_PER_CHECK = 100
"""One of this many looks is also at the first rank's process."""


class NodeCache(contextlib.AbstractContextManager["NodeCache"]):
    """The records of one load. Before `meet`, and outside of stages, each rank finds out everything itself.

    Args:
        ranks: that load together.

    Attributes:
        offer: what the other ranks have to know for `meet`, JSON data.
        source: the rank whose findings this one uses: itself, or the first one of its node.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks, self.source = ranks, ranks.rank
        name = new_name()
        self._descriptor = _or_none(lambda: make_memory(name)) if ranks.hears_of_failures else -1
        self.offer: list[Any] = [node_name(ranks.rank), os.getpid(), self._descriptor, name]
        self._writes = False
        self._pid, self._started = 0, start_time(0)
        self._places: dict[str, tuple[int, int]] = {}  # of contents, by key: offset and bytes
        self._end = 0  # of the records that this rank has seen
        self._stage, self._num_stages = "", 0

    def meet(self, offers: Sequence[Any]) -> Nodes:
        """Return which ranks share a node, given their offers. From now on the first of each node finds out for it."""
        names = [f"rank {rank}" if self._ranks.is_fake else name for rank, (name, *_) in enumerate(offers)]
        nodes = Nodes(self._ranks.rank, tuple(names))
        _, self._pid, theirs, name = offers[nodes.first]
        self._started, self._writes = start_time(self._pid), nodes.first == nodes.rank
        if len(nodes.neighbours) == 1 or theirs < 0:
            self._close()
        elif not self._writes:
            self._close()
            self._descriptor = _or_none(lambda: open_memory(self._pid, theirs, name, os.O_RDONLY))
        if self._descriptor >= 0:
            self.source = nodes.first
        return nodes

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Find out together within the block, in which all ranks do the same. Stages do not nest."""
        self._num_stages += 1
        self._stage = str(self._num_stages)
        try:
            yield
        finally:
            if self._writes and self._descriptor >= 0:
                self._append(self._stage, b"")
            self._stage = ""

    def once(self, key: str, find: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Return what the first rank of the node finds; outside of a stage what this rank finds.

        Args:
            key: of the record, equal on all ranks of the node.
            find: returns the finding, or raises.
            pack: returns it as bytes; no bytes if the other ranks should find it themselves.
            unpack: the inverse of `pack`.

        Raises:
            StoppedError: another rank has failed meanwhile.
        """
        if not self._stage or self._descriptor < 0:
            return find()
        key = f"{self._stage} {key}"
        if self._writes:
            finding = find()
            self._append(key, pack(finding))
            return finding
        content = self._wait_for(key)
        if not content:
            return find()
        return unpack(content)

    def __exit__(self, *_: object) -> None:
        """Close the memory. No rank waits any longer for what this one has not written by now."""
        if self._writes and self._descriptor >= 0:
            with contextlib.suppress(OSError):  # no memory is left; waiting ranks see that this process has closed it
                self._append(_NO_MORE, b"")
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, key: str, content: bytes) -> None:
        name = key.encode()
        left = memoryview(_SIZES.pack(len(name), len(content)) + name + content)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _wait_for(self, key: str) -> bytes:
        """Return the content of a record; nothing if the first rank will not write it."""
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
                # The first rank ends its stage before it reports an error. After one more look this rank fails alike.
                stopped = error
                continue
            time.sleep(min(LOOK_EVERY_S, num_looks * LOOK_FIRST_S))
        offset, nbytes = self._places[key]
        return _read(self._descriptor, offset, nbytes)

    def _has_ended(self) -> bool:
        now = start_time(self._pid)
        return now is not None and (not now or now != self._started)

    def _look(self) -> None:
        """Note the records that have come. The size of a file in memory grows after its bytes are there."""
        nbytes = os.fstat(self._descriptor).st_size
        while nbytes - self._end >= _SIZES.size:
            key_nbytes, content_nbytes = _SIZES.unpack(_read(self._descriptor, self._end, _SIZES.size))
            start = self._end + _SIZES.size + key_nbytes
            if start + content_nbytes > nbytes:
                return
            key = _read(self._descriptor, start - key_nbytes, key_nbytes).decode()
            self._places[key] = start, content_nbytes
            self._end = start + content_nbytes


def _or_none(descriptor_of_memory: Callable[[], int]) -> int:
    """Return a descriptor; -1 if there is none: not Linux, a sandbox, too many open files, or the process has ended."""
    try:
        return descriptor_of_memory()
    except OSError:
        return -1


def _read(descriptor: int, offset: int, nbytes: int) -> bytes:
    content = bytearray()
    while len(content) < nbytes:
        content += os.pread(descriptor, nbytes - len(content), offset + len(content))
    return bytes(content)
