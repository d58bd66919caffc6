"""How benchmarks start ranks and measure memory."""

import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch import run_on_ranks
from benchmarks.memory import MemorySampler
from lowmem_load.integrations.startup_hook import OFF, SWITCH


def switch_of(rank: str) -> dict[str, Any]:
    return {"rank": rank, "switch": os.environ[SWITCH]}


def test_stock_is_not_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")  # docs/howto/run.md: in the environment of a job
    assert run_on_ranks(switch_of, "a", out=tmp_path, world_size=1) == [{"rank": "a", "switch": OFF}]


def test_peaks_are_above_the_memory_at_the_start() -> None:
    with MemorySampler() as sampler:
        held = bytearray(64 << 20)
        held[:: mmap.PAGESIZE] = b"x" * len(held[:: mmap.PAGESIZE])
        time.sleep(0.1)
        del held
    use = sampler.use
    for peak in (use.peak, use.peak_anon):  # the kernel counts pages of a thread in batches
        assert 63 << 20 <= peak < 96 << 20
    assert use.peak_file < 16 << 20
