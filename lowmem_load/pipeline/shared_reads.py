"""Reads together with the other ranks of the node: each rank reads its chunks, and takes its elements from all chunks.

Before reading, the ranks that share reads are found, and the memory that they share is opened. `planning/sharing.py`
decides who reads what; see [Note: shared reads] there.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from lowmem_load.distributed.nodes import SharedMemory, make_memory, map_memory_of
from lowmem_load.errors import LowMemLoadError, PlanError, listed
from lowmem_load.io.executor import Executor
from lowmem_load.pipeline.make_plan import Planned
from lowmem_load.planning.planner import Constants
from lowmem_load.planning.reads import Fill, Read, ReadCost
from lowmem_load.planning.sharing import (
    ByteRange,
    Chunk,
    Schedule,
    Segment,
    Shared,
    byte_ranges,
    chunk_bytes_of,
    nests_within,
    node_schedule,
    runs,
    segment_bytes,
)

ALONE = "no other rank of this node has reads to share"

LITTLE_SAVED = "the ranks of this node would read little less together"

TOO_MANY_RANGES = "a rank of this node needs more byte ranges than its shared memory can list"

_LISTED, _HEARD, _FIRST_ROUND = 1, 2, 3
"""Numbers of barriers: all ranks have listed what they need; all have read these lists; first round of reading."""


_DECLINED = 1 << 62
"""Counter of a rank that passes all barriers from now on."""

_LEFT = -1
"""Counter of a rank that comes to no further barrier."""

LEAVE_GRACE_S = 3.0
"""Seconds to wait after another rank has left. By then `check` has raised, unless that rank could not say why."""

_FIRST_WAIT_S, _LAST_WAIT_S = 20e-6, 2e-3
"""Seconds between two looks at the counters, at first and in the end."""


class ReadSharing:
    """This rank's part of the shared memory of its node, if it has reads to share. Close it after the load."""

    def __init__(self) -> None:
        self._nbytes = 0  # of the part
        self.offer: SharedMemory | None = None  # where other ranks find that part; None if this rank shares no reads
        self.why_alone = ""  # why this rank reads alone although it has reads to share; "" if it does not

    def make(self, cost: ReadCost) -> None:
        """Make the part for files of this cost, before the ranks exchange their offers."""
        self._nbytes = SharedBuffer.nbytes_for(cost)
        try:
            self.offer = make_memory(self._nbytes)
        except OSError as error:
            self.why_alone = f"{self._nbytes} bytes of shared memory cannot be made: {error.strerror}"

    def close(self) -> None:
        """Close the part. Ranks that have opened it keep it."""
        if self.offer is not None:
            os.close(self.offer.descriptor)
            self.offer = None

    def meet(
        self,
        own_rank: int,
        neighbours: Sequence[int],
        offers: Sequence[SharedMemory | None],
        planned: Planned,
        check: Callable[[], None],
    ) -> SharedReads | None:
        """Return what carries out the shared steps of a plan; None if this rank reads alone.

        Args:
            own_rank: of this process.
            neighbours: the ranks of its node, itself included.
            offers: of all ranks.
            planned: the plan of this rank.
            check: raises if another rank has failed.
        """
        if self.offer is None:
            return None
        places = {rank: place for rank in neighbours if (place := offers[rank]) is not None}
        if len(places) == 1:
            self.why_alone = ALONE
            return None
        position = list(places).index(own_rank)
        memories: list[mmap.mmap] = []
        for rank, place in places.items():
            try:
                memories.append(map_memory_of(place, self._nbytes))
            except (OSError, ValueError) as error:
                self.why_alone = (
                    f"rank {own_rank} cannot open the shared memory of rank {rank}, process {place.pid}: {error}"
                )
                decline(SharedBuffer([map_memory_of(self.offer, self._nbytes)], 0), self.why_alone)
                return None
        buffer = SharedBuffer(memories, position)
        return SharedReads(planned.shared, buffer, planned.plan.read_cost, check=check)


