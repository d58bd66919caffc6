"""How benchmarks start ranks and measure memory."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory
from benchmarks.launch import GroupError, run_on_ranks
from benchmarks.memory import MemorySampler, available_bytes
from lowmem_load.integrations.startup_hook import OFF, SWITCH


def fail() -> None:
    raise ZeroDivisionError("by nothing")


def test_a_failed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"rank 0 of 1 ended with status 1; .*rank0\.log:\n(.|\n)*by nothing"):
        run_on_ranks(fail, out=tmp_path, world_size=1)


def switch_of(rank: str) -> dict[str, Any]:
    return {"rank": rank, "switch": os.environ[SWITCH]}


def test_stock_is_not_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")  # docs/howto/run.md: in the environment of a job
    assert run_on_ranks(switch_of, "a", out=tmp_path, world_size=1) == [{"rank": "a", "switch": OFF}]


def test_the_page_cache_of_a_container_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert available_bytes() == 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == 1 << 20
    for name, text in (("max", "800000\n"), ("current", "700000\n"), ("stat", "inactive_file 5\nactive_file 6\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes() == 100_011
    (tmp_path / "meminfo").unlink()
    assert available_bytes() is None


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
