"""Peak host memory of a block, split into anonymous and file-backed memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lowmem_load.cli.bench_worker import PeakMemory
from lowmem_load.phases import Memory, host_memory

SAMPLE_INTERVAL_S = 0.005
"""Seconds. A load copies about 30 MB in this time."""


@dataclass(slots=True)
class MemoryUse:
    """Peak resident memory in bytes above its start: total, anonymous, and file-backed with shared memory."""

    peak: int = 0
    peak_anon: int = 0
    peak_file: int = 0


class MemorySampler(PeakMemory):
    """Measures the peak as `PeakMemory` does, and samples the split in a thread. `use` holds the result.

    The thread waits while other threads hold the interpreter lock, so the split is less exact than the total.
    """

    def __init__(self) -> None:
        super().__init__()
        self.use, self._start = MemoryUse(), Memory(0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        super().__enter__()
        self._start = host_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        super().__exit__()
        self.use.peak = self.peak_bytes

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        now, start, use = host_memory(), self._start, self.use
        use.peak_anon = max(use.peak_anon, now.anonymous_bytes - start.anonymous_bytes)
        use.peak_file = max(use.peak_file, now.file_bytes - start.file_bytes)
