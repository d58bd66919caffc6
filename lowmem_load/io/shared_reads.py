"""Reads that the ranks of a node do together: each rank reads bands into shared memory, and all take their elements.

See [Note: cooperative reading] in `planning/cooperative.py`, which decides who reads what.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from lowmem_load.errors import PlanError, listed
from lowmem_load.io.executor import Executor
from lowmem_load.io.scatter import scatter_elements
from lowmem_load.io.temporaries import compute_into
from lowmem_load.io.windows import Windows
from lowmem_load.planning.cooperative import (
    PAGE_BYTES,
    Schedule,
    Segment,
    Shared,
    Wanted,
    node_schedule,
    pieces_of,
    wanted,
    within,
)
from lowmem_load.planning.load_plan import Value
from lowmem_load.planning.nest import Nest
from lowmem_load.planning.planner import Material
from lowmem_load.planning.reads import Apply, Fill, Move, Piece, Read, Step

_CPU = torch.device("cpu")

_WANTED, _FILLED, _TAKEN = 0, 1, 2
"""Counters of a rank: 1 once it has said what it wants, 2 once it has heard the others; rounds read; rounds taken."""


class SharedReads:
    """Reads steps together with the other ranks of the node.

    Memory: the window of this rank, and `MAX_OPEN_BYTES` for elementwise operations that wait for their inputs.

    Args:
        steps: that are taken out of the fills that they are in.
        windows: of the ranks that take part.
        block_bytes: of a block that costs as a whole; see `ReadCost.block_bytes`.
        check: raises where another rank has failed; called while this one waits.

    Attributes:
        waited: grows while this rank waits for others, so that it is not taken for one that hangs.
    """

    def __init__(self, steps: Sequence[Step], windows: Windows, block_bytes: int, *, check: Callable[[], None]) -> None:
        self.waited = 0
        self._chosen = {id(step) for step in steps}
        self._taken: list[_Taken] = []
        self._windows, self._block_bytes, self._check = windows, block_bytes, check
        self._stopping = threading.Event()
        self._behind: tuple[int, ...] = ()  # places of the ranks that this one waits for
        self._waiting_since = 0.0

    def take(self, fill: Fill, destination: torch.Tensor, material: Material) -> Fill:
        """Return what of a fill is left to do alone; `run` does the rest."""
        mine = [step for step in fill.steps if id(step) in self._chosen]
        for step in mine:
            numbers = {part.value for part in _parts(step) if isinstance(part, Move)}
            self._taken.append(_Taken(step, destination, {number: material.tensors[number] for number in numbers}))
        return replace(fill, steps=tuple(step for step in fill.steps if id(step) not in self._chosen)) if mine else fill

    def run(self, executor: Executor, values: Sequence[Value], material: Material) -> Shared | None:
        """Carry out what was taken; alone, and returning None, where the ranks would read little less together.

        Raises:
            CheckpointError: as of `Executor.finish`.
            PlanError: what the ranks have read does not hold all that this rank needs.
            StoppedError: another rank has failed.
        """
        deliveries = [each for taken in self._taken for each in _deliveries(taken, executor, material)]
        found = self._agreed_schedule(each.read for each in deliveries)
        if found is None:
            for taken in self._taken:
                fill = Fill(taken.destination.numel(), taken.destination.dtype, (taken.step,), tuple(taken.known))
                executor.fill(fill, taken.destination, values, Material(dict(taken.known), material.functions))
            return None
        with ThreadPoolExecutor(1 + executor.num_threads, "lowmem_load-band") as pool:  # one waits for the others
            reading = pool.submit(self._read_bands, pool, executor, found)
            try:
                self._take_bands(executor, found, deliveries, reading)
            finally:
                self._stopping.set()
            read_bytes = reading.result()
        if missing := sorted({each.read.tensor.name for each in deliveries if each.left}):
            raise PlanError(f"{listed(missing)}: not all that is needed was in what the ranks read together")
        return Shared(found.num_ranks, found.wanted_bytes, found.read_bytes, read_bytes)

    def _agreed_schedule(self, reads: Iterable[Read]) -> Schedule | None:
        """Return who reads what, which all ranks of the node find alike; None where they read alone."""
        windows = self._windows
        _write(windows.window(windows.place), self._block_bytes, wanted(reads))
        windows.tell(_WANTED, 1)
        windows.wait(_WANTED, 1, self._check_others)
        said = [_read(windows.window(place)) for place in range(windows.num_ranks)]
        windows.tell(_WANTED, 2)
        windows.wait(_WANTED, 2, self._check_others)  # the first band overwrites what this rank has said
        known = [each for each in said if each is not None]
        if len(known) < len(said):
            return None
        block_bytes = max(block_bytes for block_bytes, _ in known)
        return node_schedule([ranges for _, ranges in known], block_bytes, windows.window_bytes // 2)

    def _read_bands(self, pool: ThreadPoolExecutor, executor: Executor, found: Schedule) -> int:
        """Read the bands of this rank, with as many threads as it reads with alone; return their bytes."""
        windows, num_bytes = self._windows, 0
        each = map if executor.num_threads == 1 else pool.map
        for number in range(found.num_rounds):
            windows.wait(_TAKEN, number - 1, self._check_stopping)  # all ranks are done with this half of the window
            memory = self._half(windows.place, number)

            def read(piece: Segment, memory: torch.Tensor = memory) -> int:
                part, size = piece.wanted, piece.wanted.end - piece.wanted.start
                what = f"the tensor at byte {part.origin}"
                executor.read_range(part.path, part.start, memory[piece.place : piece.place + size], what)
                return size

            pieces = pieces_of(
                found.band(number, windows.place), executor.num_threads, max(self._block_bytes, PAGE_BYTES)
            )
            num_bytes += sum(each(read, pieces))
            windows.tell(_FILLED, number + 1)
        return num_bytes

    def _take_bands(
        self, executor: Executor, found: Schedule, deliveries: Sequence[_Delivery], reading: Future[int]
    ) -> None:
        """Take what this rank needs of all bands."""
        windows = self._windows
        by_tensor: dict[tuple[str, int], list[_Delivery]] = {}
        for delivery in deliveries:
            tensor = delivery.read.tensor
            by_tensor.setdefault((tensor.path, tensor.start), []).append(delivery)

        def check(behind: Sequence[int]) -> None:
            if reading.done():
                reading.result()  # raises what went wrong there
            self._check_others(behind)

        for number in range(found.num_rounds):
            windows.wait(_FILLED, number + 1, check)
            for place in range(found.num_ranks):
                memory = self._half(place, number)
                for segment in found.band(number, place):
                    for delivery in by_tensor.get((segment.wanted.path, segment.wanted.origin), ()):
                        executor.on_bytes(delivery.deliver(segment, memory))
            windows.tell(_TAKEN, number + 1)

    def _half(self, place: int, number: int) -> torch.Tensor:
        half = self._windows.window_bytes // 2
        return self._windows.window(place).narrow(0, number % 2 * half, half)

    def _check_stopping(self, _: Sequence[int]) -> None:
        if self._stopping.is_set():
            raise PlanError("reading together was given up")  # nobody hears of it: the other thread has raised

    def _check_others(self, behind: Sequence[int]) -> None:
        """Count the seconds in which this rank waits for others alone."""
        self._check()
        now = time.monotonic()
        if self._windows.place in behind or tuple(behind) != self._behind:
            self._behind, self._waiting_since = tuple(behind), now
        elif now - self._waiting_since >= 1:
            self._waiting_since, self.waited = now, self.waited + 1


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step that was taken, the memory that it fills, and the values in memory that it needs."""

    step: Step
    destination: torch.Tensor
    known: Mapping[int, torch.Tensor]


