"""Executes copies: reads byte ranges of files into destinations under one memory budget. Knows no names and no ZeRO.

`pread` into the destination, never mmap: a mapped file hides its memory in RssFile, is read page by page on network
file systems, and turns a lost file into SIGBUS. Bytes go straight into their final place when both sides are one run
of the same dtype in host memory; everything else passes through a staging buffer of `STAGING_NBYTES` per thread.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import torch

from lowmem_load.errors import TruncatedFileError
from lowmem_load.planning.copies import Copy, FlatRange, plan_copies, plan_target
from lowmem_load.planning.expression import Computed, Elementwise, Expression, Held, Source, computed_below, numel

STAGING_NBYTES = 8 << 20
"""Bytes of one staged read. Larger gains nothing on local disks and the page cache, and multiplies the budget."""

DIRECT_NBYTES = 64 << 20
"""Bytes of one direct read. Needs no buffer; the bound keeps the progress bar and the threads fed."""

MAX_GAP_NBYTES = 4 << 10
"""Bytes between two wanted pieces below which one read takes both: a page is fetched anyway."""


@dataclass(slots=True)
class ReadStats:
    """What was read so far.

    Attributes:
        read_bytes: bytes fetched from files, over-read included.
        num_reads: system calls that fetched them.
    """

    read_bytes: int = 0
    num_reads: int = 0


class Reader:
    """Fills destinations from files. Use as a context manager; leaving it waits for all reads and closes the files.

    Memory: at most `num_threads` * `STAGING_NBYTES` of staging (two to four times that where a value is cast more
    than once), plus the inputs and the result of one `Computed` expression while it is being evaluated.

    Args:
        num_threads: reads in flight; 1 reads in the calling thread.

    Attributes:
        stats: what was read so far.
        on_bytes: called with the number of file bytes that reached a destination, from any thread; by default a no-op.
    """

    def __init__(self, *, num_threads: int = 1) -> None:
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], object] = int
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(num_threads, "lowmem_load-read") if num_threads > 1 else None
        self._pending: set[Future[None]] = set()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def fill(self, copies: Sequence[Copy], destination: torch.Tensor) -> None:
        """Start filling the flat contiguous `destination`; `finish` tells when, and whether, it is filled."""
        for task in self._tasks(copies, destination, {}):
            self._run(task)

    def finish(self) -> None:
        """Wait until all destinations given so far are filled.

        Raises:
            TruncatedFileError: a file ended early.
            OSError: a read failed.
        """
        while self._pending:
            self._reap(wait(self._pending).done)

    def read_whole(self, expression: Expression) -> torch.Tensor:
        """Return `expression` as a whole tensor in host memory."""
        value = torch.empty(numel(expression), dtype=expression.dtype)
        self.fill(plan_target("", expression, FlatRange(0, value.numel())).copies, value)
        self.finish()
        return value.reshape(expression.shape)

    def _tasks(
        self, copies: Iterable[Copy], destination: torch.Tensor, values: dict[int, Held]
    ) -> Iterator[Callable[[], None]]:
        """Yield what fills `destination`; `values` holds each `Computed` that was evaluated, by id.

        The calling thread evaluates them before the tasks that need them: in a task, that would wait for itself.
        """
        for copy in copies:
            leaf = copy.leaf
            for computed in computed_below(leaf):
                if id(computed) not in values:
                    values[id(computed)] = self._evaluate(computed)
            if isinstance(leaf, Computed):
                leaf = values[id(leaf)]
            if isinstance(leaf, Held):
                _scatter(copy, leaf.flat, copy.leaf_start - leaf.first, destination)
            elif isinstance(leaf, Elementwise):
                yield from self._elementwise(leaf, copy, destination, values)
            elif copy.is_contiguous and not copy.casts and destination.device.type == "cpu":
                yield from self._direct_reads(leaf, copy, destination)
            else:
                yield from self._staged_reads(leaf, copy, destination)

    def _elementwise(
        self, leaf: Elementwise, copy: Copy, destination: torch.Tensor, known: dict[int, Held]
    ) -> Iterator[Callable[[], None]]:
        widest = max(part.dtype.itemsize for part in (leaf, *leaf.parts))
        for piece, span in _staged_pieces(copy, widest):

            def task(piece: Copy = piece, span: int = span) -> None:
                values = []
                for part in leaf.parts:
                    values.append(torch.empty(span, dtype=part.dtype))
                    span_of_part = FlatRange(piece.leaf_start, piece.leaf_start + span)
                    for read in self._tasks(plan_copies(part, span_of_part), values[-1], known):
                        read()
                _scatter(piece, leaf.compute(values), 0, destination)

            yield task

    def _evaluate(self, computed: Computed) -> Held:
        result = computed.compute([self.read_whole(part) for part in computed.inputs])
        return Held(result.detach().contiguous().view(-1), 0, computed.shape, computed.dtype)

    def _run(self, task: Callable[[], None]) -> None:
        if self._pool is None:
            task()
            return
        if len(self._pending) >= 2 * self._num_threads:
            self._reap(wait(self._pending, return_when=FIRST_COMPLETED).done)
        self._pending.add(self._pool.submit(task))

    def _reap(self, done: set[Future[None]]) -> None:
        self._pending -= done
        for future in done:
            future.result()

    def _direct_reads(self, leaf: Source, copy: Copy, destination: torch.Tensor) -> Iterator[Callable[[], None]]:
        itemsize = leaf.dtype.itemsize
        step = DIRECT_NBYTES // itemsize
        for first in range(0, copy.numel, step):
            size = min(step, copy.numel - first)
            piece = destination.narrow(0, copy.destination_start + first, size)
            start = leaf.start + (copy.leaf_start + first) * itemsize

            def task(piece: torch.Tensor = piece, start: int = start) -> None:
                self._read(leaf, start, piece)
                self.on_bytes(piece.nbytes)

            yield task

    def _staged_reads(self, leaf: Source, copy: Copy, destination: torch.Tensor) -> Iterator[Callable[[], None]]:
        for piece, span in _staged_pieces(copy, leaf.dtype.itemsize):

            def task(piece: Copy = piece, span: int = span) -> None:
                staged = self._staging(span * leaf.dtype.itemsize).view(leaf.dtype)
                self._read(leaf, leaf.start + piece.leaf_start * leaf.dtype.itemsize, staged)
                _scatter(piece, staged, 0, destination)
                self.on_bytes(piece.numel * leaf.dtype.itemsize)

            yield task

    def _staging(self, num_bytes: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._local.buffer = torch.empty(max(num_bytes, STAGING_NBYTES), dtype=torch.uint8)
        return buffer[:num_bytes]

    def _descriptor(self, path: str) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def _read(self, leaf: Source, start: int, piece: torch.Tensor) -> None:
        """Fill the contiguous host tensor `piece` with the bytes of the file from `start` on."""
        descriptor = self._descriptor(leaf.path)
        view = memoryview(piece.view(torch.uint8).numpy().data)
        num_reads = 0
        while view:
            num_bytes = os.preadv(descriptor, [view], start)
            if num_bytes == 0:
                raise TruncatedFileError(
                    f"{leaf.path}: ended at byte {start} while {leaf.name!r} was read ({len(view)} bytes short); "
                    "the file changed after its header was read"
                )
            view, start, num_reads = view[num_bytes:], start + num_bytes, num_reads + 1
        with self._lock:
            self.stats.read_bytes += piece.nbytes
            self.stats.num_reads += num_reads


def gathered_nbytes(copy: Copy) -> int | None:
    """Return the bytes that are read beyond those needed for a copy that gathers scattered elements of a file.

    None for one that takes runs as they lie.
    """
    loops = zip(copy.leaf_strides, copy.destination_strides, strict=True)
    if not isinstance(copy.leaf, Source) or copy.is_contiguous:
        return None
    itemsize = copy.leaf.dtype.itemsize
    over = sum(span for _, span in _staged_pieces(copy, itemsize)) * itemsize - copy.needed_bytes
    return over if over > 0 or (1, 1) not in loops else None


def _scatter(copy: Copy, leaf: torch.Tensor, leaf_start: int, destination: torch.Tensor) -> None:
    """Move the elements of `copy` from the flat tensor `leaf`, where its first element is at `leaf_start`."""
    values = leaf.as_strided(copy.sizes, copy.leaf_strides, leaf.storage_offset() + leaf_start)
    casts = copy.casts
    if casts and casts[-1] == destination.dtype:
        casts = casts[:-1]  # copy_ does it without a temporary, which may be twice as large as the staging
    for dtype in casts:
        values = values.to(dtype)
    offset = destination.storage_offset() + copy.destination_start
    destination.as_strided(copy.sizes, copy.destination_strides, offset).copy_(values)


def _staged_pieces(copy: Copy, itemsize: int) -> Iterator[tuple[Copy, int]]:
    """Yield copies that need at most one staging buffer each, with the elements that their read spans.

    The loops with the smallest leaf strides are read in one go as long as the gaps between wanted elements stay below
    `MAX_GAP_NBYTES`; the others become separate reads.
    """
    loops = sorted(zip(copy.leaf_strides, copy.sizes, copy.destination_strides, strict=True), key=lambda loop: loop[0])
    budget = STAGING_NBYTES // itemsize
    span, num_inner = 1, 0
    for stride, size, _ in loops:
        if (stride - span) * itemsize > MAX_GAP_NBYTES or stride + span > budget:
            break
        span, num_inner = (size - 1) * stride + span, num_inner + 1
        if span > budget:
            break
    inner, outer = loops[:num_inner], loops[num_inner:]
    if span > budget:
        yield from _blocks(copy, inner, outer, budget)
        return
    for start, destination_start in _offsets(outer):
        yield _piece(copy, inner, copy.leaf_start + start, copy.destination_start + destination_start), span


_Loop = tuple[int, int, int]


def _blocks(copy: Copy, inner: list[_Loop], outer: list[_Loop], budget: int) -> Iterator[tuple[Copy, int]]:
    """As `_staged_pieces`, with the last of the `inner` loops cut into blocks that fit `budget` elements."""
    stride, size, destination_stride = inner[-1]
    below = 1 + sum((other_size - 1) * other_stride for other_stride, other_size, _ in inner[:-1])
    block = max(1, (budget - below) // stride + 1)
    for start, destination_start in _offsets(outer):
        for first in range(0, size, block):
            count = min(block, size - first)
            yield (
                _piece(
                    copy,
                    [*inner[:-1], (stride, count, destination_stride)],
                    copy.leaf_start + start + first * stride,
                    copy.destination_start + destination_start + first * destination_stride,
                ),
                (count - 1) * stride + below,
            )


def _offsets(loops: list[_Loop]) -> Iterator[tuple[int, int]]:
    """Yield (leaf, destination) offsets of every combination of `loops`, in elements."""
    for iterations in itertools.product(*(range(size) for _, size, _ in reversed(loops))):
        pairs = list(zip(iterations, reversed(loops), strict=True))
        yield sum(t * loop[0] for t, loop in pairs), sum(t * loop[2] for t, loop in pairs)


def _piece(copy: Copy, loops: list[_Loop], leaf_start: int, destination_start: int) -> Copy:
    strides, sizes, destination_strides = zip(*loops, strict=True) if loops else ((1,), (1,), (1,))
    return Copy(copy.leaf, leaf_start, destination_start, sizes, strides, destination_strides, copy.casts)
