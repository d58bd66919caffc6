"""What benchmarks say of a run: which weights and losses differ, the repetition that is shown, and the page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.results import (
    PAGE,
    Group,
    different_weights,
    load_table,
    loss_failures,
    markdown,
    median_group,
    network_failures,
    summary_lines,
    write_docs,
)
from benchmarks.scale import COLUMNS, Row, cells


def rank(method: str, seconds: float, **fields: Any) -> Any:
    memory = SimpleNamespace(peak=300 << 20, peak_file=5 << 20)
    network = SimpleNamespace(payload_bytes=0, large_payload_bytes=0)
    given = {"needed_bytes": 1000, "read_bytes": 1500, "digests": {"w": "a"}, "losses": [1.0], "cpu_seconds": 0.5}
    given |= {"memory": memory, "network": network, "partition_bytes": 290 << 20, "hbm_peak_bytes": None, **fields}
    return SimpleNamespace(method=method, seconds=seconds, rank=0, **given)


def test_the_repetition_of_median_duration_is_shown() -> None:
    group = median_group([[rank("lowmem", seconds)] for seconds in (3.0, 1.0, 2.0, 4.0)])
    assert group.seconds == 2.0
    assert group.seconds_of_repeats == [3.0, 1.0, 2.0, 4.0]


def test_weights_losses_and_payloads_that_differ_are_named() -> None:
    stock = Group("stock", 1, [rank("stock", 2.0)])
    network = SimpleNamespace(payload_bytes=70_000, large_payload_bytes=70_000)
    ours = Group("lowmem", 1, [rank("lowmem", 1.0, digests={"w": "b"}, losses=[2.0], network=network)])
    floor = Group("floor", 1, [rank("floor", 1.0)])
    compared, differences = different_weights([stock, ours, floor], floor_dtype_equal=True)
    assert compared == ["1 ranks: 1 parameters a rank, stock, lowmem, floor"]
    assert differences == ["w: rank 0 of 1: lowmem differs from stock"]
    assert loss_failures([stock, ours]) == ["rank 0 of 1: stock losses [1.0], lowmem [2.0]"]
    assert "70000 bytes in payloads over 64 KiB" in network_failures([ours])[0]
    assert not loss_failures([stock, Group("lowmem", 1, [rank("lowmem", 1.0)])])


def test_the_table_and_the_summary_have_the_figures_of_documents() -> None:
    groups = [Group("stock", 1, [rank("stock", 8.0)], [8.0]), Group("lowmem", 1, [rank("lowmem", 0.5)], [0.4, 0.5])]
    row = [cell.strip() for cell in load_table(groups).splitlines()[3].strip("|").split("|")]
    assert row == ["1", "**lowmem_load**", "0.50", "0.50", "300", "10", "5", "", "1.5000", "0"]
    assert summary_lines(groups) == [
        "lowmem, 1 ranks: 0.40, 0.50 s",
        "1 ranks: lowmem_load took 0.50 s, 300 MiB a rank; stock took 16.00 times as long",
    ]


def test_a_row_of_a_published_model_has_its_figures_or_why_it_failed() -> None:
    seconds = {"describe": 4.96, "plan": 0.5, "read": None}
    sizes = {"over_bytes": 67 << 20, "partition_bytes": 1250 << 20, "needed_bytes": 1000, "read_bytes": 7740}
    row = Row("deepseek-v3-fp8", 517, 1024)
    found = cells(row, {"seconds": seconds, **sizes, "num_reads": 4602})
    assert found == ["deepseek-v3-fp8", "91,991", "517/1024", "5.0", "0.5", "", "67", "1,250", "4,602", "7.74"]
    failed = cells(row, {"failed": "took more than 300 s"})
    assert failed[3] == "failed: took more than 300 s" and len(failed) == len(COLUMNS)


def test_a_table_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- written by x -->\nold\n<!-- end -->\n<!-- written by y -->\nkept\n<!-- end -->\n")
    table = markdown([("a", "b"), ("1", "long cell")])
    write_docs("x", table, page)
    assert page.read_text().startswith(
        f"a\n<!-- written by x -->\n\n{table}\n\n<!-- end -->\n<!-- written by y -->\nkept"
    )
    with pytest.raises(ValueError, match="0 places are marked as written by z"):
        write_docs("z", "", page)


@pytest.mark.parametrize("name", ["compare", "save", "resume", "scale", "slow_storage"])
def test_the_page_of_figures_has_a_place_for_each_table(name: str) -> None:
    assert PAGE.read_text(encoding="utf-8").count(f"<!-- written by benchmarks.{name} -->\n") == 1
