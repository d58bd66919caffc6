"""How fast files can be read here: a short measurement."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lowmem_load.read.source import LocalFile

BLOCK_BYTES = 8 << 20
MAX_BYTES = 1 << 30
MAX_SECONDS = 2.0
"""What the measurement reads in one go, in all, and how long it goes on."""


def read_rate(paths: Sequence[str], *, num_threads: int) -> float | None:
    """Return the bytes a second that threads together read from files; None if these are too small.

    What is in the page cache comes from there. Reads at most `MAX_BYTES`, for about `MAX_SECONDS`.

    Args:
        paths: of local files.
        num_threads: that read at a time.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = [LocalFile(path) for path in paths]
    try:
        blocks = [(file, at) for file in files for at in range(0, file.nbytes - BLOCK_BYTES + 1, BLOCK_BYTES)]
        step = max(1, len(blocks) * BLOCK_BYTES // MAX_BYTES)
        chosen = iter(blocks[::step])
        lock, start = threading.Lock(), time.perf_counter()

        def read(_: int) -> int:
            memory, num_bytes = memoryview(bytearray(BLOCK_BYTES)), 0
            while time.perf_counter() - start < MAX_SECONDS:
                with lock:
                    file, offset = next(chosen, (None, 0))
                if file is None:
                    break
                file.read_into(offset, [memory])
                num_bytes += BLOCK_BYTES
            return num_bytes

        with ThreadPoolExecutor(num_threads, "lowmem_load-rate") as pool:
            total = sum(pool.map(read, itertools.repeat(0, num_threads)))
        return total / (time.perf_counter() - start) if total else None
    finally:
        for file in files:
            file.close()
