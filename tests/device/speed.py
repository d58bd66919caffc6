"""Loads on a modelled machine, with and without the ring of pinned slots: python -m tests.device.speed.

Storage, pinned and pageable copies have set bandwidths. Each line is a fresh process that loads a Llama of 0.5 GB to
the simulated device. Without the ring: a pageable staging buffer per thread and blocking copies out of it, as the
package did before it had the ring.
"""

from __future__ import annotations

import gc
import math
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.io.executor import Executor
from lowmem_load.io.source import LocalFile
from tests import builders
from tests.parity import BF16, FP32
from tests.ranks import SIMULATED, run_ranks

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""266 million parameters: 533 MB."""


@dataclass(frozen=True)
class Machine:
    """Bandwidths in 1e9 bytes per second, and whether the file's bf16 is kept as float32."""

    storage: float
    copy: float
    pageable: float
    casts: bool = False


MACHINES = [
    Machine(0.2, 0.2, 0.05),
    Machine(0.2, 0.4, 0.1),
    Machine(0.4, 0.2, 0.05),
    Machine(0.1, 0.4, 0.1),
    Machine(0.2, 0.2, 0.05, casts=True),
    Machine(0.4, 0.2, 0.05, casts=True),
]


@dataclass(frozen=True)
class Result:
    """What a load took.

    Attributes:
        seconds: of its read phase.
        limit_s: the larger of what storage and copy engine need at least for what the files hold.
        copy_busy: share of the seconds in which the copy engine was busy, by the engine's own timeline.
        pageable_copies, waits: how often.
        staging_bytes: device memory at the peak, beside parameters and buffers.
        is_right: whether the parameters are.
    """

    seconds: float
    limit_s: float
    copy_busy: float
    pageable_copies: int
    waits: int
    staging_bytes: int
    is_right: bool


class Storage:
    """A bandwidth that all readers share."""

    def __init__(self, gbps: float) -> None:
        self._bytes_per_s, self._lock, self._free_at = gbps * 1e9, threading.Lock(), 0.0

    def read_into(self, file: LocalFile, offset: int, memory: memoryview) -> None:
        """Stands for `LocalFile.read_into`."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + memory.nbytes / self._bytes_per_s
            due = self._free_at
        READ_INTO(file, offset, memory)
        time.sleep(max(0.0, due - time.perf_counter()))


READ_INTO = LocalFile.read_into


class WithoutRing(Executor):
    """Reads into pageable host memory, then copies, and does nothing meanwhile."""

    def fill(self, fill: Any, destination: torch.Tensor, values: Any, constants: Any) -> None:
        host = torch.empty(fill.numel, dtype=destination.dtype)
        super().fill(fill, host, values, constants)
        self.finish()
        destination[: fill.numel].copy_(host)

    def move(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(values.reshape(-1))


def load(path: str, machine: Machine, has_ring: bool, num_threads: int) -> Result:
    """Rank function."""
    from transformers import AutoModelForCausalLM

    from lowmem_load import DistributedInterface, load_model, load_report
    from lowmem_load.pipeline import load as stage
    from tests.device.simulated import counters, reset, set_speed, timeline

    DistributedInterface()
    storage = Storage(machine.storage)

    def read_into(file: LocalFile, offset: int, memory: memoryview) -> None:
        storage.read_into(file, offset, memory)

    with pytest.MonkeyPatch.context() as patches:
        executor = Executor if has_ring else WithoutRing
        patches.setattr(stage, "Executor", lambda **kwargs: executor(**{**kwargs, "num_threads": num_threads}))
        ds_config = FP32 if machine.casts else BF16
        load_model(path, ds_config)  # a real device has its memory; here the system has to find pages for it first
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        patches.setattr(LocalFile, "read_into", read_into)
        reset()
        set_speed(machine.copy, machine.pageable)
        model = load_model(path, ds_config)
        set_speed()
    counted, copies, report = counters(), timeline(), load_report(model)
    seconds = report.seconds["read"]
    held = [parameter.ds_tensor for parameter in model.parameters()] + list(model.buffers())
    held_bytes = sum(-(-tensor.nbytes // 512) * 512 for tensor in held)  # as they are allocated
    limit_s = max(report.needed_bytes / machine.storage, report.needed_bytes / machine.copy) / 1e9
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=held[0].dtype)
    return Result(
        seconds=seconds,
        limit_s=limit_s,
        copy_busy=_busy_s((copy.begin, copy.end) for copy in copies) / seconds,
        pageable_copies=sum(times for kind, (times, _) in counted.items() if "pageable" in kind),
        waits=counted.get("stream synchronised", (0, 0))[0],
        staging_bytes=report.peak_device_bytes - held_bytes,
        is_right=all(
            torch.equal(ours.ds_tensor.cpu(), theirs.flatten())
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
        ),
    )


def _busy_s(spans: Iterable[tuple[float, float]]) -> float:
    total, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def measure(path: Path, machine: Machine, *, has_ring: bool, num_threads: int = 4) -> Result:
    """Returns what a fresh process measured."""
    return run_ranks(load, str(path), machine, has_ring, num_threads, world_size=1, timeout_s=180, env=SIMULATED)[0]


COLUMNS = "{:>7} {:>5} {:>8} {:>4} {:>5} {:>8} {:>7} {:>9} {:>8} {:>5} {:>11}"
HEADS = (
    *("storage", "copy", "pageable", "cast", "ring", "seconds", "/ limit", "copy busy"),
    *("pageable", "waits", "staging MiB"),
)


def _line(machine: Machine, found: Result, has_ring: bool) -> str:
    return COLUMNS.format(
        *(machine.storage, machine.copy, machine.pageable, "yes" if machine.casts else "", "yes" if has_ring else ""),
        *(f"{found.seconds:.2f}", f"{found.seconds / found.limit_s:.2f}", f"{found.copy_busy:.0%}"),
        *(found.pageable_copies, found.waits, f"{found.staging_bytes / (1 << 20):.1f}"),
    )


def main() -> None:
    print(COLUMNS.format(*HEADS))
    with tempfile.TemporaryDirectory() as folder:
        path = builders.tiny_llama(Path(folder), **SIZES)
        for machine in MACHINES:
            for has_ring in (False, True):
                found = measure(path, machine, has_ring=has_ring)
                assert found.is_right
                print(_line(machine, found, has_ring), flush=True)


if __name__ == "__main__":
    main()
