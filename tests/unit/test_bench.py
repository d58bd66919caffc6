"""`lowmem-load bench`: which methods run, which are skipped, and what the figures mean."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import MemorySampler
from lowmem_load.cli import bench, bench_worker
from lowmem_load.cli.bench import GroupError, Row, compare, run_ranks
from lowmem_load.cli.bench_worker import FLOOR, STOCK, STREAMED, available_bytes, memory_limit, read_floor
from lowmem_load.cli.start import app
from lowmem_load.errors import CheckpointError
from lowmem_load.integrations.startup_hook import OFF, SWITCH
from tests.builders import tiny_llama

CONFIG = {"zero_optimization": {"stage": 3}}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The specs of started ranks. Each run takes a second longer than the one before."""
    specs: list[dict[str, Any]] = []

    def run(module: str, spec: dict[str, Any], out: Path, world_size: int, *, on_gpu: bool) -> list[str]:
        specs.append(spec)
        digest = "" if spec["method"] == FLOOR else "d"
        return [
            json.dumps(
                {"digest": digest, "seconds": len(specs) + rank, "peak_bytes": 10 - rank, "device_peak_bytes": rank}
            )
            for rank in range(world_size)
        ]

    monkeypatch.setattr(bench, "run_ranks", run)
    return specs


def compared(folder: Path, **options: Any) -> dict[str, Row]:
    given = {"ranks": 2, "repeats": 1, "is_cold": False, "on_gpu": False, **options}
    return {row.method: row for row in compare(str(folder), CONFIG, **given)}


def test_seconds_are_the_median_run_of_the_slowest_rank(tmp_path: Path, ran: list[dict[str, Any]]) -> None:
    rows = compared(tiny_llama(tmp_path), repeats=3, is_cold=True)
    assert [(row.seconds, row.all_seconds) for row in rows.values()] == [
        (3, (2, 3, 4)),
        (6, (5, 6, 7)),
        (9, (8, 9, 10)),
    ]
    assert all((row.peak_bytes, row.device_peak_bytes) == (10, 1) for row in rows.values())
    assert len(ran) == 9 and all(spec["files"] and spec["ds_config"] == CONFIG for spec in ran)


def test_methods_that_need_too_much_memory_are_skipped(
    tmp_path: Path,
    ran: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny_llama(tmp_path)
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    monkeypatch.setattr(bench, "available_bytes", lambda: nbytes)
    rows = compared(folder)
    assert rows[STOCK].skipped.startswith("would take") and not rows[FLOOR].skipped
    assert [spec["method"] for spec in ran] == [STREAMED, FLOOR]
    assert app(["bench", str(folder)], standalone_mode=False) == 1
    assert "The weights were not compared: skipped stock." in capsys.readouterr().out
    assert app(["bench", str(folder), "--json"], standalone_mode=False) == 1
    assert json.loads(capsys.readouterr().out)["equal_weights"] is None


def test_the_floor_reads_all_bytes_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(251)))
    (tmp_path / "b").write_bytes(b"xyz")
    monkeypatch.setattr("lowmem_load.cli.bench_worker.CHUNK_BYTES", 100)
    monkeypatch.setenv("WORLD_SIZE", "3")
    read = {}
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        read[rank] = torch.cat(read_floor([str(tmp_path / "a"), str(tmp_path / "b")]))
    parts = [bytes(part.tolist()) for part in read.values()]
    assert parts == [bytes(range(83)) + b"x", bytes(range(83, 167)) + b"y", bytes(range(167, 251)) + b"z"]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        compared(tmp_path)


def test_a_failed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"rank 0 of 1 ended with status 1; .*rank0\.log:\n(.|\n)*No module named"):
        run_ranks("lowmem_load.no_such_module", {}, tmp_path, 1, on_gpu=False)


def test_the_command_shows_what_it_measured(
    tmp_path: Path, ran: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    app(["bench", str(tiny_llama(tmp_path))], standalone_mode=False)
    told = capsys.readouterr()
    assert (
        "All runs of stock and lowmem_load ended with the same weights." in told.out
        and "lowmem_load, 2 ranks, run 1 of 1" in told.err
    )
    assert len(ran) == 3
    app(["bench", str(tiny_llama(tmp_path)), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["equal_weights"] and [row["method"] for row in found["rows"]] == [STOCK, STREAMED, FLOOR]


def test_different_weights_end_the_command_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for stock, streamed in ((("d",), ("e",)), (("d", "e"), ("d", "e"))):  # also between runs of one method
        rows = [Row("a", digests=stock), Row("b", digests=streamed), Row("floor")]
        monkeypatch.setattr(bench, "compare", lambda *_, rows=rows, **__: rows)
        assert app(["bench", "folder"], standalone_mode=False) == 1


def test_digests_of_all_runs_and_ranks_are_kept(
    tmp_path: Path, ran: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [row.digests for row in compared(tiny_llama(tmp_path), repeats=2).values()] == [("d",), ("d",), ()]
    result = {"seconds": 1, "peak_bytes": 0, "device_peak_bytes": 0}
    texts = [json.dumps({**result, "digest": digest}) for digest in ("e", "d")]
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: texts)
    assert compared(tiny_llama(tmp_path))[STOCK].digests == ("d", "e")


def test_stock_is_not_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says.py").write_text(
        f"import os, pathlib; pathlib.Path({str(tmp_path / 'rank0.json')!r}).write_text(os.environ[{SWITCH!r}])"
    )
    monkeypatch.setenv(SWITCH, "1")  # docs/pipelines/run.md: in the environment of a job
    assert run_ranks("says", {}, tmp_path, 1, on_gpu=False, cwd=tmp_path) == [OFF]


def test_the_page_cache_of_a_container_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(bench_worker, "PROC", tmp_path)
    monkeypatch.setattr(bench_worker, "CGROUP", tmp_path)
    assert available_bytes() == 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert (available_bytes(), memory_limit()) == (1 << 20, None)
    for name, text in (("max", "800000\n"), ("current", "700000\n"), ("stat", "inactive_file 5\nactive_file 6\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert (available_bytes(), memory_limit()) == (100_011, 800_000)
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
