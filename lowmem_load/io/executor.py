"""Executes plans: reads byte ranges into memory under one budget. Plans nothing; knows no names of models and no ZeRO.

Bytes go straight into their final place where the plan says so; everything else passes through a staging buffer, one
for each reading thread, or, on its way to a device, through the pinned slots of `uploads.py`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.io.open_sources import OpenSources
from lowmem_load.io.scatter import scatter_elements
from lowmem_load.io.source import LocalFile, Opener
from lowmem_load.io.tasks import Task, Tasks
from lowmem_load.io.temporaries import Take, Temporaries, compute_into
from lowmem_load.io.uploads import Put, Spans, Uploads, move_tasks
from lowmem_load.planning.expression import Source
from lowmem_load.planning.load_plan import ComputedValue, PlannedFile, Value
from lowmem_load.planning.nest import Axis, Nest
from lowmem_load.planning.planner import Constants
from lowmem_load.planning.reads import Apply, Fill, Move, Piece, Read, Step

MIN_STAGING_BYTES = 1 << 20
"""Smallest staging buffer that a thread allocates, so that it is seldom replaced by a larger one."""

PART_BYTES = 16 << 20
"""After so many bytes of a read they are counted: from slow storage all may take minutes."""

MIN_DEVICE_THREADS = 2
"""Threads that read for a device: they wait most of the time, for the storage or for a copy."""

_CPU = torch.device("cpu")


@dataclass(slots=True)
class ReadStats:
    """What was read so far.

    Attributes:
        read_bytes: bytes fetched from files, over-read included; counted while a read goes on.
        num_reads: reads that have ended.
        path: of the file that the latest read is from, whether it has ended or not.
    """

    read_bytes: int = 0
    num_reads: int = 0
    path: str = ""


class Executor:
    """Fills memory as plans say. Use as a context manager; leaving it waits for all reads and closes the files.

    Memory: one staging buffer per thread, as large as the plan's largest staged read (two to four times that where a
    value is cast more than once), plus what the plan states as its largest temporary.

    Args:
        num_threads: reads in flight; 1 reads in the calling thread, but for operations; see `Tasks`.
            Of memory of a device at least `MIN_DEVICE_THREADS`.
        open_source: opens a file of the checkpoint.

    Attributes:
        sources: what it reads from; see [Note: one descriptor] in `open_sources.py`.
        stats: what was read so far.
        num_threads: reads in flight.
        on_bytes: called with the number of needed bytes that reached a destination, from any thread.
    """

    def __init__(self, *, num_threads: int = 1, open_source: Opener = LocalFile) -> None:
        self.sources = OpenSources(open_source)
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], object] = int
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._local = threading.local()
        self._tasks = Tasks(num_threads)
        self._uploads: Uploads | None = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self._tasks.close()
            if self._uploads is not None:
                self._uploads.abandon()  # nothing is left to do where `finish` has returned
            self.sources.close()

    def expect(self, files: Sequence[PlannedFile]) -> None:
        """See `OpenSources.expect`."""
        self.sources.expect(files)

    def fill(self, fill: Fill, destination: torch.Tensor, values: Sequence[Value], constants: Constants) -> None:
        """Start filling the flat contiguous `destination`; `finish` tells when, and whether, it is filled.

        Args:
            fill: the plan of that memory.
            destination: at least `fill.numel` elements.
            values: of the plan.
            constants: of the plan.
        """
        known = {number: self._value(number, values, constants) for number in fill.needs} if fill.needs else {}
        if destination.is_cpu:
            if any(isinstance(step, Apply) for step in fill.steps):
                self._tasks.have_threads(1)  # see [Note: another heap] in temporaries.py
            tasks = self._tasks_of(fill.steps, destination, known, constants)
        else:
            tasks = self._device_tasks(fill.steps, destination, known, constants)
        for task in tasks:
            self._tasks.run(task)

    def move(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        """Start copying a host tensor, cast, to the flat device memory `destination`; `finish` tells as for `fill`."""
        casts = () if values.dtype == destination.dtype else (destination.dtype,)  # a cast takes memory of the device
        nest = Nest(0, 0, (Axis(values.numel(), 1, 1),), casts)
        for task in move_tasks(nest, values.detach().contiguous().view(-1), self._put_into(destination)):
            self._tasks.run(task)

    def read_range(self, path: str, start: int, memory: torch.Tensor, what: str) -> None:
        """Fill host memory, uint8, from byte `start` of a file on; `what` names it. Raises as `finish` does."""
        self._read(Source(path, what, start, tuple(memory.shape), memory.dtype), 0, memory)

    def place(self, nest: Nest, values: torch.Tensor, destination: torch.Tensor) -> None:
        """Move elements of the flat host tensor `values` to `destination`; it may be overwritten once this returns."""
        if destination.device.type == "cpu":
            scatter_elements(nest, values, destination, 0)
            return
        for task in move_tasks(nest, values, self._put_into(destination)):
            self._tasks.run(task)
        self._tasks.finish()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file that was read is no longer what it was when it was planned against."""
        self.sources.check_unchanged()

    def finish(self) -> None:
        """Wait until all memory given so far is filled.

        Raises:
            TruncatedFileError: a file ended early.
            CheckpointError: a file changed, or a read failed.
            RuntimeError: of the device.
        """
        self._tasks.finish()
        if self._uploads is not None:
            self._uploads.finish()

    @property
    def spans(self) -> Spans | None:
        """When memory of a device was read for and copied to; None while there was none."""
        return None if self._uploads is None else self._uploads.spans

    def _value(self, number: int, values: Sequence[Value], constants: Constants) -> torch.Tensor:
        """Return a value, flat; one that has to be computed, by the calling thread: a task would wait for itself."""
        value = values[number]
        if not isinstance(value, ComputedValue):
            return constants.tensors[number]
        inputs = []
        for fill, shape in zip(value.inputs, value.input_shapes, strict=True):
            whole = torch.empty(fill.numel, dtype=fill.dtype, device=_CPU)
            self.fill(fill, whole, values, constants)
            inputs.append(whole.view(shape))
        self._tasks.finish()
        # To the host, should it have been computed elsewhere: by this thread, on whose stream that was.
        return constants.functions[value.function](inputs).detach().cpu().contiguous().view(-1)

    def _tasks_of(
        self, steps: Sequence[Step], destination: torch.Tensor, known: Mapping[int, torch.Tensor], constants: Constants
    ) -> Iterator[Task]:
        """Yield what fills `destination`; moves of values in memory are done at once."""
        for step in steps:
            if isinstance(step, Read):
                for first, shift in step.each():
                    yield self._read_task(step, first, shift, destination)
            elif isinstance(step, Move):
                scatter_elements(step.nest, known[step.value], destination, 0)
            else:
                yield from self._apply_tasks(step, destination, known, constants)

    def _apply_tasks(
        self, step: Apply, destination: torch.Tensor, known: Mapping[int, torch.Tensor], constants: Constants
    ) -> Iterator[Task]:
        compute = constants.functions[step.function]
        for piece in step.pieces:

            def task(piece: Piece = piece) -> None:
                with self._temporaries().frame() as take:
                    inputs = self._inputs(piece, known, constants, take)
                    result = next((each for each in inputs if each.dtype == step.dtype), None)
                    if result is None:
                        result = take(piece.numel, step.dtype)
                    compute_into(result, compute, inputs)
                    scatter_elements(piece.nest, result, destination, 0)

            yield task

    def _inputs(
        self, piece: Piece, known: Mapping[int, torch.Tensor], constants: Constants, take: Take
    ) -> list[torch.Tensor]:
        inputs = []
        for fill in piece.inputs:
            inputs.append(take(fill.numel, fill.dtype))
            for part in self._tasks_of(fill.steps, inputs[-1], known, constants):
                part()
        return inputs

    def _read_task(self, step: Read, first: int, shift: int, destination: torch.Tensor) -> Task:
        tensor, itemsize = step.tensor, step.tensor.dtype.itemsize
        if step.is_direct:  # all that can be is done in advance: a read of MBs leaves the processor's caches cold
            memory = destination.narrow(0, step.nest.destination + shift, step.numel)
            start, content = tensor.start + first * itemsize, _bytes_of(memory)
            return functools.partial(self._read_bytes, tensor, start, content, step.needed_bytes_each)

        def task() -> None:
            staged = self._staging(step.numel * itemsize).view(tensor.dtype)
            self._read(tensor, first, staged)
            scatter_elements(step.nest, staged, destination, shift)
            self.on_bytes(step.needed_bytes_each)

        return task

    def _put_into(self, destination: torch.Tensor) -> Put:
        if self._uploads is None:
            num_threads = max(MIN_DEVICE_THREADS, self.num_threads)
            self._uploads = Uploads(destination.device, num_threads)
            self._tasks.have_threads(num_threads)  # the caller's thread has a current stream of its own
        return self._uploads.into(destination)

    def _device_tasks(
        self, steps: Sequence[Step], destination: torch.Tensor, known: Mapping[int, torch.Tensor], constants: Constants
    ) -> Iterator[Task]:
        """Yield what fills device memory, through the ring."""
        put = self._put_into(destination)
        for step in steps:
            if isinstance(step, Read):
                for first, shift in step.each():
                    nest = step.nest.shifted(destination=shift)
                    yield self._device_read_task(step, first, nest, put)
            elif isinstance(step, Move):
                yield from move_tasks(step.nest, known[step.value], put)
            else:
                for piece in step.pieces:
                    yield self._device_apply_task(step, piece, put, known, constants)

    def _device_read_task(self, step: Read, first: int, nest: Nest, put: Put) -> Task:
        def task() -> None:
            put(nest, step.numel, step.tensor.dtype, lambda memory: self._read(step.tensor, first, memory))
            self.on_bytes(step.needed_bytes_each)

        return task

    def _device_apply_task(
        self, step: Apply, piece: Piece, put: Put, known: Mapping[int, torch.Tensor], constants: Constants
    ) -> Task:
        def write(memory: torch.Tensor) -> None:
            with self._temporaries().frame() as take:
                compute_into(memory, constants.functions[step.function], self._inputs(piece, known, constants, take))

        return lambda: put(piece.nest, piece.numel, step.dtype, write)

    def _read(self, tensor: Source, first: int, memory: torch.Tensor) -> None:
        """Fill contiguous host memory with the elements of `tensor` from `first` on."""
        self._read_bytes(tensor, tensor.start + first * tensor.dtype.itemsize, _bytes_of(memory), 0)

    def _read_bytes(self, tensor: Source, start: int, content: memoryview, needed_bytes: int) -> None:
        """Fill memory with the bytes of the tensor's file from `start` on; tell that so many of them were needed."""
        path = self.stats.path = tensor.path
        try:
            with self.sources.reading(path) as source:
                for done in range(0, content.nbytes, PART_BYTES):
                    part = content[done : done + PART_BYTES]
                    source.read_into(start + done, part)
                    with self._lock:
                        self.stats.read_bytes += part.nbytes
        except CheckpointError as error:
            raise _explained(error, repr(tensor.name)) from error
        with self._lock:
            self.stats.num_reads += 1
        if needed_bytes:
            self.on_bytes(needed_bytes)

    def _staging(self, num_bytes: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, MIN_STAGING_BYTES)
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8, device=_CPU)
        return buffer[:num_bytes]

    def _temporaries(self) -> Temporaries:
        found: Temporaries | None = getattr(self._local, "temporaries", None)
        if found is None:
            found = self._local.temporaries = Temporaries()
        return found


def _bytes_of(memory: torch.Tensor) -> memoryview:
    """Return contiguous host memory as what system calls fill."""
    return memory.view(torch.uint8).numpy().data


def _explained(error: CheckpointError, what: str) -> CheckpointError:
    """Return an error of a source with what was read when it came."""
    if isinstance(error, TruncatedFileError):
        return TruncatedFileError(f"{error} while {what} was read; the file changed after its header was read")
    return CheckpointError(f"{error} (while {what} was read)")
