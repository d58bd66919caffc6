"""The examples run as their first lines say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.ranks import reserved_port, run_command

TORCHRUN = str(Path(sys.executable).parent / "torchrun")


@pytest.mark.release
def test_partial_zero3(tmp_path: Path) -> None:
    with reserved_port() as port:
        command = [TORCHRUN, "--nproc_per_node", "2", "--master_port", str(port), "examples/partial_zero3.py"]
        sizes = ["--hidden-size", "128", "--num-layers", "2", "--steps", "31"]
        run = run_command([*command, *sizes], TMPDIR=str(tmp_path))
    held = re.findall(r"rank (\d): language model ([\d.]+) MiB of ([\d.]+), encoders ([\d.]+) MiB whole", run.stdout)
    assert [rank for rank, *_ in held] == ["0", "1"]
    for _, here, everywhere, whole in held:
        assert abs(2 * float(here) - float(everywhere)) < 0.2
        assert float(whole) > 1
    losses = {int(step): values for step, values in re.findall(r"step +(\d+): (.*);", run.stdout)}
    assert {name for values in losses.values() for name in re.findall("[a-z]+", values)} == {"picture", "sound", "text"}
    first, last = ([float(value) for value in re.findall(r"[\d.]+", losses[step])] for step in (0, 30))
    assert max(last) < 0.75 * min(first)
    assert "resumed after step 31" in run.stdout
    assert not list(tmp_path.glob("partial-zero3-*"))
