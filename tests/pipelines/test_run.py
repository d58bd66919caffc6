"""`lowmem-load run`: an example that loads as stock does, unchanged, under each launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.multi_rank.test_launchers import LAUNCHERS
from tests.pipelines.pipeline import import_example
from tests.ranks import REPO, reserved_port, run_command, run_ranks

SCRIPT = REPO / "examples" / "hf_trainer.py"
STEPS = ["--steps", "2", "--save-steps", "9"]


def train_installed(argv: list[str]) -> list[float]:
    """Rank function: the example with its own `install()`."""
    losses: list[float] = import_example("hf_trainer").main(argv)
    return losses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    import_example("make_model").main([str(folder), "--size", "tiny"])
    return str(folder)


@pytest.fixture(scope="module")
def installed(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses, and the folder of the trained model, of the example with `install()` in it."""
    folder = tmp_path_factory.mktemp("installed")
    argv = ["--model", model, "--output", str(folder), *STEPS]
    return run_ranks(train_installed, argv, timeout_s=150)[0], folder


@pytest.mark.release  # of one process: tests/unit/test_cli_remote.py; of children: tests/unit/test_startup.py
def test_a_script_without_install_trains_as_with_it(
    model: str, installed: tuple[list[float], Path], tmp_path: Path
) -> None:
    with reserved_port() as port:
        start = [word.format(port=port) for word in LAUNCHERS["torchrun"]]
        script = [str(SCRIPT), "--stock", "--model", model, "--output", str(tmp_path), *STEPS]
        run = run_command([sys.executable, "-m", "lowmem_load", "run", "--", *start, *script])
    losses, folder = installed
    assert f"losses: {' '.join(f'{loss:.6f}' for loss in losses)}\n" in run.stdout
    [theirs], [ours] = ([*place.glob("final/*.safetensors")] for place in (folder, tmp_path))
    expected, trained = load_file(theirs), load_file(ours)
    assert [name for name in expected if not torch.equal(expected[name], trained[name])] == []

    said = re.findall(r"lowmem_load: (.*)", run.stderr)
    assert len(said) == 2, said
    assert said[0].startswith("on: ")
    assert said[1] == f"{model}: rank 0 of 2"  # the report, in rows
    half = r"\d+\.\d KiB of 1\.\d\d MiB"
    assert re.search(rf"^  holds: {half} partitioned$", run.stderr, re.MULTILINE), run.stderr
    assert re.search(rf"^  read: {half} in the files, ", run.stderr, re.MULTILINE), run.stderr
    assert "/tiny: rank 0 of 2" in run.stdout  # the example prints the report of its load
