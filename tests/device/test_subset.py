"""Some of what `make test-device` runs on the simulated accelerator: parity of four checkpoints, and two trainings."""

from __future__ import annotations

from pathlib import Path

from tests import builders
from tests.multi_rank.test_modes import compare_modes
from tests.multi_rank.test_parity import cases, load_all
from tests.ranks import SIMULATED, run_ranks

PARITY = (
    "llama, odd sizes, sharded, cast",
    "qwen2, tied",
    "mixtral, experts fused on load",
    "bert without its head, pooler missing",
)


def test_partitions_equal_the_ordinary_load(checkpoints: Path, minilm: Path) -> None:
    chosen = {name: case for name, case in cases(checkpoints, minilm).items() if name in PARITY}
    assert len(chosen) == len(PARITY)
    run_ranks(load_all, chosen, timeout_s=120, env=SIMULATED)


def test_training_equals_stock(checkpoints: Path, tmp_path: Path) -> None:
    path = str(builders.tiny_llama(checkpoints))
    modes = ["offload_param cpu pinned", "fp16"]
    run_ranks(compare_modes, path, path, modes, str(tmp_path), timeout_s=180, env=SIMULATED)
