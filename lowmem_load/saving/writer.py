"""Writes a rank's elements to their places in files. The only module that writes weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.io.elements import source_elements
from lowmem_load.planning.nest import Nest, offsets
from lowmem_load.saving.save_plan import Write

STAGING_BYTES = 8 << 20
"""Bytes of the one buffer for elements that are cast, rearranged or on a device."""

DIRECT_BYTES = 64 << 20
"""Most bytes of one write straight from a partition, so that the progress bar moves."""


class Writer:
    """Writes into files that have their full length already. For one thread.

    One file is open at a time: writes come in the order of files.

    Args:
        paths: of the files, in the order of their numbers in writes.
        on_bytes: called after each write with the number of bytes.

    Attributes:
        num_writes, written_bytes: system calls that wrote, and bytes written.
        staged_bytes: bytes that went through the buffer.
        num_synced: files that have reached the disk.
    """

    def __init__(self, paths: Sequence[Path], on_bytes: Callable[[int], object]) -> None:
        self._paths, self._on_bytes = paths, on_bytes
        self._opened: tuple[int, int] | None = None  # number and descriptor of a file
        self._written: set[int] = set()
        self._staging: torch.Tensor | None = None
        self.num_writes = self.written_bytes = self.staged_bytes = self.num_synced = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):  # `sync` has raised if anything was lost
                os.close(self._opened[1])

    def write(self, write: Write, memory: torch.Tensor, first: int) -> None:
        """Write elements of a parameter.

        `memory` is flat; its first element is element `first` of the parameter.

        Raises:
            CheckpointError: the system refuses, because the disk is full for example.
        """
        nest, itemsize = write.copy.nest.shifted(source=-first), write.dtype.itemsize
        is_same = {memory.dtype, *nest.casts} == {write.dtype}
        if nest.is_run and is_same and memory.device.type == "cpu":
            at = write.start + nest.destination * itemsize
            self._put(write.file, memory[nest.source : nest.source + nest.numel], at)
            return
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
            with self._named(number):
                os.fsync(self._descriptor(number))
            self.num_synced += 1

    def _stage(self, part: Nest, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy the elements of a part into the buffer, cast, in the order of its axes; return them, flat."""
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
            with self._named(number):
                count = os.pwrite(self._descriptor(number), data[:size], offset)
            self.num_writes += 1
            self.written_bytes += count
            self._on_bytes(count)
            data, offset = data[count:], offset + count

    def _descriptor(self, number: int) -> int:
        if self._opened is None or self._opened[0] != number:
            if self._opened is not None:
                (previous, descriptor), self._opened = self._opened, None
                with self._named(previous):
                    os.close(descriptor)
            self._opened = number, os.open(self._paths[number], os.O_WRONLY | os.O_CLOEXEC)
            self._written.add(number)
        return self._opened[1]

    @contextlib.contextmanager
    def _named(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._paths[number]}: cannot be written: {error}") from error


def _runs(part: Nest) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a part in the file: first staged element, first element in the tensor, number of elements."""
    run, inner = 1, len(part.axes)
    while inner and part.axes[inner - 1].destination == run:
        run *= part.axes[inner - 1].size
        inner -= 1
    for number, (_, shift) in enumerate(offsets(part.axes[:inner])):
        yield number * run, part.destination + shift, run
