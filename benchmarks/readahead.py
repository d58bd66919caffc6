"""What cold reads of partitions ask of a disk: `python -m benchmarks.readahead FOLDER --ranks 2`.

FOLDER is a checkpoint on a local disk, such as `benchmarks.compare` leaves in .cache/benchmarks. Each rank reads the
bytes of its partitions as lowmem_load does, into fresh memory, once as it reads now (a large read begins with two small
calls, see `OPENING_BYTES` in lowmem_load/read/source.py) and once with large calls alone, in turns, the page cache
dropped before each.

opening    bytes of each of the first two calls of a read; 0: large calls alone
seconds    of the slowest rank, from the moment that all have their files open; median, and from least to most
requests   that the disk got, and MiB of each: of the whole machine, so keep it quiet
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoint import read_headers
from benchmarks.floors import have_memory_backed, partitions
from benchmarks.machine import describe_machine
from lowmem_load.bench.floor import huge_pages
from lowmem_load.bench.page_cache import drop
from lowmem_load.read import source
from lowmem_load.read.executor import PART_BYTES

SECTOR_BYTES = 512


class Cold(NamedTuple):
    """One cold read of everything by all ranks."""

    seconds: float
    num_requests: int
    read_bytes: int


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readahead", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    print("\n".join(describe_machine().lines()))
    found: dict[int, list[Cold]] = {0: [], source.OPENING_BYTES: []}
    for _ in range(chosen.repeats):
        for opening_bytes, colds in found.items():
            colds.append(measure(chosen.folder, chosen.ranks, opening_bytes))
    print(f"{chosen.ranks} rank(s), {chosen.repeats} times\nopening  seconds             requests  MiB each")
    for opening_bytes, colds in found.items():
        seconds = sorted(cold.seconds for cold in colds)
        requests = statistics.median(cold.num_requests for cold in colds)
        each = statistics.median(cold.read_bytes / max(1, cold.num_requests) for cold in colds) / 2**20
        spread = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        print(f"{opening_bytes:7}  {spread:18}  {requests:8.0f}  {each:8.2f}")


def measure(folder: Path, world_size: int, opening_bytes: int) -> Cold:
    """Return what it takes all ranks to read their partitions from the disk."""
    paths = sorted({tensor.path for tensor in read_headers(folder)})
    _disk(paths[0])  # before anything waits for what fails here
    drop(paths)
    context = multiprocessing.get_context("spawn")
    start, end = context.Barrier(world_size + 1), context.Barrier(world_size + 1)
    ranks = [
        context.Process(target=_read, args=(folder, rank, world_size, opening_bytes, start, end))
        for rank in range(world_size)
    ]
    with _ended(ranks):
        start.wait()
        before, start_s = _disk(paths[0]), time.perf_counter()
        end.wait()
        seconds, after = time.perf_counter() - start_s, _disk(paths[0])
    return Cold(seconds, after[0] - before[0], after[1] - before[1])


@contextlib.contextmanager
def _ended(processes: list[multiprocessing.context.SpawnProcess]) -> Iterator[None]:
    for process in processes:
        process.start()
    try:
        yield
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def _read(folder: Path, rank: int, world_size: int, opening_bytes: int, start: Barrier, end: Barrier) -> None:
    source.OPENING_BYTES = opening_bytes
    _, pieces = partitions(folder, rank, world_size)
    files = {path: source.LocalFile(path) for path in {piece.path for piece in pieces}}
    have_memory_backed(folder, world_size, start.wait, is_cold=True)
    left = memoryview(huge_pages(sum(piece.nbytes for piece in pieces)))
    start.wait()
    for path, offset, nbytes in pieces:
        for first in range(0, nbytes, PART_BYTES):
            part_bytes = min(PART_BYTES, nbytes - first)
            files[path].read_into(offset + first, [left[:part_bytes]])
            left = left[part_bytes:]
    end.wait()


def _disk(path: Path) -> tuple[int, int]:
    """Return the read requests and the bytes read so far of the disk that holds a file (Linux `block/stat.rst`)."""
    device = os.stat(path).st_dev
    counts = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(counts[0]), int(counts[2]) * SECTOR_BYTES


if __name__ == "__main__":
    main()
