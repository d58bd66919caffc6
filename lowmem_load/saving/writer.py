"""Puts a rank's elements into files, by position, as its writes say. The only module that writes weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.io.scatter import source_elements
from lowmem_load.planning.nest import Nest, offsets
from lowmem_load.saving.save_plan import Write

STAGING_BYTES = 8 << 20
"""Of the one buffer through which elements go that are cast, rearranged or on a device."""

DIRECT_BYTES = 64 << 20
"""Of one write straight from a partition: keeps the progress bar fed."""

MAX_OPEN = 64
"""Files that are open at a time: a process may often have 1024 descriptors, and models have had more shards."""


class Writer:
    """Writes into files that are there, in full length. For one thread.

    Writes number the files in the order of `paths`. `on_bytes` is told how many bytes were written, after each write.

    Attributes:
        num_writes, written_bytes: system calls, and what they wrote.
        staged_bytes: of these, what went through the buffer.
        num_synced: files that have reached the disk.
    """

    def __init__(self, paths: Sequence[Path], on_bytes: Callable[[int], object]) -> None:
        self._paths, self._on_bytes = paths, on_bytes
        self._opened: dict[int, int] = {}
        self._written: set[int] = set()
        self._staging: torch.Tensor | None = None
        self.num_writes = self.written_bytes = self.staged_bytes = self.num_synced = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._opened.values():
            with contextlib.suppress(OSError):  # `sync` has told of what was lost
                os.close(descriptor)
        self._opened.clear()

    def write(self, write: Write, memory: torch.Tensor, first: int) -> None:
        """Write elements of a parameter.

        `memory` is flat; its first element is element `first` of the parameter.

        Raises:
            CheckpointError: the system refuses; the disk is full, say.
        """
        nest, itemsize = write.copy.nest.shifted(source=-first), write.dtype.itemsize
        is_same = {memory.dtype, *nest.casts} == {write.dtype}
        if nest.is_run and is_same and memory.device.type == "cpu":
            at = write.start + nest.destination * itemsize
            self._put(write.file, memory[nest.source : nest.source + nest.numel], at)
            return
        # A view has no bytes of its own, so the buffer is measured by what it holds.
        for part in nest.split(max(1, STAGING_BYTES // itemsize)):
            staged = self._stage(part, memory, write.dtype)
            self.staged_bytes += staged.numel() * itemsize
            for offset, destination, numel in _runs(part):
                self._put(write.file, staged[offset : offset + numel], write.start + destination * itemsize)

    def sync(self) -> None:
        """Have all that was written reach the disk.

        Raises:
            CheckpointError: it does not.
        """
        for number in sorted(self._written):
            with self._told(number):
                os.fsync(self._descriptor(number))
            self.num_synced += 1

    def _stage(self, part: Nest, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of a part in the order of its loops, cast, flat, in the buffer."""
        if self._staging is None:
            on_device = memory.device.type != "cpu" and torch.accelerator.is_available()
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=on_device)
        values = source_elements(part, memory)
        for cast in part.casts[:-1]:
            values = values.to(cast)
        staged = self._staging[: values.numel() * dtype.itemsize].view(dtype)
        staged.view(values.shape).copy_(values)
        return staged

    def _put(self, number: int, elements: torch.Tensor, offset: int) -> None:
        data = memoryview(elements.view(torch.uint8).numpy().data)
        while data:
            size = min(len(data), DIRECT_BYTES)
            with self._told(number):
                count = os.pwrite(self._descriptor(number), data[:size], offset)
            self.num_writes += 1
            self.written_bytes += count
            self._on_bytes(count)
            data, offset = data[count:], offset + count

    def _descriptor(self, number: int) -> int:
        if number not in self._opened:
            if len(self._opened) == MAX_OPEN:
                oldest = next(iter(self._opened))
                with self._told(oldest):
                    os.close(self._opened.pop(oldest))
            self._written.add(number)
            self._opened[number] = os.open(self._paths[number], os.O_WRONLY | os.O_CLOEXEC)
        return self._opened[number]

    @contextlib.contextmanager
    def _told(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._paths[number]}: cannot be written: {error}") from error


def _runs(part: Nest) -> Iterator[tuple[int, int, int]]:
    """Yield what lies beside each other in the file: first staged element, first element there, elements."""
    run, inner = 1, len(part.axes)
    while inner and part.axes[inner - 1].destination == run:
        run *= part.axes[inner - 1].size
        inner -= 1
    for number, (_, shift) in enumerate(offsets(part.axes[:inner])):
        yield number * run, part.destination + shift, run
