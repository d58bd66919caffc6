"""What one rank measures about itself: memory over time, bytes read, bytes given to collectives."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self  # typing.Self is younger than python 3.10

# 5 ms: about 200 samples a second cost under 1 % of a core, and a copy of 10 MB takes about as long.
SAMPLE_INTERVAL_S = 0.005
# Status words, sizes and pickled digests are far smaller than this; weights are far larger.
LARGE_PAYLOAD_BYTES = 64 * 1024


class Rss(NamedTuple):
    """Resident memory of this process in bytes; `file` includes shared memory (RssFile + RssShmem)."""

    anon: int
    file: int
    high_water: int


@dataclass(slots=True)
class MemoryUse:
    """Memory of a load in bytes above its start; samples are (seconds, anon, file)."""

    start_rss: int
    peak: int
    peak_anon: int
    peak_file: int
    anon_at_peak: int
    file_at_peak: int
    end_anon: int
    end_file: int
    max_sample_gap_s: float
    samples: list[tuple[float, int, int]]


def read_rss() -> tuple[Rss, int]:
    """Return the resident memory of this process, and how many bytes of /proc were read to learn it."""
    text = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")}
    return Rss(kib["RssAnon"] * 1024, (kib["RssFile"] + kib["RssShmem"]) * 1024, kib["VmHWM"] * 1024), len(text)


def settle_memory() -> None:
    """Return freed memory to the kernel: kept by malloc it would be reused by the load and not be counted."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


class MemorySampler:
    """Context manager that records this process' memory; `use()` gives the result after it has ended.

    The peak of the sum is exact: the kernel's high-water mark, reset on entry. The split into anonymous and
    file-backed comes from samples of a thread, which waits while other threads hold the interpreter lock; the
    longest gap between samples is recorded.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start_s = 0.0
        self._high_water = 0
        self.proc_bytes_read = 0

    def __enter__(self) -> Self:
        settle_memory()
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
        self.start_s = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._high_water = self._sample().high_water

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> Rss:
        rss, num_bytes = read_rss()
        self.proc_bytes_read += num_bytes
        self._samples.append((time.perf_counter() - self.start_s, rss.anon, rss.file))
        return rss

    def use(self) -> MemoryUse:
        """Return the recorded memory above the start."""
        _, start_anon, start_file = self._samples[0]
        above = [(round(t, 4), anon - start_anon, file - start_file) for t, anon, file in self._samples]
        _, anon_at_peak, file_at_peak = max(above, key=lambda sample: sample[1] + sample[2])
        return MemoryUse(
            start_rss=start_anon + start_file,
            peak=self._high_water - start_anon - start_file,
            peak_anon=max(anon for _, anon, _ in above),
            peak_file=max(file for _, _, file in above),
            anon_at_peak=anon_at_peak,
            file_at_peak=file_at_peak,
            end_anon=above[-1][1],
            end_file=above[-1][2],
            max_sample_gap_s=max((b[0] - a[0] for a, b in itertools.pairwise(above)), default=0.0),
            samples=above,
        )


class IoCounts(NamedTuple):
    """Bytes this process has read: by read calls (`rchar`), and from the disk (`disk`)."""

    rchar: int
    disk: int


def read_io() -> IoCounts:
    """Return the read counters of this process; page faults of mmap are not in `rchar`."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return IoCounts(int(fields["rchar"]), int(fields["read_bytes"]))


COLLECTIVES = (
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_reduce",
    "all_reduce_coalesced", "inference_all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "gather", "scatter", "send", "recv", "isend", "irecv",
)  # fmt: skip


@dataclass(slots=True)
class NetworkUse:
    """Tensor bytes that one rank gave to collectives of more than one rank."""

    num_calls: int = 0
    payload_bytes: int = 0
    large_payload_bytes: int = 0  # the part in payloads above LARGE_PAYLOAD_BYTES
    bytes_by_call: dict[str, int] = field(default_factory=dict)


class CollectiveCounter:
    """Counts tensor payloads of collectives while `active`.

    It wraps torch.distributed's functions and DeepSpeed's backend methods. DeepSpeed calls torch through the
    latter, or its shared-memory kernels past torch: a call within a call is counted once, at the outermost.
    """

    def __init__(self) -> None:
        self.active = False
        self.use = NetworkUse()
        self._within = threading.local()

    def install(self) -> None:
        """Wrap torch's collectives; to be called before anything does `from torch.distributed import ...`."""
        import torch.distributed
        from torch.distributed import distributed_c10d

        for name in COLLECTIVES:
            if hasattr(distributed_c10d, name):
                wrapped = self._wrap(name, getattr(distributed_c10d, name))
                # Both modules: object collectives look the tensor collectives up in distributed_c10d.
                setattr(distributed_c10d, name, wrapped)
                setattr(torch.distributed, name, wrapped)

    def install_deepspeed(self) -> None:
        """Wrap the methods of DeepSpeed's torch backend."""
        from deepspeed.comm.torch import TorchBackend

        for name in COLLECTIVES:
            if hasattr(TorchBackend, name):
                setattr(TorchBackend, name, self._wrap(name, getattr(TorchBackend, name)))

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.active or getattr(self._within, "call", False):
                return function(*args, **kwargs)
            self._count(name, args, kwargs)
            self._within.call = True
            try:
                return function(*args, **kwargs)
            finally:
                self._within.call = False

        return counted

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        if _group_size(values) < 2:
            return
        # The larger side of a call: all-gather's output, reduce-scatter's input, broadcast's only tensor.
        payload = max((_tensor_bytes(value) for value in values), default=0)
        self.use.num_calls += 1
        self.use.payload_bytes += payload
        self.use.large_payload_bytes += payload if payload > LARGE_PAYLOAD_BYTES else 0
        self.use.bytes_by_call[name] = self.use.bytes_by_call.get(name, 0) + payload


def _group_size(values: Iterable[Any]) -> int:
    import torch.distributed as dist

    groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
    return groups[0].size() if groups else dist.get_world_size()


def _tensor_bytes(value: Any) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0
