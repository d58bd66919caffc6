"""The benchmark's command line."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import parse_arguments
from benchmarks.methods import METHODS


def test_each_state_of_memory_and_page_cache_has_the_same_loads() -> None:
    options = ["--preset", "llama-1.5b", "--ranks", "1", "2", "--repeats", "3", "--once", "stock", "--out", "found"]
    found, touched = parse_arguments(options)
    *both, cold = parse_arguments([*options, "--also-cold"])
    assert both == [found, touched]
    assert [(each.cold, each.is_touched) for each in (found, touched, cold)] == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert cold.loads == touched.loads == found.loads
    assert (cold.repeats, cold.once) == (3, ("stock",))
    assert touched.out == Path("found/touched").resolve()
    assert cold.out == Path("found/cold").resolve()


def test_a_model_of_ones_own_is_loaded_as_its_ds_config_says(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    options = ["--model", str(tmp_path), "--ds-config", str(tmp_path / "ds.json"), "--ranks", "4", "--cold"]
    plan, _ = parse_arguments(options)
    assert plan.model == tmp_path and plan.ds_config == {"zero_optimization": {"stage": 3}}
    assert plan.cold and plan.loads == [(method, 4) for method in METHODS] and not plan.train_steps