class _Delivery:
    """A read whose elements come from bands; `put` is given what has come, as its destination is to be filled."""

    def __init__(self, read: Read, put: Callable[[Nest, torch.Tensor], None]) -> None:
        self.read, self._put = read, put
        self.left = read.num_reads * read.nest.numel

    def deliver(self, segment: Segment, memory: torch.Tensor) -> int:
        """Put what is in a segment where it belongs; return the bytes of it that were needed."""
        part, dtype, num_bytes = segment.wanted, self.read.tensor.dtype, 0
        content = memory[segment.place : segment.place + part.end - part.start]
        for nest in within(self.read, segment):
            self._put(nest, content.view(dtype))
            self.left -= nest.numel
            num_bytes += nest.source_numel * dtype.itemsize
        return num_bytes


class _OpenPiece:
    """A piece of an elementwise operation, which is computed once all of its inputs have come."""

    def __init__(self, taken: _Taken, step: Apply, piece: Piece, executor: Executor, material: Material) -> None:
        self._taken, self._piece, self._executor = taken, piece, executor
        self._compute, self._dtype = material.functions[step.function], step.dtype
        self._inputs: list[torch.Tensor] = []
        reads = [part for fill in piece.inputs for part in fill.steps if isinstance(part, Read)]
        self._left = sum(read.num_reads * read.nest.numel for read in reads)

    def put(self, number: int, nest: Nest, values: torch.Tensor) -> None:
        """Fill a part of input `number`."""
        if not self._inputs:
            self._open()
        scatter_elements(nest, values, self._inputs[number], 0)
        self._left -= nest.numel
        if self._left == 0:
            result = next((each for each in self._inputs if each.dtype == self._dtype), None)
            if result is None:
                result = torch.empty(self._piece.numel, dtype=self._dtype, device=_CPU)
            compute_into(result, self._compute, self._inputs)
            self._inputs = []
            self._executor.place(self._piece.nest, result, self._taken.destination)

    def _open(self) -> None:
        for fill in self._piece.inputs:
            self._inputs.append(torch.empty(fill.numel, dtype=fill.dtype, device=_CPU))
            for part in fill.steps:
                if isinstance(part, Move):
                    scatter_elements(part.nest, self._taken.known[part.value], self._inputs[-1], 0)