class SharedBuffer:
    """Two chunks of memory for each rank, and a counter of the barriers that it has reached.

    The part of each rank has a page for its counter, zeros at first, and then the chunks.
    """

    @staticmethod
    def nbytes_for(cost: ReadCost) -> int:
        """Return the bytes of the part of one rank, for files of this cost."""
        return mmap.PAGESIZE + 2 * chunk_bytes_of(cost)

    def __init__(self, memories: Sequence[mmap.mmap], place: int) -> None:
        self.place, self.num_ranks = place, len(memories)
        self.chunk_bytes = (len(memories[place]) - mmap.PAGESIZE) // 2
        self._bytes = [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]
        self._counters = [memoryview(memory).cast("q") for memory in memories]
        self._fence = threading.Lock()

    def both_chunks(self, place: int) -> torch.Tensor:
        """Return the chunks of a rank as one piece of memory, uint8."""
        return self._bytes[place][mmap.PAGESIZE :]

    def chunk(self, place: int, round_number: int) -> torch.Tensor:
        """Return the chunk that a rank fills in a round, uint8. Rounds alternate between the two."""
        return self.both_chunks(place).narrow(0, round_number % 2 * self.chunk_bytes, self.chunk_bytes)

    def barrier(self, number: int, check: Callable[[], None]) -> None:
        """Wait until every rank has reached barrier `number`, which grows; `check` may raise to end the waiting.

        Raises LowMemLoadError if another rank has left, and `check` did not say why.
        """
        self.arrive(number)
        pause_s, left_s = _FIRST_WAIT_S, float("inf")
        while (least := min(counter[0] for counter in self._counters)) < number:
            check()
            if least == _LEFT:
                left_s = min(left_s, time.monotonic())
                if time.monotonic() - left_s > LEAVE_GRACE_S:
                    raise LowMemLoadError("another rank of this node stopped reading together with this one")
            time.sleep(pause_s)
            pause_s = min(_LAST_WAIT_S, pause_s * 1.5)
        self._order_memory()

    def arrive(self, number: int) -> None:
        """Let the other ranks see that this one has reached barrier `number`."""
        self._order_memory()
        self._counters[self.place][0] = number

    def _order_memory(self) -> None:
        with self._fence:  # taking a lock orders memory on every kind of processor; Python has no other means
            pass


class SharedReads:
    """Carries out `reads` together with the other ranks of the node, in this rank's part of the shared buffer.

    `check` raises if another rank has failed; it is called while this one waits.
    """

    def __init__(
        self, reads: Sequence[Read], buffer: SharedBuffer, cost: ReadCost, *, check: Callable[[], None]
    ) -> None:
        self.waited = 0  # grows while this rank waits for others, which then counts as progress
        self.why_alone = ""  # why the ranks did not read together after all; "" if they did
        self._shared_ids = {id(read) for read in reads}
        self._deliveries: list[_Delivery] = []
        self._buffer, self._cost, self._check = buffer, cost, check

    def take(self, fill: Fill, destination: torch.Tensor) -> Fill:
        """Return what is left of a fill without the shared reads; `run` carries those out."""
        shared = [step for step in fill.steps if isinstance(step, Read) and id(step) in self._shared_ids]
        self._deliveries += [_Delivery(read, destination) for read in shared]
        if not shared:
            return fill
        return replace(fill, steps=tuple(step for step in fill.steps if id(step) not in self._shared_ids))

    def run(self, executor: Executor) -> Shared | None:
        """Carry out the reads that were taken. Return None if the ranks save little; then each has begun to read alone.

        Raises PlanError if the chunks do not hold all that this rank needs.
        """
        try:
            return self._run(executor)
        except BaseException:
            self._buffer.arrive(_LEFT)
            raise

    def _run(self, executor: Executor) -> Shared | None:
        schedule = self._agree_on_schedule()
        if schedule is None:
            for delivery in self._deliveries:
                fill = Fill(delivery.destination.numel(), delivery.destination.dtype, (delivery.read,), ())
                executor.fill(fill, delivery.destination, (), Constants())
            return None
        read_bytes = self._read_chunks(executor, schedule)
        if missing := sorted({delivery.read.tensor.name for delivery in self._deliveries if delivery.num_missing}):
            raise PlanError(f"{listed(missing)}: the ranks of the node did not read all elements that are needed")
        return Shared(schedule.num_ranks, schedule.wanted_bytes, schedule.read_bytes, read_bytes)

    def _agree_on_schedule(self) -> Schedule | None:
        buffer = self._buffer
        own_part, ranges = buffer.both_chunks(buffer.place), byte_ranges(part.read for part in self._deliveries)
        if not _write_list(own_part, self._cost.block_bytes, ranges):
            _write(own_part, TOO_MANY_RANGES)
        buffer.barrier(_LISTED, self._wait)
        messages = [_read_list(buffer.both_chunks(place)) for place in range(buffer.num_ranks)]
        buffer.barrier(_HEARD, self._wait)  # the first chunk overwrites the list
        lists = []
        for message in messages:
            if isinstance(message, str):  # why this rank of the node reads alone: then all do
                self.why_alone = message
                return None
            lists.append(message)
        # Ranks may see file systems of different block sizes; all must compute the same schedule.
        cost = replace(self._cost, block_bytes=max(block_bytes for block_bytes, _ in lists))
        schedule = node_schedule([ranges for _, ranges in lists], cost, buffer.chunk_bytes)
        self.why_alone = "" if schedule else LITTLE_SAVED
        return schedule

    def _read_chunks(self, executor: Executor, schedule: Schedule) -> int:
        # In each round threads fill one chunk, while this thread delivers what the last round read into the other one.
        by_tensor: dict[tuple[str, int], list[_Delivery]] = {}
        for delivery in self._deliveries:
            tensor = delivery.read.tensor
            by_tensor.setdefault((tensor.path, tensor.start), []).append(delivery)
        read_bytes, has_failed = 0, threading.Event()
        pool = ThreadPoolExecutor(executor.num_threads, "lowmem_load-chunk")
        try:
            for number in range(schedule.num_rounds + 1):
                memory = self._buffer.chunk(self._buffer.place, number)
                pieces = runs(schedule.chunk(number, self._buffer.place), segment_bytes(self._cost))
                reading = [pool.submit(_read_run, executor, piece, memory, has_failed) for piece in pieces]
                if number > 0:
                    self._deliver(executor, schedule, number - 1, by_tensor)
                read_bytes += sum(future.result() for future in reading)
                self._buffer.barrier(_FIRST_ROUND + number, self._wait)
        finally:
            pool.shutdown(cancel_futures=True)
        return read_bytes

    def _deliver(
        self,
        executor: Executor,
        schedule: Schedule,
        number: int,
        by_tensor: Mapping[tuple[str, int], Sequence[_Delivery]],
    ) -> None:
        for place in range(schedule.num_ranks):
            memory = self._buffer.chunk(place, number)
            for segment in schedule.chunk(number, place):
                for delivery in by_tensor.get((segment.part.path, segment.part.tensor_start), ()):
                    executor.on_bytes(delivery.deliver(segment, memory, executor))

    def _wait(self) -> None:
        self.waited += 1
        self._check()


