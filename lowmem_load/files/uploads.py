"""Fills device memory: through a ring of pinned slots, with asynchronous copies on streams of their own.

Uses only torch's device-neutral interface (torch.Stream, torch.Event, torch.accelerator), so that it serves every
accelerator of torch.

[Note: order on the device] The thread that loads allocates memory on its own stream; other threads fill it on copy
streams. Three rules keep the order:
- The block may have been freed by work that is still queued on the stream of the loading thread. So an event is
  recorded there after the allocation, and copy streams wait for it.
- The memory may be freed while copies into it are queued, as when a load fails. So every copy stream is recorded as a
  user of it, and the allocator does not hand it out before they are done.
- A slot is written again only after the event that follows the last copy out of it.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from lowmem_load.files.memory import naming_shortage, scatter_elements, source_elements
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.reads import ReadLimits

SLOT_BYTES = ReadLimits().staging_bytes
"""Bytes of a pinned slot: the largest staged read of a plan."""

SLOTS_PER_THREAD = 2
"""One is filled while the other is copied to the device."""

NUM_STREAMS = 2
"""Copy streams: while one casts or rearranges values, the other copies, so each needs device memory of a slot."""

Put = Callable[[Nest, int, torch.dtype, Callable[[torch.Tensor], object]], None]
"""`put(nest, numel, dtype, write)` calls `write` with flat host memory for `numel` values of `dtype`, then moves
them to their destination as `nest` says. They are at most `SLOT_BYTES`."""


class CopyStream:
    """A stream with a lock."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.lock = torch.Stream(device=device), threading.Lock()


class Slot:
    """Pinned memory, the stream that copies out of it, and the event after the latest copy."""

    def __init__(self, memory: torch.Tensor, copier: CopyStream) -> None:
        self.memory, self.copier, self.copied = memory, copier, torch.Event(device=copier.stream.device)
        self.is_copied = False  # a copy out of it may still be queued

    def wait(self) -> None:
        """Wait until it may be written again."""
        if self.is_copied:
            self.copied.synchronize()
            self.is_copied = False


class Uploads:
    """Copies to one device, made by threads of the caller.

    Memory: pinned, `SLOTS_PER_THREAD` slots for each thread, rounded up to a power of two. Torch keeps them for the
    next load. On the device, at most `NUM_STREAMS * SLOT_BYTES` if values are cast or rearranged (two to four times
    that if they are cast more than once).
    """

    pinned_bytes: ClassVar[int] = 0  # that this process has pinned for it so far

    @classmethod
    def missing_bytes(cls, num_threads: int) -> int:
        """Return the bytes that another one of so many threads will pin."""
        return max(0, _num_slots(num_threads) * SLOT_BYTES - cls.pinned_bytes)

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self._streams = [CopyStream(device) for _ in range(NUM_STREAMS)]
        num_slots = _num_slots(num_threads)
        with naming_shortage("pinned memory for copies to the device", num_slots * SLOT_BYTES):
            ring = torch.empty(num_slots * SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        Uploads.pinned_bytes = max(Uploads.pinned_bytes, ring.nbytes)
        pairs = zip(ring.view(num_slots, SLOT_BYTES), itertools.cycle(self._streams), strict=False)
        self._all_slots = [Slot(memory, copier) for memory, copier in pairs]
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._all_slots:
            self._slots.put(slot)

    def into(self, destination: torch.Tensor) -> Put:
        """Return what fills memory that the calling thread has allocated on its current stream.

        Threads that use it should do nothing else: a copy stream, and its device, become their current ones.
        """
        ready = torch.Event(device=destination.device)
        ready.record(torch.accelerator.current_stream(destination.device))
        for copier in self._streams:
            destination.record_stream(copier.stream)

        def put(nest: Nest, numel: int, dtype: torch.dtype, write: Callable[[torch.Tensor], object]) -> None:
            slot = self._slots.get()
            copier = slot.copier
            try:
                slot.wait()
                staged = slot.memory[: numel * dtype.itemsize].view(dtype)
                assert staged.numel() == numel, f"{numel} elements of {dtype} for a slot of {SLOT_BYTES} bytes"
                write(staged)
                with copier.lock:  # so that the stream needs one buffer on the device
                    torch.accelerator.set_stream(copier.stream)  # of this thread, which began on device 0
                    copier.stream.wait_event(ready)
                    slot.is_copied = True
                    try:
                        _copy(nest, staged, destination)
                    finally:
                        slot.copied.record(copier.stream)
            finally:
                self._slots.put(slot)

        return put

    def order_after(self) -> None:
        """Have the calling thread's stream wait for all copies that have been begun."""
        for copier in self._streams:
            torch.accelerator.current_stream(copier.stream.device).wait_stream(copier.stream)

    def finish(self) -> None:
        """Wait until all copies are done. No thread may fill a slot meanwhile."""
        if any(slot.is_copied for slot in self._all_slots):
            first, *others = (copier.stream for copier in self._streams)
            for other in others:
                first.wait_stream(other)
            first.synchronize()  # once, and not for each copy
        for slot in self._all_slots:
            slot.is_copied = False


def _num_slots(num_threads: int) -> int:
    return 1 << (SLOTS_PER_THREAD * num_threads - 1).bit_length()  # torch pins a power of two anyway


def move_tasks(nest: Nest, values: torch.Tensor, put: Put) -> Iterator[Callable[[], None]]:
    """Yield tasks that move host values to a device: gathered on the host, cast and scattered on the device."""
    for part in nest.split(SLOT_BYTES // values.element_size()):
        chosen = source_elements(part, values)

        def task(part: Nest = part, chosen: torch.Tensor = chosen) -> None:
            put(part.gathered(), chosen.numel(), chosen.dtype, lambda memory: memory.view(chosen.shape).copy_(chosen))

        yield task


def _copy(nest: Nest, staged: torch.Tensor, destination: torch.Tensor) -> None:
    # Values that are cast or rearranged are copied first, and changed on the device.
    numel = staged.numel()
    lie_alike = nest.source == 0 and nest.axes == (Axis(numel, 1, 1),)
    if lie_alike and staged.dtype == destination.dtype and not nest.casts:
        destination.narrow(0, nest.destination, numel).copy_(staged, non_blocking=True)
    else:
        raw = torch.empty_like(staged, device=destination.device)
        raw.copy_(staged, non_blocking=True)
        scatter_elements(nest, raw, destination)
