"""Reads what the ranks of a job need together: each its bands, and sends the others what they need of them.

See [Note: exchanged reading] in `planning/exchange.py`, which says who reads what and what goes into which message.
"""

from __future__ import annotations

import collections
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.cooperative import BAND_BYTES, Band, Schedule, Shared, wanted
from lowmem_load.planning.exchange import (
    MAX_ASKED,
    MESSAGE_BYTES,
    NUM_BANDS,
    BandIndex,
    agreed_schedule,
    decoded_reads,
    encoded_ranges,
    encoded_reads,
    messages,
    received,
    sent,
)
from lowmem_load.planning.reads import Read, Step
from lowmem_load.read.executor import Executor
from lowmem_load.read.scatter import scatter_elements
from lowmem_load.read.together import Delivery, ReadTogether

T = TypeVar("T")

POLL_S = 0.1
"""Seconds after which somebody who waits for another thread looks around."""

_SIZE = struct.Struct("<Q")
"""What a letter begins with, its bytes; and a number of reads."""

MAX_LETTER_BYTES = 1 << 28
"""Of a letter: what is longer was not written by these ranks."""


class Streams(Protocol):
    """Bytes from each rank to each, itself included, in order; see `ranks/connections.py`.

    One thread may send while another one receives. `check` is called every now and then by one that has to wait.
    """

    place: int
    num_ranks: int

    def send(self, place: int, content: memoryview, check: Callable[[], None]) -> None:
        """Send bytes to a rank."""

    def receive(self, place: int, memory: memoryview, check: Callable[[], None]) -> None:
        """Fill memory with the next bytes from a rank."""

    def end(self) -> None:
        """Send and receive no more; the others notice."""


