"""Executes plans: reads byte ranges into memory. It plans nothing, and knows neither names of models nor ZeRO.

Bytes are read straight into their final memory if the plan says so. All others pass through temporary memory of the
reading thread or, on their way to a device, through the pinned slots of `uploads.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files.memory import Temporaries, compute_into, make_pages, naming_shortage, scatter_elements
from lowmem_load.files.mounts import is_cached, is_on_network
from lowmem_load.files.remote_file import CHECK_S
from lowmem_load.files.source import LocalFile, Opener, OpenSources
from lowmem_load.files.stand_ins import is_stand_in, open_file
from lowmem_load.files.uploads import Put, Uploads, move_tasks
from lowmem_load.locks import ForkedLock
from lowmem_load.phases import no_callback
from lowmem_load.planning.expression import Expression, Source, leaves
from lowmem_load.planning.load_plan import ComputedValue, Value
from lowmem_load.planning.nest import Axis, Nest, extent
from lowmem_load.planning.planner import Constants
from lowmem_load.planning.reads import Apply, ApplyPiece, Fill, Read, Step

PART_BYTES = 16 << 20
"""Bytes of a read after which they are counted, because a read from slow storage may take minutes."""

MAX_ROWS = 64
"""Most small reads of a tensor that are one task."""

MAX_WAITING = 64
"""Most tasks that wait for the threads: enough that no thread waits for the calling one."""

MAX_DELAYED = 512
"""Most tasks that the calling thread puts off, to run them together. A read of MBs empties the processor's caches. If
one ran between each two parameters, loading 1.5 billion parameters would take 15 % more processor time."""

Task = Callable[[], None]

LEAVE_S = 4.0
"""Seconds to wait for reads at work when their load fails, and when their memory is filled again; see `refuse_left`.
Reads of local files that are repeated after an error end within it."""

MIN_DEVICE_THREADS = 2
"""Fewest threads that read for a device. Most of the time they wait for storage or for a copy to the device."""


@dataclass(eq=False, slots=True)
class Work:
    """A task that a thread is at, the memory that it may write into, and the file that it reads."""

    tasks: Tasks
    memory: torch.Tensor | None
    path: str = ""

    def go_on(self, path: str = "") -> None:
        """Note what is read next. Raises CheckpointError if the load has failed: then nothing more is to be read."""
        self.path = path
        if self.tasks.is_closed:
            raise CheckpointError(f"{path or 'a task'}: was not read, because the load has failed")


_of_thread = threading.local()
"""Its `go_on` is that of the work that this thread is at, if it is at any."""

_left: set[Tasks] = set()
"""Tasks of failed loads, of which some have not ended."""

os.register_at_fork(after_in_child=_left.clear)  # a child has no threads that could write into its memory


def refuse_left(name: str, memory: torch.Tensor | None = None) -> None:
    """Raise CheckpointError if a read that a failed load has left may yet write into some memory; None: into any.

    A read whose storage does not answer cannot be ended. So a load that fails leaves it after `LEAVE_S`. Memory that it
    may write into is not filled again until it has ended, for which this waits as long.
    """
    give_up_s = time.monotonic() + LEAVE_S
    while left := [work for tasks in list(_left) for work in list(tasks.running) if _may_write(work, memory)]:
        if time.monotonic() > give_up_s:
            raise CheckpointError(
                f"{name}: cannot be filled, because a load that has failed is still reading {left[0].path} into its "
                "memory, whose storage does not answer; load again once it does, or in a new process"
            )
        time.sleep(CHECK_S)


def _may_write(work: Work, memory: torch.Tensor | None) -> bool:
    if memory is None or work.memory is None:
        return memory is None
    (device, first, end), (other, begin, stop) = span(work.memory), span(memory)
    return device == other and first < stop and begin < end


def span(memory: torch.Tensor) -> tuple[str, int, int]:
    """Return the device of contiguous memory, its first byte there, and the end of its bytes."""
    return str(memory.device), memory.data_ptr(), memory.data_ptr() + memory.nbytes


class Tasks:
    """Runs tasks in any order. With one thread, the calling one runs them, unless `have_threads` is called."""

    def __init__(self, num_threads: int) -> None:
        self.check: Callable[[], object] = no_callback  # called while the calling thread waits; may raise to end it
        self._pool: ThreadPoolExecutor | None = None
        self._delayed: list[Task] = []  # for the calling thread
        self._changed = threading.Condition()  # guards what follows
        self._num_given = 0  # tasks that threads have, and have not ended
        self._num_enough = 0  # the calling thread goes on when only so many of them are left
        self._failed: Future[None] | None = None
        self.running: set[Work] = set()
        self.is_closed = False  # no further task begins, and those that run end at their next part of a file
        if num_threads > 1:
            self.have_threads(num_threads)

    def have_threads(self, num_threads: int) -> None:
        """Leave further tasks to so many threads; to the threads that there are, if any."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_threads, "lowmem_load-read")

    def run(self, task: Task, memory: torch.Tensor | None = None) -> None:
        """Run a task now or later; `finish` waits for it. Raises what an earlier task raised, once it is known.

        `memory` is what the task writes into, if that outlives it.
        """
        if self._pool is not None:
            self.submit(task, memory)
            return
        self._delayed.append(task)
        if len(self._delayed) >= MAX_DELAYED:
            self._run_delayed()

    def submit(self, task: Task, memory: torch.Tensor | None = None) -> Future[None]:
        """Leave a task to a thread, of which there must be some. Raises as `run`."""
        assert self._pool is not None
        if self._num_given >= MAX_WAITING or self._failed is not None:
            self._wait(MAX_WAITING // 2)  # for several, so that the calling thread, too, gets much done at a time
        with self._changed:
            self._num_given += 1
        future = self._pool.submit(self._work, task, Work(self, memory))
        future.add_done_callback(self._note)
        return future

    def finish(self) -> None:
        """Wait until all tasks have ended. Raises what one of them raised."""
        self._run_delayed()
        self._wait(0)

    def close(self) -> None:
        """End the threads. Tasks that have not begun are dropped; those that go on for `LEAVE_S` are left."""
        if self._pool is None:
            return
        with self._changed:
            self.is_closed = True
            _left.add(self)  # before the wait, which may be interrupted
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            has_ended = self._changed.wait_for(lambda: not self.running, LEAVE_S)
        if has_ended:
            _left.discard(self)
            self._pool.shutdown()

    def _work(self, task: Task, work: Work) -> None:
        with self._changed:
            work.go_on()
            self.running.add(work)
        _of_thread.go_on = work.go_on
        try:
            task()
        finally:
            del _of_thread.go_on
            with self._changed:
                self.running.discard(work)
                if self.is_closed and not self.running:
                    _left.discard(self)
                    self._changed.notify_all()

    def _run_delayed(self) -> None:
        tasks, self._delayed = self._delayed, []
        for task in tasks:
            task()

    def _wait(self, num_enough: int) -> None:
        with self._changed:
            self._num_enough = num_enough
            while not self._changed.wait_for(
                lambda: self._failed is not None or self._num_given <= num_enough, timeout=CHECK_S
            ):
                self.check()
        if self._failed is not None:
            self._failed.result()

    def _note(self, done: Future[None]) -> None:
        with self._changed:
            self._num_given -= 1
            if self._failed is None and not done.cancelled() and done.exception() is not None:
                self._failed = done
            if self._failed is not None or self._num_given <= self._num_enough:
                self._changed.notify()


@dataclass(slots=True)
class ReadStats:
    """What was read so far: bytes, gaps included, which grow while a read goes on; ended reads; the latest file.

    `cold_files` were not cached when they were asked for, of which `direct_files` are read past the page cache.
    """

    read_bytes: int = 0
    num_reads: int = 0
    cold_files: int = 0
    direct_files: int = 0
    path: str = ""


class Executor:
    """Fills memory as plans say. A context manager: leaving it waits for all reads, and closes the files.

    After an error it waits for those at work alone, and only for `LEAVE_S`: see `refuse_left`.

    Memory: for each reading thread a buffer as large as the plan's largest staged read (two to four times that if
    values are cast more than once), and what the plan states as its largest temporary.

    [Note: another heap] Operations run in threads of the pool, even where a single thread reads. What torch allocates
    while it computes comes from the heap of its thread. In the calling thread, which makes parameters meanwhile, small
    objects that stay would fill the holes that are freed, so that its heap would grow with each operation (by 80 MiB
    for a partition of 1250 MiB). The C library gives other threads heaps of their own, where nothing stays.

    There are `num_threads` reads at a time, and `num_if_cold` into host memory if most files are not cached; 0 asks
    nothing. With 1, the calling thread reads, and one thread computes operations. For a device there are at least
    `MIN_DEVICE_THREADS`.
    """

    def __init__(self, *, num_threads: int = 1, num_if_cold: int = 0, open_source: Opener = open_file) -> None:
        self.sources = OpenSources(open_source)
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], object] = no_callback  # called with needed bytes that arrived, from any thread
        self.num_threads, self._num_if_cold = num_threads, num_if_cold
        self._num_uploading = max(MIN_DEVICE_THREADS, num_threads)  # also where more read into host memory
        self._is_cold: dict[str, bool] = {}  # of files that were asked for
        self.tasks = Tasks(num_threads)
        self._lock = ForkedLock()
        self._temporaries = Temporaries()
        self._uploads: Uploads | None = None

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A block of reads. If it raises, what it has begun ends, and later reads are as if it never was."""
        try:
            yield
        except BaseException:
            self._end_tasks()
            self.renew_tasks(self.num_threads)
            raise

    def have_enough_in_flight(self, paths: Iterable[str], *, on_host: bool) -> None:
        """Let so many threads read into host memory that the storage is busy, if most files are not cached.

        A read that waits for storage needs no core. Reads of cached files do, and take more of it with more threads.
        For a device there are no more threads, because each has pinned slots, which stay.
        """
        if not self._num_if_cold:
            return
        unknown = set(paths) - self._is_cold.keys()
        for path in unknown:
            self._is_cold[path] = not is_stand_in(path) and not is_cached(path)
        self.stats.cold_files = sum(self._is_cold.values())
        if on_host and 2 * self.stats.cold_files > len(self._is_cold) and self.num_threads < self._num_if_cold:
            self.renew_tasks(self._num_if_cold)
        if self.num_threads >= self._num_if_cold:
            for path in unknown:
                if self._is_cold[path] and is_on_network(path):
                    source = self.sources.opened(path)
                    if isinstance(source, LocalFile):
                        source.read_no_further()

    def bypass_cache(self) -> None:
        """Have large reads of files that are not cached go past the page cache, where their file systems allow it.

        Without `have_enough_in_flight` this does nothing, because these reads are not read ahead.
        """
        if self.num_threads < self._num_if_cold:
            return
        sources = [self.sources.opened(path) for path, is_cold in self._is_cold.items() if is_cold]
        self.stats.direct_files = sum(isinstance(source, LocalFile) and source.bypass_cache() for source in sources)

    def renew_tasks(self, num_threads: int) -> None:
        """Leave further reads to so many other threads, whatever those that there were are at."""
        check, self.num_threads = self.tasks.check, num_threads
        self.tasks, self._uploads = Tasks(num_threads), None
        self.tasks.check = check

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self._end_tasks()
            self.sources.close()

    def _end_tasks(self) -> None:
        self.tasks.close()
        if self._uploads is not None:
            with contextlib.suppress(RuntimeError):  # of the device: the load has failed already
                self._uploads.finish()  # copies may still use the memory; after `finish` there are none

    def fill(
        self, fill: Fill, destination: torch.Tensor, values: Sequence[Value], constants: Constants, name: str = ""
    ) -> None:
        """Start to fill flat, contiguous memory. Call `finish` before it is used. Errors of reads name `name`."""
        tensors = {number: self._value(number, values, constants) for number in fill.needs}
        if destination.is_cpu and any(isinstance(step, Apply) for step in fill.steps):
            self.tasks.have_threads(1)  # see [Note: another heap]
        for task in self._tasks_of(fill.steps, destination, Constants(tensors, constants.functions)):
            self.tasks.run(partial(_naming, name, task) if name else task, destination)

    def fill_parts(self, parts: Iterable[tuple[Fill, torch.Tensor]], constants: Constants) -> list[Future[None]]:
        """Start to fill parts of memory by steps that do not need values, in threads; return what ends as they do."""
        self.tasks.have_threads(1)
        tasks = ((task, memory) for fill, memory in parts for task in self._tasks_of(fill.steps, memory, constants))
        return [self.tasks.submit(task, memory) for task, memory in tasks]

    def order_after_copies(self) -> None:
        """Have this thread's stream wait for the copies to the device that have been begun."""
        if self._uploads is not None:
            self._uploads.order_after()

    def move(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        """Start to copy a host tensor, cast, to flat device memory. Call `finish` before that is used."""
        casts = () if values.dtype == destination.dtype else (destination.dtype,)  # a cast takes memory of the device
        nest = Nest(0, 0, (Axis(values.numel(), 1, 1),), casts)
        for task in move_tasks(nest, values.detach().contiguous().view(-1), self._put_into(destination)):
            self.tasks.run(task, destination)

    def read(self, tensor: Source, first: int, memory: torch.Tensor, needed_bytes: int = 0) -> None:
        """Fill host memory with the elements of a tensor from number `first` on. Raises as `finish`."""
        self._read_rows(tensor, [(first, 0)], memory, memory.nbytes, needed_bytes)

    def _read_rows(
        self, tensor: Source, rows: Sequence[tuple[int, int]], memory: torch.Tensor, nbytes: int, needed_bytes: int
    ) -> None:
        """Fill rows of `nbytes`, each from an element of the tensor and to one of the memory. Raises as `finish`.

        What takes as long as a small read itself is done once for all of them.
        """
        self.stats.path, content = tensor.path, memory.view(torch.uint8).numpy().data
        itemsize, uncounted = tensor.dtype.itemsize, 0
        go_on: Callable[[str], object] = getattr(_of_thread, "go_on", no_callback)
        try:
            go_on(tensor.path)
            source = (tensor.files or self.sources).opened(tensor.path)
            for first, destination in rows:
                start, place = tensor.start + first * itemsize, destination * itemsize
                for done in range(0, nbytes, PART_BYTES):
                    part = content[place + done : place + min(done + PART_BYTES, nbytes)]
                    make_pages(part)
                    source.read_into(start + done, part)
                    go_on(tensor.path)  # before what was read moves on
                    uncounted += part.nbytes
                    if uncounted >= PART_BYTES:
                        self._count(uncounted)
                        uncounted = 0
        except CheckpointError as error:
            raise type(error)(f"{error} (while {tensor.name!r} was read)") from error
        self._count(uncounted, len(rows))
        self.on_bytes(needed_bytes)

    def _count(self, nbytes: int, num_reads: int = 0) -> None:
        with self._lock:
            self.stats.read_bytes += nbytes
            self.stats.num_reads += num_reads

    def finish(self) -> None:
        """Wait until all memory is filled. Raises CheckpointError, or RuntimeError of the device."""
        self.tasks.finish()
        if self._uploads is not None:
            self._uploads.finish()

    def _value(self, number: int, values: Sequence[Value], constants: Constants) -> torch.Tensor:
        # The calling thread computes it: a task must not wait for other tasks.
        value = values[number]
        if not isinstance(value, ComputedValue):
            return constants.tensors[number]
        inputs = []
        for fill, shape in zip(value.inputs, value.input_shapes, strict=True):
            with naming_shortage(f"input of {value.operation}", fill.numel * fill.dtype.itemsize):
                full = torch.empty(fill.numel, dtype=fill.dtype, device="cpu")
            self.fill(fill, full, values, constants)
            inputs.append(full.view(shape))
        self.tasks.finish()
        # The function may compute elsewhere, on a stream of this thread. So this thread copies the result to the host.
        return constants.functions[value.function](inputs).detach().cpu().contiguous().view(-1)

    def _tasks_of(self, steps: Sequence[Step], destination: torch.Tensor, known: Constants) -> Iterator[Task]:
        # To host memory, values are moved at once.
        put = self._put_on_host(destination) if destination.is_cpu else self._put_into(destination)
        for step in steps:
            if isinstance(step, Read):
                if step.is_direct:
                    yield from self._direct_reads(step, destination)
                else:
                    for first, shift in step.iterations():
                        yield partial(self._staged_read, step, first, step.nest.shifted(destination=shift), put)
            elif isinstance(step, Apply):
                index = _device_in_use()
                for piece in step.pieces:
                    yield partial(_on_device, index, partial(self._apply, put, step, piece, known))
            elif destination.is_cpu:
                scatter_elements(step.nest, known.tensors[step.value], destination)
            else:
                yield from move_tasks(step.nest, known.tensors[step.value], put)

    def _direct_reads(self, step: Read, destination: torch.Tensor) -> Iterator[Task]:
        nbytes = step.numel * step.tensor.dtype.itemsize
        # All threads get some of the reads, as each may wait for its storage.
        size = min(MAX_ROWS, -(-step.num_reads // self.num_threads), max(1, PART_BYTES // nbytes))
        span_numel = extent(step.outer, "destination") - 1 + step.numel
        memory, rows = destination.narrow(0, step.nest.destination, span_numel), step.iterations()
        while batch := list(itertools.islice(rows, size)):
            needed_bytes = len(batch) * step.needed_bytes_each
            yield partial(self._read_rows, step.tensor, batch, memory, nbytes, needed_bytes)

    def _staged_read(self, step: Read, first: int, nest: Nest, put: Put) -> None:
        tensor, read = step.tensor, partial(self.read, step.tensor, first, needed_bytes=step.needed_bytes_each)
        with naming_shortage(f"tensor {tensor.name!r}", step.numel * tensor.dtype.itemsize):
            put(nest, step.numel, tensor.dtype, read)

    def _apply(self, put: Put, step: Apply, piece: ApplyPiece, known: Constants) -> None:
        def write(memory: torch.Tensor) -> None:
            with self._temporaries.frame() as take:
                inputs = [take(fill.numel, fill.dtype) for fill in piece.inputs]
                for fill, values in zip(piece.inputs, inputs, strict=True):
                    for task in self._tasks_of(fill.steps, values, known):
                        task()
                compute_into(memory, known.functions[step.function], inputs, step.group, step.part_group)

        put(piece.nest, piece.numel, step.dtype, write)

    def _put_on_host(self, destination: torch.Tensor) -> Put:
        def put(nest: Nest, numel: int, dtype: torch.dtype, write: Callable[[torch.Tensor], object]) -> None:
            with self._temporaries.frame() as take:
                memory = take(numel, dtype)
                write(memory)
                scatter_elements(nest, memory, destination)

        return put

    def _put_into(self, destination: torch.Tensor) -> Put:
        if self._uploads is None:
            self._uploads = Uploads(destination.device, self._num_uploading)
            self.tasks.have_threads(self._num_uploading)  # uploads change the current stream of their threads
        return self._uploads.into(destination)

    def check_unchanged(self, expressions: Iterable[Expression]) -> None:
        """Raise CheckpointError if a file has changed that expressions have elements of."""
        parts = (leaf for expression in expressions for leaf in leaves(expression) if isinstance(leaf, Source))
        for sources, path in {(leaf.files or self.sources, leaf.path) for leaf in parts}:
            sources.check_unchanged([path])


def _device_in_use() -> int | None:
    """Return the index of this thread's device; None if the process uses none, which the question would change."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return torch.accelerator.current_device_index() if getattr(module, "is_initialized", bool)() else None


def _naming(name: str, task: Task) -> None:
    """Run a task; an error of its files names what is filled, unless it does."""
    try:
        task()
    except CheckpointError as error:
        if repr(name) in str(error):
            raise
        raise type(error)(f"{error}, which fills {name!r}") from error


def _on_device(index: int | None, task: Task) -> None:
    """Run a task, whose function may compute on a device, on that of its maker: a new thread has the first one."""
    if index is not None:
        torch.accelerator.set_device_index(index)
    task()