def _deliveries(taken: _Taken, executor: Executor, material: Material) -> Iterator[_Delivery]:
    step = taken.step
    if isinstance(step, Read):
        yield _Delivery(step, lambda nest, values: executor.place(nest, values, taken.destination))
        return
    assert isinstance(step, Apply)  # as `shared_steps` chooses
    for piece in step.pieces:
        opened = _OpenPiece(taken, step, piece, executor, material)
        for number, fill in enumerate(piece.inputs):
            for part in fill.steps:
                if isinstance(part, Read):
                    yield _Delivery(part, functools.partial(opened.put, number))


def _parts(step: Step) -> list[Step]:
    if not isinstance(step, Apply):
        return [step]
    return [part for piece in step.pieces for fill in piece.inputs for part in fill.steps]


def _write(window: torch.Tensor, block_bytes: int, ranges: Sequence[Wanted]) -> None:
    """Put what a rank wants into its window; where that does not fit, the window says so."""
    paths = sorted({each.path for each in ranges})
    numbers = {path: number for number, path in enumerate(paths)}
    text = json.dumps([block_bytes, paths, [[numbers[each.path], *each[1:]] for each in ranges]]).encode()
    if 8 + len(text) > window.numel():
        text = b"null"
    content = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    window[: content.numel()] = content


def _read(window: torch.Tensor) -> tuple[int, list[Wanted]] | None:
    """Return the bytes of a block, and what a rank wants, from its window; None where that did not fit."""
    content = window.numpy()
    size = int.from_bytes(content[:8].tobytes(), "little")
    found = json.loads(content[8 : 8 + size].tobytes())
    if found is None:
        return None
    block_bytes, paths, ranges = found
    return block_bytes, [Wanted(paths[number], *rest) for number, *rest in ranges]
