"""Fills device memory: through a ring of pinned slots, by asynchronous copies on streams of their own.

Only torch's device-neutral interface is used (torch.Stream, torch.Event, torch.accelerator), so that any accelerator of
torch will do.

[Note: order on the device] Memory is made on the stream of the thread that asks for the load, and filled on the lanes
by other threads. The block may have been freed by work of that stream that is still to come: so an event recorded there
after it was made comes before any copy into it. Should it be freed while copies into it are under way, as when a load
fails, the allocator must not hand it out before they are done: so each lane is recorded as a user of it. A slot is
written to again after the event behind the copy out of it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from lowmem_load.io.scatter import scatter_elements, source_elements
from lowmem_load.planning.nest import Axis, Nest

SLOT_BYTES = 8 << 20
"""Of a pinned slot: what the largest staged read of a plan needs (`ReadLimits.staging_bytes`)."""

SLOTS_PER_THREAD = 2
"""One is read into while the other is copied from."""

NUM_LANES = 2
"""Streams that copy: while one casts or rearranges, the other's copy keeps the engine busy. Each has at most one slot's
bytes of device memory for that."""

Span = tuple[float, float]
"""Begin and end, seconds of time.perf_counter."""


Put = Callable[[Nest, int, torch.dtype, Callable[[torch.Tensor], object]], None]
"""`put(nest, numel, dtype, write)`: has `numel` values of `dtype`, at most `SLOT_BYTES`, written by `write`, which
is given flat pinned memory for them, and starts moving them to device memory as `nest` says."""


class _Lane:
    """A stream, and what a copy needs on it."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.lock = torch.Stream(device=device), threading.Lock()
        self.start, self.start_s = torch.Event(device=device, enable_timing=True), time.perf_counter()
        self.start.record(self.stream)


class _Slot:
    """Pinned memory, and the events around the latest copy out of it."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.memory = memory
        self.begin, self.end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        self.lane: _Lane | None = None

    def copied(self) -> Span | None:
        """Wait until the latest copy is done; return when it ran, None if there was none since the last call."""
        lane, self.lane = self.lane, None
        if lane is None:
            return None
        self.end.synchronize()
        begin, end = (lane.start_s + lane.start.elapsed_time(event) / 1e3 for event in (self.begin, self.end))
        return begin, end


@dataclass(slots=True)
class Spans:
    """When values were read or made for the device, and when they were copied to it."""

    reads: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)


class Uploads:
    """Copies to one device, by threads of the caller's.

    Memory: the ring, pinned: `SLOTS_PER_THREAD` slots for each thread, rounded up to a power of two, which torch keeps
    for the next load; on the device at most `NUM_LANES * SLOT_BYTES` where values are cast or rearranged (two to four
    times that where they are cast more than once).

    Args:
        device: to which.
        num_threads: that fill memory at a time.

    Attributes:
        spans: what took place so far.
    """

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self.spans = Spans()
        self._lanes = [_Lane(device) for _ in range(NUM_LANES)]
        self._next_lane = itertools.count()
        self._local = threading.local()
        num_slots = 1 << (SLOTS_PER_THREAD * num_threads - 1).bit_length()  # torch would pin a power of two anyway
        ring = torch.empty(num_slots * SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._all_slots = [_Slot(memory, device) for memory in ring.view(num_slots, SLOT_BYTES)]
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._all_slots:
            self._slots.put(slot)

    def into(self, destination: torch.Tensor) -> Put:
        """Return what fills memory that the calling thread has made, on its current stream.

        It is for threads that do nothing else: each gets a stream, and the device, as its current one.
        """
        ready = torch.Event(device=destination.device)
        ready.record(torch.accelerator.current_stream(destination.device))
        for lane in self._lanes:
            destination.record_stream(lane.stream)
        return partial(self._put, destination, ready)

    def _put(
        self,
        destination: torch.Tensor,
        ready: torch.Event,
        nest: Nest,
        numel: int,
        dtype: torch.dtype,
        write: Callable[[torch.Tensor], object],
    ) -> None:
        lane, slot = self._lane(), self._slots.get()
        try:
            if (copied := slot.copied()) is not None:
                self.spans.copies.append(copied)
            staged = slot.memory[: numel * dtype.itemsize].view(dtype)
            assert staged.numel() == numel, f"a read of {numel} elements of {dtype} for a slot of {SLOT_BYTES} bytes"
            begin = time.perf_counter()
            write(staged)
            self.spans.reads.append((begin, time.perf_counter()))
            with lane.lock:  # one staging buffer on the device at a time
                lane.stream.wait_event(ready)
                slot.begin.record(lane.stream)
                slot.lane = lane
                try:
                    _copy(nest, staged, destination)
                finally:
                    slot.end.record(lane.stream)
        finally:
            self._slots.put(slot)

    def finish(self) -> None:
        """Wait until all copies are done: once for all of them. For when no thread fills memory."""
        if any(slot.lane is not None for slot in self._all_slots):
            first, *others = (lane.stream for lane in self._lanes)
            for stream in others:
                first.wait_stream(stream)
            first.synchronize()
        self.spans.copies += [copied for slot in self._all_slots if (copied := slot.copied()) is not None]

    def abandon(self) -> None:
        """Wait until no copy uses the ring any more, whatever became of them."""
        with contextlib.suppress(RuntimeError):  # of the device; the load has failed already
            self.finish()

    def _lane(self) -> _Lane:
        """Return this thread's lane, whose stream, and device, is the current one of the thread from now on."""
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = self._lanes[next(self._next_lane) % NUM_LANES]
            torch.accelerator.set_stream(lane.stream)  # a new thread starts on device 0
        return lane


def move_tasks(nest: Nest, values: torch.Tensor, put: Put) -> Iterator[Callable[[], None]]:
    """Yield tasks that move values in host memory to a device: gathered on the host, cast and scattered there."""
    for part in nest.split(SLOT_BYTES // values.element_size()):
        chosen = source_elements(part, values)

        def task(part: Nest = part, chosen: torch.Tensor = chosen) -> None:
            put(part.gathered(), chosen.numel(), chosen.dtype, lambda memory: memory.view(chosen.shape).copy_(chosen))

        yield task


def _copy(nest: Nest, staged: torch.Tensor, destination: torch.Tensor) -> None:
    """Enqueue one copy; where values are cast or rearranged, a copy of the bytes and what does that on the device."""
    numel = staged.numel()
    lie_alike = nest.source == 0 and nest.axes == (Axis(numel, 1, 1),)
    if lie_alike and staged.dtype == destination.dtype and not nest.casts:
        destination.narrow(0, nest.destination, numel).copy_(staged, non_blocking=True)
    else:
        raw = torch.empty_like(staged, device=destination.device)
        raw.copy_(staged, non_blocking=True)
        scatter_elements(nest, raw, destination, 0)
