"""`make gpu-check` on the simulated device, so that it works on the day there is a GPU."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from tests.ranks import SIMULATED, run_ranks


@pytest.mark.release
def test_gpu_check_passes_on_the_simulated_device_and_says_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forked(function: Any, *args: Any, out: Path, world_size: int, on_gpu: bool) -> list[Any]:
        assert function is gpu_check.run and not on_gpu
        return run_ranks(function, *args, world_size=world_size, timeout_s=300, env=SIMULATED)

    monkeypatch.setattr(gpu_check, "run_on_ranks", forked)
    status = gpu_check.main(["--simulated", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert gpu_check.SIMULATED in printed and "13 checks on each of 2 ranks, 0 failed" in printed
