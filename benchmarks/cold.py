"""Loads of files that are not cached: `python -m benchmarks.cold [--ranks 1 2 4] [--repeats 5]`.

Each row is the median of loads by turns, in the same processes: with as many reading threads as for cached files, with
those for cold ones, and of cached files, next to raw reads of the same bytes by 16 threads. "past cache" is how files
are read for which the host has no room to cache them. CPU seconds are of all ranks together. With "limit", all ranks
are in a cgroup that lets them take 1.2 times the bytes of the files, which needs root; "cached MiB" is the most that
this cgroup had in the page cache.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.checkpoint import checkpoint_of, drop_page_cache, shard_files, warm_page_cache
from benchmarks.floors import huge_pages
from benchmarks.launch import run_on_ranks
from benchmarks.memory import SAMPLE_INTERVAL_S, in_cgroup
from benchmarks.methods import zero3_config
from benchmarks.results import parser_of, show_table

WAYS = (
    "raw, buffered",
    "raw, direct",
    "cold, few threads",
    "cold",
    "cold, past cache",
    "warm",
    "cold, limit, through cache",
    "cold, limit",
)
PART_BYTES, NUM_THREADS, LIMIT = 16 << 20, 16, 1.2


def read_raw(path: Path, rank: int, num_ranks: int, flags: int) -> None:
    """Read each `num_ranks`-th part of all files into memory that was not touched before."""
    parts = [(file, start) for file in shard_files(path) for start in range(0, file.stat().st_size, PART_BYTES)]

    def read(number: int) -> None:
        file, start = parts[number]
        descriptor = os.open(file, os.O_RDONLY | flags)
        try:
            place = number // num_ranks * PART_BYTES
            os.preadv(descriptor, [memoryview(memory)[place : place + PART_BYTES]], start)
        finally:
            os.close(descriptor)

    memory = huge_pages(-(-len(parts) // num_ranks) * PART_BYTES)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(read, range(rank, len(parts), num_ranks)))


def measure(folder: str, ways: Sequence[str], repeats: int) -> dict[str, list[list[float]]]:
    """Return seconds, CPU seconds, and MiB in the page cache of each repetition, by way, on this rank."""
    import deepspeed  # noqa: F401  imported before the clock starts

    from lowmem_load import load_model
    from lowmem_load.distributed.process_group import DistributedInterface
    from lowmem_load.files import executor
    from lowmem_load.files.memory import trim_heap
    from lowmem_load.load import checks, load

    ranks, path = DistributedInterface(), Path(folder)
    load_model(folder, zero3_config("bf16"))  # imports the rest
    limit_bytes = int(LIMIT * sum(file.stat().st_size for file in shard_files(path)))
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for way in [*ways] * repeats:
        if ranks.rank == 0:
            (warm_page_cache if way == "warm" else drop_page_cache)(path)
        gc.collect()
        trim_heap()  # no load finds memory that an earlier one has left
        ranks.barrier()
        with contextlib.ExitStack() as stack:
            peak = stack.enter_context(peak_cache(limit_bytes)) if "limit" in way else [0]
            if "few" in way:
                stack.enter_context(mock.patch.object(executor, "is_cached", return_value=True))
            if "limit" in way:  # glibc counts what trim_heap gives back
                stack.enter_context(mock.patch.object(checks, "free_heap_bytes", return_value=0))
            if "cache" in way:
                stack.enter_context(mock.patch.object(load, "has_room_for_cache", return_value="through" in way))
            ranks.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            if way.startswith("raw"):
                read_raw(path, ranks.rank, ranks.world_size, os.O_DIRECT if "direct" in way else 0)
            else:
                load_model(folder, zero3_config("bf16"))
            found[way].append([time.perf_counter() - start, time.process_time() - cpu_start])
        found[way][-1].append(peak[0] / 2**20)
        ranks.barrier()
    return found


@contextlib.contextmanager
def peak_cache(limit_bytes: int) -> Iterator[list[int]]:
    """Run the block in the cgroup of all ranks; yield a list with the most bytes of page cache, which it has then."""
    peak, stop = [0], threading.Event()
    with in_cgroup("lowmem_load_benchmark", limit_bytes) as cached_bytes:

        def sample() -> None:
            while not stop.wait(SAMPLE_INTERVAL_S):
                peak[0] = max(peak[0], cached_bytes())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield peak
        finally:
            stop.set()
            thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ranks=[1, 2, 4], repeats=5)
    parser.add_argument("--params", type=int, default=1_500_000_000)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint. Default: a random one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(arguments)
    rows: list[Sequence[str]] = [("ranks", "way", "seconds", "CPU seconds", "cached MiB")]
    checkpoint: Any = contextlib.nullcontext(options.model) if options.model else checkpoint_of(options.params)
    with checkpoint as folder, tempfile.TemporaryDirectory() as out:
        for num_ranks in options.ranks:
            args = (str(folder), options.ways, options.repeats)
            of_ranks = run_on_ranks(measure, *args, out=Path(out, str(num_ranks)), world_size=num_ranks)
            for way in options.ways:
                runs = list(zip(*(found[way] for found in of_ranks), strict=True))
                seconds = statistics.median(max(wall for wall, *_ in ranks) for ranks in runs)
                cpu = statistics.median(sum(spent for _, spent, _ in ranks) for ranks in runs)
                cached = statistics.median(max(most for *_, most in ranks) for ranks in runs)
                rows.append([str(num_ranks), way, f"{seconds:.2f}", f"{cpu:.2f}", f"{cached:.0f}" if cached else ""])
    show_table("benchmarks.cold", rows, docs=options.docs)


if __name__ == "__main__":
    main()