def decline(buffer: SharedBuffer, reason: str) -> None:
    """Tell the other ranks of the node that this rank reads alone, so that they do not wait for it."""
    _write(buffer.both_chunks(buffer.place), reason)
    buffer.arrive(_DECLINED)


def _read_run(executor: Executor, piece: Chunk, memory: torch.Tensor, has_failed: threading.Event) -> int:
    if has_failed.is_set():  # another piece: this one would fail as well, after seconds of retries
        return 0
    part, place = piece[0]
    nbytes = piece[-1].part.end - part.start
    what = f"the tensor at byte {part.tensor_start}"
    try:
        executor.read_range(part.path, part.start, memory[place : place + nbytes], what)
    except BaseException:
        has_failed.set()
        raise
    return nbytes


class _Delivery:
    def __init__(self, read: Read, destination: torch.Tensor) -> None:
        self.read, self.destination = read, destination
        self.num_missing = read.num_reads * read.nest.numel

    def deliver(self, segment: Segment, memory: torch.Tensor, executor: Executor) -> int:
        """Put what a segment holds of the read where it belongs; return the bytes of it that were needed."""
        part, dtype, num_bytes = segment.part, self.read.tensor.dtype, 0
        content = memory[segment.place : segment.place + part.end - part.start]
        for nest in nests_within(self.read, segment):
            executor.place(nest, content.view(dtype), self.destination)
            self.num_missing -= nest.numel
            num_bytes += nest.source_numel * dtype.itemsize
        return num_bytes


def _write_list(memory: torch.Tensor, block_bytes: int, ranges: Sequence[ByteRange]) -> bool:
    paths = sorted({byte_range.path for byte_range in ranges})
    numbers = {path: number for number, path in enumerate(paths)}
    return _write(memory, [block_bytes, paths, [[numbers[byte_range.path], *byte_range[1:]] for byte_range in ranges]])


def _write(memory: torch.Tensor, content: object) -> bool:
    text = json.dumps(content).encode()
    if 8 + len(text) > memory.numel():
        return False
    memory[: 8 + len(text)] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return True


def _read_list(memory: torch.Tensor) -> tuple[int, list[ByteRange]] | str:
    content = memory.numpy()
    size = int.from_bytes(content[:8].tobytes(), "little")
    message = json.loads(content[8 : 8 + size].tobytes())
    if isinstance(message, str):
        return message
    block_bytes, paths, ranges = message
    return block_bytes, [ByteRange(paths[number], *rest) for number, *rest in ranges]
