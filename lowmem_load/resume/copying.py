"""Moves parameters from the files of a checkpoint into those of a model folder, piece by piece, in bounded memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.io.executor import Executor
from lowmem_load.planning.expression import Expression
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.resume.zero_layout import Chain, Pieces
from lowmem_load.saving.save_plan import Write, held_writes
from lowmem_load.saving.writer import Writer

CHUNK_BYTES = 32 << 20
"""Of a parameter that is in memory at a time, in each process."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of elements of one parameter, and where they go.

    Attributes:
        name: of the parameter.
        elements: of it.
        expression: what they are made of.
        writes: that put them into files.
    """

    name: str
    elements: FlatRange
    expression: Expression
    writes: tuple[Write, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.elements.numel * self.expression.dtype.itemsize


@dataclass(slots=True)
class Copied:
    """What was copied: bytes, and of these those that were cast or rearranged on the way."""

    read_bytes: int = 0
    written_bytes: int = 0
    staged_bytes: int = 0
    num_writes: int = 0


def chunks_of(writes: Iterable[Write], pieces: Mapping[str, Pieces | Chain]) -> Iterator[Chunk]:
    """Yield the chunks that together are all writes, parameter by parameter. Pure."""
    of_parameter: dict[str, list[Write]] = {}
    for write in writes:
        of_parameter.setdefault(write.parameter, []).append(write)
    for name, mine in of_parameter.items():
        source = pieces[name]
        step = max(1, CHUNK_BYTES // source.dtype.itemsize)
        for start in range(0, source.numel, step):
            elements = FlatRange(start, min(start + step, source.numel))
            yield Chunk(name, elements, source.part(elements), tuple(held_writes(mine, {name: elements})))


def copy_chunks(
    chunks: Sequence[Chunk], files: Sequence[PlannedFile], paths: Sequence[Path], on_bytes: Callable[[int], object]
) -> Copied:
    """Copy some chunks, and have what was written reach the disk.

    `paths` are as `Write.file` numbers them, of files that are there in full length. `on_bytes` is told how many bytes
    were written, after each write.

    Memory: `CHUNK_BYTES`, and the writer's buffer.

    Raises:
        CheckpointError: a file cannot be read, has changed, or cannot be written.
    """
    largest = max((chunk.nbytes for chunk in chunks), default=0)
    buffer = torch.empty(largest, dtype=torch.uint8, device="cpu")
    with Executor() as executor, Writer(paths, on_bytes) as writer:
        executor.expect(files)
        for chunk in chunks:
            planner = Planner()
            fill = planner.plan_fill(chunk.name, chunk.expression, FlatRange(0, chunk.elements.numel))
            memory = buffer[: chunk.nbytes].view(chunk.expression.dtype)
            executor.fill(fill, memory, planner.values, planner.material)
            executor.finish()
            for write in chunk.writes:
                writer.write(write, memory, chunk.elements.start)
        executor.check_unchanged()
        writer.sync()
        return Copied(executor.stats.read_bytes, writer.written_bytes, writer.staged_bytes, writer.num_writes)


@contextlib.contextmanager
def _pool(processes: int, context: BaseContext) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Yield a pool whose processes an interrupt ends at once and silently, wherever it goes to."""
    before = set(multiprocessing.active_children())
    with concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
    ) as pool:
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


def copy_in_processes(
    chunks: Sequence[Chunk],
    files: Sequence[PlannedFile],
    paths: Sequence[Path],
    on_bytes: Callable[[int], object],
    processes: int,
) -> Copied:
    """Copy chunks as `copy_chunks` does, in several processes, each a share of the bytes."""
    shares = list(_shares(chunks, processes))
    if len(shares) < 2:
        return copy_chunks(chunks, files, paths, on_bytes)
    total = Copied()
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used OpenMP may hang
    with _pool(len(shares), context) as pool:
        pending = [pool.submit(copy_chunks, share, files, paths, int) for share in shares]
        for future in concurrent.futures.as_completed(pending):
            try:
                copied = future.result()
            except BrokenProcessPool as error:
                raise CheckpointError(
                    "one of the processes that copy was killed (by the system, where memory is short?); nothing was "
                    "written. Name fewer `processes`"
                ) from error
            on_bytes(copied.written_bytes)
            total.read_bytes += copied.read_bytes
            total.written_bytes += copied.written_bytes
            total.staged_bytes += copied.staged_bytes
            total.num_writes += copied.num_writes
    return total


def _shares(chunks: Sequence[Chunk], count: int) -> Iterator[list[Chunk]]:
    """Yield at most `count` runs of the chunks, of about as many bytes each."""
    total, done = sum(chunk.nbytes for chunk in chunks), 0
    share: list[Chunk] = []
    number = 1
    for chunk in chunks:
        share.append(chunk)
        done += chunk.nbytes
        if done * count >= number * total:
            yield share
            share, number = [], done * count // max(1, total) + 1
    if share:
        yield share
