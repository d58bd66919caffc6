"""The comparison of a checkpoint's loads: what is run, what is left out, and what the figures are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.bench import compare as compare_module
from lowmem_load.bench.compare import Row, checked_methods, compare, equal_weights
from lowmem_load.bench.launch import GroupError, run_ranks
from lowmem_load.bench.worker import FLOOR, METHODS, STOCK, STREAMED
from lowmem_load.cli.main import app
from lowmem_load.errors import CheckpointError, ConfigError
from tests.builders import tiny_llama

CONFIG = {"zero_optimization": {"stage": 3}}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ranks were started for; each run is a second slower than the one before it."""
    specs: list[dict[str, Any]] = []

    def run(module: str, spec: dict[str, Any], out: Path, world_size: int, *, on_gpu: bool) -> list[str]:
        specs.append(spec)
        digest = "" if spec["method"] == FLOOR else "d"
        return [
            json.dumps(
                {
                    "method": spec["method"],
                    "rank": rank,
                    "world_size": world_size,
                    "digest": digest,
                    "seconds": len(specs) + rank,
                    "peak_bytes": 10 - rank,
                    "device_peak_bytes": 0,
                }
            )
            for rank in range(world_size)
        ]

    monkeypatch.setattr(compare_module, "run_ranks", run)
    return specs


def compared(folder: Path, **options: Any) -> list[Row]:
    given = {"methods": list(METHODS), "ranks": 2, "repeats": 1, "is_cold": False, "on_gpu": False, **options}
    return compare(str(folder), CONFIG, **given)


def test_seconds_are_of_the_slowest_rank_and_the_middle_run(tmp_path: Path, ran: list[dict[str, Any]]) -> None:
    rows = compared(tiny_llama(tmp_path), methods=[STREAMED], repeats=3, is_cold=True)
    assert [(row.seconds, row.all_seconds, row.peak_bytes, row.digest) for row in rows] == [(3, (2, 3, 4), 10, "d")]
    assert len(ran) == 3 and ran[0]["files"] and ran[0]["ds_config"] == CONFIG


def test_what_has_no_room_is_left_out(
    tmp_path: Path, ran: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path)
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    monkeypatch.setattr(compare_module, "available_bytes", lambda: nbytes)
    rows = {row.method: row for row in compared(folder)}
    assert rows[STOCK].skipped.startswith("rank 0 alone would take") and not rows[FLOOR].skipped
    assert [spec["method"] for spec in ran] == [STREAMED, FLOOR]


def test_weights_are_compared() -> None:
    assert equal_weights([Row("a", 1, digest="d"), Row("b", 1, digest="d"), Row("floor", 1)])
    assert not equal_weights([Row("a", 1, digest="d"), Row("b", 1, digest="e")])


def test_methods_are_known() -> None:
    assert checked_methods([], list(METHODS)) == [STOCK, STREAMED, FLOOR]
    assert checked_methods(["floor", "floor"], list(METHODS)) == [FLOOR]
    with pytest.raises(ConfigError, match="--method: expected stock, lowmem_load, floor, got ours"):
        checked_methods(["ours"], list(METHODS))
    with pytest.raises(CheckpointError, match="holds no weights"):
        compared(Path("/nowhere"))


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"rank 0 of 1 ended with status 1; .*rank0\.log:\n(.|\n)*No module named"):
        run_ranks("lowmem_load.no_such_module", {}, tmp_path, 1, on_gpu=False)


def test_the_command_shows_what_it_measured(
    tmp_path: Path, ran: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    app(["bench", str(tiny_llama(tmp_path)), "--png", str(tmp_path / "b.png")], standalone_mode=False)
    told = capsys.readouterr()
    assert "All ended with the same weights." in told.out and "lowmem_load, 2 ranks, run 1 of 1" in told.err
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG") and len(ran) == 3
