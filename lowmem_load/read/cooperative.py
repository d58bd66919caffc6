"""Reads what the ranks of a node need together: each its bands, into memory that all of them share.

See [Note: cooperative reading] in `planning/cooperative.py`, which says who reads what.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from lowmem_load.errors import PlanError
from lowmem_load.planning.cooperative import (
    PAGE_BYTES,
    Schedule,
    Segment,
    Shared,
    Wanted,
    node_schedule,
    pieces_of,
    wanted,
)
from lowmem_load.planning.reads import Read, Step
from lowmem_load.read.executor import Executor
from lowmem_load.read.together import Delivery, ReadTogether

_WANTED, _FILLED, _TAKEN = 0, 1, 2
"""Counters: whether a rank has said what it wants, and heard of the others; rounds that it has read; and taken from."""


class Windows(Protocol):
    """Memory that the ranks of a node share; see `ranks/shared_memory.py`."""

    place: int
    num_ranks: int
    window_bytes: int

    def window(self, place: int) -> torch.Tensor:
        """Return the window of a rank, uint8."""

    def tell(self, counter: int, value: int) -> None:
        """Set a counter of this rank, once all that was written before can be seen."""

    def wait(self, counter: int, value: int, check: Callable[[Sequence[int]], None]) -> None:
        """Wait until the counter of every rank has reached a value; `check` is given the places that are behind."""


class SharedReads(ReadTogether):
    """Reads steps together with the other ranks of the node.

    Memory: the window of this rank, and as `ReadTogether`.

    Args:
        steps: that are taken out of the fills that they are in.
        windows: of the ranks that take part.
        block_bytes: of a block that costs as a whole; see `ReadCost.block_bytes`.
        check: raises where another rank has failed; called while this one waits.

    Attributes:
        missing: places of the ranks that it waits for.
    """

    why_alone = "the ranks of this node would read little less together"

    def __init__(
        self,
        steps: Sequence[Step],
        windows: Windows,
        block_bytes: int,
        *,
        check: Callable[[], None],
    ) -> None:
        super().__init__(steps)
        self.missing: tuple[int, ...] = ()
        self._windows, self._block_bytes, self._check = windows, block_bytes, check
        self._stopping = threading.Event()
        self._waiting_since = 0.0

    def _read(self, executor: Executor, deliveries: Sequence[Delivery]) -> Shared | None:
        found = self._agreed_schedule([delivery.read for delivery in deliveries])
        if found is None:
            return None
        by_tensor: dict[tuple[str, int], list[Delivery]] = {}
        for delivery in deliveries:
            tensor = delivery.read.tensor
            by_tensor.setdefault((tensor.path, tensor.start), []).append(delivery)
        with ThreadPoolExecutor(1 + executor.num_threads, "lowmem_load-band") as pool:  # one sees to the bands
            reading = pool.submit(self._read_bands, pool, executor, found)
            try:
                exchanged_bytes = self._take_bands(executor, found, by_tensor, reading)
            finally:
                self._stopping.set()
            read_bytes = reading.result()
        return Shared(
            *(found.num_ranks, found.wanted_bytes, found.read_bytes, read_bytes, exchanged_bytes, found.num_rounds)
        )

    def _agreed_schedule(self, reads: Iterable[Read]) -> Schedule | None:
        """Return who reads what, as all ranks of the node find it from what each wants; None if it is not worth it."""
        windows = self._windows
        letter = _Letter(self._block_bytes, wanted(reads))
        letter.write(windows.window(windows.place))
        windows.tell(_WANTED, 1)
        windows.wait(_WANTED, 1, self._check_others)
        letters = [_Letter.read(windows.window(place)) for place in range(windows.num_ranks)]
        windows.tell(_WANTED, 2)
        windows.wait(_WANTED, 2, self._check_others)
        known = [letter for letter in letters if letter is not None]
        if len(known) < len(letters):
            return None
        return node_schedule(
            [letter.wanted for letter in known],
            max(letter.block_bytes for letter in known),
            windows.window_bytes // 2,
        )

    def _read_bands(self, pool: ThreadPoolExecutor, executor: Executor, found: Schedule) -> int:
        """Read what this rank has to, in a thread of its own, with as many others as read alone; return the bytes."""
        windows, num_bytes = self._windows, 0
        each = map if executor.num_threads == 1 else pool.map
        for number in range(found.num_rounds):
            windows.wait(_TAKEN, number - 1, self._check_stopping)  # everybody is done with this half of the window
            memory = self._half(windows.place, number)

            def read(piece: Segment, memory: torch.Tensor = memory) -> int:
                part, size = piece.wanted, piece.wanted.end - piece.wanted.start
                what = f"the tensor at byte {part.origin}"
                executor.read_range(part.path, part.start, memory[piece.place : piece.place + size], what)
                return size

            band = found.band(number, windows.place)
            num_bytes += sum(each(read, pieces_of(band, executor.num_threads, max(self._block_bytes, PAGE_BYTES))))
            windows.tell(_FILLED, number + 1)
        return num_bytes

    def _take_bands(
        self,
        executor: Executor,
        found: Schedule,
        deliveries: Mapping[tuple[str, int], Sequence[Delivery]],
        reading: Future[int],
    ) -> int:
        """Take what this rank needs of all bands; return the bytes that others have read."""
        windows, exchanged_bytes = self._windows, 0

        def check(missing: Sequence[int]) -> None:
            if reading.done():
                reading.result()  # raises what went wrong there
            self._check_others(missing)

        for number in range(found.num_rounds):
            windows.wait(_FILLED, number + 1, check)
            for place in range(found.num_ranks):
                memory = self._half(place, number)
                for segment in found.band(number, place):
                    part = segment.wanted
                    for delivery in deliveries.get((part.path, part.origin), ()):
                        num_bytes = delivery.deliver(segment, memory)
                        executor.on_bytes(num_bytes)
                        exchanged_bytes += num_bytes if place != windows.place else 0
            windows.tell(_TAKEN, number + 1)
        return exchanged_bytes

    def _half(self, place: int, number: int) -> torch.Tensor:
        half = self._windows.window_bytes // 2
        return self._windows.window(place).narrow(0, number % 2 * half, half)

    def _check_stopping(self, _: Sequence[int]) -> None:
        if self._stopping.is_set():
            raise PlanError("reading together was given up")  # nobody hears of it: the other thread has raised

    def _check_others(self, missing: Sequence[int]) -> None:
        """Count the seconds in which this rank waits for others alone, so that it is not taken for one that hangs."""
        self._check()
        now = time.monotonic()
        if self._windows.place in missing or tuple(missing) != self.missing:
            self.missing, self._waiting_since = tuple(missing), now
        elif now - self._waiting_since >= 1:
            self._waiting_since, self.waited = now, self.waited + 1


class _Letter(NamedTuple):
    """What a rank tells the others of its node, in its window before anything is read into it."""

    block_bytes: int
    wanted: Sequence[Wanted]

    def write(self, window: torch.Tensor) -> None:
        """Put it into a window; one that does not fit says so, and nothing is read together then."""
        paths = sorted({each.path for each in self.wanted})
        numbers = {path: number for number, path in enumerate(paths)}
        ranges = [[numbers[each.path], *each[1:]] for each in self.wanted]
        text = json.dumps([self.block_bytes, paths, ranges]).encode()
        if 8 + len(text) > window.numel():
            text = b"null"
        content = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        window[: content.numel()] = content

    @classmethod
    def read(cls, window: torch.Tensor) -> _Letter | None:
        """Return what a window holds; None for one that did not fit."""
        content = window.numpy()
        size = int.from_bytes(content[:8].tobytes(), "little")
        found = json.loads(content[8 : 8 + size].tobytes())
        if found is None:
            return None
        block_bytes, paths, ranges = found
        return cls(block_bytes, [Wanted(paths[number], *rest) for number, *rest in ranges])
