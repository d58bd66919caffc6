"""`make gpu-check` on the simulated device, so that it works on the day there is a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_worker import run
from tests.ranks import SIMULATED, run_ranks

NUM_PARAMS = 4_000_000


def test_gpu_check_passes_on_the_simulated_device_and_says_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forked(function: Any, spec: dict[str, Any], *, out: Path, world_size: int, on_gpu: bool) -> list[Any]:
        assert function is run and not on_gpu
        out.mkdir(parents=True)
        results = run_ranks(run, spec, world_size=world_size, timeout_s=300, env=SIMULATED)
        return list(map(asdict, results))

    monkeypatch.setattr(gpu_check, "run_on_ranks", forked)
    folders = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    status = gpu_check.main(["--simulated", "--params", str(NUM_PARAMS), *folders])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.count(gpu_check.SIMULATED) == 2
    assert "2 x sim (simulated)" in printed and "13 checks on each of 2 ranks, 0 failed" in printed
    raw = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert raw["is_simulated"] is True and len(raw["ranks"]) == 2
    assert [load["bytes_above_held"] for load in raw["ranks"][0]["loads"].values()][:2] == [0, 0]


def test_gpu_check_needs_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(SystemExit, match="finds no accelerator on this machine; --simulated"):
        gpu_check.main([])


def test_a_check_that_failed_is_named() -> None:
    from benchmarks.gpu_worker import CheckResult

    results = [CheckResult(0, "x", {"parity: llama": "ok"}), CheckResult(1, "x", {"parity: llama": "lm_head.weight"})]
    assert gpu_check.failures(results) == ["parity: llama, rank 1: lm_head.weight"]