class ExchangedReads(ReadTogether):
    """Reads steps together with other ranks, over the network.

    Memory: `EXCHANGE_BYTES`, what is kept of the reads that others ask for (see `MAX_ASKED`), and as `ReadTogether`.

    Args:
        steps: that are taken out of the fills that they are in.
        paths: of the files here, in an order that all ranks share: another node may have them in another folder.
        streams: between the ranks that take part; ended by `run`.
        block_bytes: of the file system; see `schedule`.
        check: raises where another rank has failed; called while this one waits.
    """

    why_alone = "there are too many different pieces to keep account of"

    def __init__(
        self,
        steps: Sequence[Step],
        paths: Sequence[str],
        streams: Streams,
        block_bytes: int,
        *,
        check: Callable[[], None],
    ) -> None:
        super().__init__(steps)
        self._paths = {f"{number:06d}": path for number, path in enumerate(paths)}  # by what all ranks call them
        self._streams, self._block_bytes, self._check = streams, block_bytes, check
        self._stopping = threading.Event()
        self._num_reading = 0  # bands that are being read
        self._lock = threading.Lock()

    def _read(self, executor: Executor, deliveries: Sequence[Delivery]) -> Shared | None:
        called = {path: name for name, path in self._paths.items()}
        tensors = {
            each.read.tensor: replace(each.read.tensor, path=called[each.read.tensor.path]) for each in deliveries
        }
        reads = [replace(each.read, tensor=tensors[each.read.tensor]) for each in deliveries]
        with ThreadPoolExecutor(NUM_BANDS, "lowmem_load-band") as pool:  # one sends, the others read
            try:
                letter = encoded_ranges(wanted(reads), self._block_bytes)
                found = agreed_schedule(
                    self._swapped(pool, [letter] * self._streams.num_ranks), self._streams.num_ranks
                )
                if found is None:
                    return None
                mine, to_ask = self._to_ask(found, reads)
                if self._is_too_much(pool, to_ask):
                    return None
                asked = self._asked(pool, found, to_ask)
                sending = pool.submit(self._send_bands, pool, executor, found, asked)
                exchanged_bytes = self._take_bands(executor, found, mine, reads, deliveries, sending)
                read_bytes, sent_bytes = self._result(sending)
            finally:
                self._stopping.set()
                self._streams.end()
        return Shared(
            *(found.num_ranks, found.wanted_bytes, found.read_bytes, read_bytes, exchanged_bytes),
            *(found.num_rounds, sent_bytes),
            over_network=True,
        )

    def _swapped(self, pool: ThreadPoolExecutor, letters: Sequence[bytes]) -> Iterator[bytes]:
        """Send each rank a letter; yield those that come, by rank."""

        def send() -> None:
            for place, letter in enumerate(letters):
                self._send(place, memoryview(_SIZE.pack(len(letter)) + letter))

        sending = pool.submit(send)
        for place in range(self._streams.num_ranks):
            size = bytearray(_SIZE.size)
            self._receive(place, memoryview(size), sending)
            (nbytes,) = _SIZE.unpack(size)
            if nbytes > MAX_LETTER_BYTES:
                raise PlanError(f"reading together: place {place} of the group says that it sends {nbytes} bytes")
            content = bytearray(nbytes)
            self._receive(place, memoryview(content), sending)
            yield bytes(content)
        self._result(sending)

    @staticmethod
    def _to_ask(found: Schedule, reads: Sequence[Read]) -> tuple[dict[int, list[int]], list[list[Read]]]:
        """Return the numbers of reads by the band that they need, and what to ask each rank for."""
        index = BandIndex(found)
        mine: dict[int, list[int]] = {}
        of_rank: list[dict[int, Read]] = [{} for _ in range(found.num_ranks)]
        for number, read in enumerate(reads):
            for band in index.bands_of(read):
                mine.setdefault(band, []).append(number)
                of_rank[band % found.num_ranks][number] = read
        return mine, [list(each.values()) for each in of_rank]

    def _is_too_much(self, pool: ThreadPoolExecutor, to_ask: Sequence[Sequence[Read]]) -> bool:
        """Return whether some rank would be asked for more than `MAX_ASKED`, which nobody has written out yet."""
        counts = [_SIZE.pack(len(reads)) for reads in to_ask]
        num_asked = sum(_SIZE.unpack(letter)[0] for letter in self._swapped(pool, counts))
        return b"\1" in set(self._swapped(pool, [bytes([num_asked > MAX_ASKED])] * self._streams.num_ranks))

    def _asked(self, pool: ThreadPoolExecutor, found: Schedule, to_ask: Sequence[Sequence[Read]]) -> list[_Asked]:
        """Ask the others for what they will read; return what each asks of this rank."""
        index, place, num_ranks = BandIndex(found), self._streams.place, found.num_ranks
        asked = []
        for letter in self._swapped(pool, [encoded_reads(reads) for reads in to_ask]):
            theirs = decoded_reads(letter)
            by_band: dict[int, list[int]] = {}
            for number, read in enumerate(theirs):
                for band in index.bands_of(read):
                    if band % num_ranks == place:
                        by_band.setdefault(band, []).append(number)
            asked.append(_Asked(theirs, by_band))
        return asked

    def _send_bands(
        self, pool: ThreadPoolExecutor, executor: Executor, found: Schedule, asked: Sequence[_Asked]
    ) -> tuple[int, int]:
        """Read what this rank has to, and send it to who needs it, itself included; return bytes of both.

        Runs in a thread of its own, and has the next bands read by others.
        """
        memory = torch.empty(NUM_BANDS, BAND_BYTES, dtype=torch.uint8, device="cpu")
        message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        mine = range(self._streams.place, len(found.bands), found.num_ranks)
        reading: collections.deque[tuple[int, torch.Tensor, Future[int]]] = collections.deque()
        read_bytes = sent_bytes = 0
        for count in range(len(mine) + NUM_BANDS - 1):
            if count < len(mine):
                number, place = mine[count], memory[count % NUM_BANDS]  # what was there has been sent
                reading.append((number, place, pool.submit(self._read_band, executor, found.bands[number], place)))
            if count >= NUM_BANDS - 1:
                number, place, band_bytes = reading.popleft()
                read_bytes += band_bytes.result()
                sent_bytes += self._send_band(number, found.bands[number], place, asked, message)
        return read_bytes, sent_bytes

    def _read_band(self, executor: Executor, band: Band, memory: torch.Tensor) -> int:
        with self._lock:
            self._num_reading += 1
        num_bytes = 0
        for part, place in band:
            self._check_stopping()
            size = part.end - part.start
            what = f"the tensor at byte {part.origin}"
            executor.read_range(self._paths[part.path], part.start, memory[place : place + size], what)
            num_bytes += size
        with self._lock:
            self._num_reading -= 1
        return num_bytes

    def _send_band(
        self, number: int, band: Band, memory: torch.Tensor, asked: Sequence[_Asked], message: torch.Tensor
    ) -> int:
        """Send a band that has been read; return the bytes of it that went to others."""
        sent_bytes = 0
        for place, (reads, by_band) in enumerate(asked):
            for parts in messages(reads, by_band.get(number, ()), band):
                for part in parts:
                    dtype = reads[part.number].tensor.dtype
                    start, size = part.segment.place, part.segment.wanted.end - part.segment.wanted.start
                    values = memory[start : start + size].view(dtype)
                    scatter_elements(sent(part.scatter), values, message[part.place :][: part.nbytes].view(dtype), 0)
                    sent_bytes += part.nbytes if place != self._streams.place else 0
                self._send(place, message.numpy().data[: parts[-1].place + parts[-1].nbytes])
        return sent_bytes

    def _take_bands(
        self,
        executor: Executor,
        found: Schedule,
        mine: Mapping[int, Sequence[int]],
        reads: Sequence[Read],
        deliveries: Sequence[Delivery],
        sending: Future[tuple[int, int]],
    ) -> int:
        """Take what this rank needs of all bands; return the bytes that others have sent."""
        message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        exchanged_bytes = 0
        for number in sorted(mine):
            place = number % found.num_ranks
            for parts in messages(reads, mine[number], found.bands[number]):
                self._receive(place, message.numpy().data[: parts[-1].place + parts[-1].nbytes], sending)
                for part in parts:
                    content = message[part.place : part.place + part.nbytes]
                    num_bytes = deliveries[part.number].take(received(part.scatter), content)
                    executor.on_bytes(num_bytes)
                    exchanged_bytes += num_bytes if place != self._streams.place else 0
        return exchanged_bytes

    def _send(self, place: int, content: memoryview) -> None:
        self._streams.send(place, content, self._check_stopping)

    def _receive(self, place: int, memory: memoryview, sending: Future[Any]) -> None:
        self._streams.receive(place, memory, lambda: self._check_waiting(sending))

    def _result(self, sending: Future[T]) -> T:
        """Return what a thread returns, once it has; others may have to be waited for until then."""
        while not wait([sending], POLL_S).done:
            self._check_waiting(sending)
        return sending.result()

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise PlanError("reading together was given up")  # nobody hears of it: the main thread has raised

    def _check_waiting(self, sending: Future[Any]) -> None:
        """Raise what went wrong, here or elsewhere. While this rank does not read, it is others that do not get on."""
        if sending.done():
            sending.result()
        self._check()
        self.waited += self._num_reading == 0


class _Asked(NamedTuple):
    """What one rank asks of this one: reads, and by band the numbers of those that may need something of it."""

    reads: Sequence[Read]
    by_band: Mapping[int, Sequence[int]]
