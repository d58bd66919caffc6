"""One rank of one load: `python -m lowmem_load.cli.bench_worker SPEC` under a launcher's variables; and its memory."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

STOCK, STREAMED, FLOOR = "stock", "lowmem_load", "floor"
"""The methods. The floor reads each rank's share of the files' bytes and makes no model."""

CHUNK_BYTES = 64 << 20
"""Bytes of one read of the floor."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def high_water() -> int:
    """Return this process' peak resident memory in bytes, since its start or since the last `PeakMemory` began."""
    return int((PROC / "self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


class PeakMemory:
    """Context manager that measures the peak resident memory of the block: `peak_bytes` above its start."""

    def __init__(self) -> None:
        self.peak_bytes = self._start_bytes = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)  # the block would reuse freed memory, and it would not be counted
        (PROC / "self/clear_refs").write_text("5")  # 5: reset the high-water mark (man 5 proc)
        self._start_bytes = high_water()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = high_water() - self._start_bytes


def available_bytes() -> int | None:
    """Return the memory free for new processes in this container; None if the system does not say (macOS)."""
    fields = _fields(PROC / "meminfo")
    if "MemAvailable:" not in fields:
        return None
    available, limit = fields["MemAvailable:"] << 10, memory_limit()
    if limit is not None:
        pages = _fields(CGROUP / "memory.stat")
        of_files = pages.get("active_file", 0) + pages.get("inactive_file", 0)  # the kernel gives them back
        available = min(available, limit - int((CGROUP / "memory.current").read_text()) + of_files)
    return available


def memory_limit() -> int | None:
    """Return the bytes that this container may use; None without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}
    except OSError:
        return {}


def warm(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read every file once, so that the page cache holds it."""
    memory = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Ask the kernel to drop every file from the page cache. This is a hint and needs no privileges."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_floor(files: Iterable[str]) -> list[Any]:
    """Read this rank's share of the bytes of all files into fresh memory, in one thread."""
    import torch

    from lowmem_load.io.source import LocalFile

    rank, world_size, memory = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    for path in files:
        with closing(LocalFile(path)) as file:
            start, end = file.nbytes * rank // world_size, file.nbytes * (rank + 1) // world_size
            for at in range(start, end, CHUNK_BYTES):
                memory.append(torch.empty(min(CHUNK_BYTES, end - at), dtype=torch.uint8))
                file.read_into(at, memory[-1].numpy().data)
    return memory


def _method(spec: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the load to measure. Imports all that it needs, before the clock starts."""
    import lowmem_load.ds.partition  # noqa: F401  imports DeepSpeed
    from lowmem_load.api.load_model import load_model
    from lowmem_load.hf import names
    from lowmem_load.hf.active import deepspeed_config

    cls = names.model_class(None, names.model_config(spec["folder"], {}), False)

    def load_stock() -> Any:
        with deepspeed_config(spec["ds_config"]):
            return cls.from_pretrained(spec["folder"], **{names.DTYPE_KEYWORD: "auto"})

    methods: dict[str, Callable[[], Any]] = {
        STOCK: load_stock,
        STREAMED: lambda: load_model(spec["folder"], spec["ds_config"]),
        FLOOR: lambda: read_floor(spec["files"]),
    }
    return methods[spec["method"]]


def measure(spec: Mapping[str, Any], ranks: Any) -> dict[str, Any]:
    """Load, then compute the digest of the model ("" for the floor). Peaks are above the start. Collective."""
    from lowmem_load.report import device_memory
    from lowmem_load.saving.model_digest import model_digest
    from lowmem_load.text import fingerprint

    load = _method(spec)
    ranks.barrier()
    device_before = device_memory().allocated_bytes
    with PeakMemory() as memory:
        start = time.perf_counter()
        loaded = load()
        seconds = time.perf_counter() - start
    device_peak_bytes = max(0, device_memory().peak_bytes - device_before)
    digest = "" if spec["method"] == FLOOR else fingerprint(map(str, sorted(model_digest(loaded).items())))
    ranks.barrier()
    return {
        "seconds": seconds,
        "peak_bytes": memory.peak_bytes,
        "device_peak_bytes": device_peak_bytes,
        "digest": digest,
    }


def main() -> None:
    """Read the spec named on the command line, run it, write this rank's result."""
    from lowmem_load.distributed.process_group import DistributedInterface

    spec, ranks = json.loads(Path(sys.argv[1]).read_text()), DistributedInterface()
    result = measure(spec, ranks)
    Path(spec["out"], f"rank{ranks.rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo and DeepSpeed sometimes abort a process that exits normally


if __name__ == "__main__":
    main()
