"""Reports beyond one rank: as files, and joined."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.cli.start import app
from lowmem_load.errors import ConfigError
from lowmem_load.phases import Memory
from lowmem_load.planning.load_plan import SlowPath
from lowmem_load.report import REPORT_DIR, LoadReport, as_dict, join, read_reports, write_report

MIB = 1 << 20


def report(rank: int, *, read_s: float = 1.0, world_size: int = 3) -> LoadReport:
    return LoadReport(
        "org/model",
        rank=rank,
        world_size=world_size,
        read_bytes=3 * MIB,
        num_reads=3,
        seconds={"describe": 0.5, "read": read_s},
        peak_memory=Memory(13 * MIB, MIB),
        slow_paths=[SlowPath("w", "why")],
    )


def as_read(*reports: LoadReport) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(as_dict(each, 1), default=str)) for each in reports]


def test_a_report_is_written_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT_DIR, raising=False)
    assert write_report(report(0)) is None
    monkeypatch.setenv(REPORT_DIR, str(tmp_path / "made" / "here"))
    paths = [write_report(report(rank)) for rank in (2, 2)]
    assert all(path is not None and path.name.endswith("-model-rank00002.json") for path in paths)
    assert len(set(paths)) == 2  # each load of a process has its own
    assert sorted(os.listdir(tmp_path / "made" / "here")) == sorted(path.name for path in paths if path)  # nothing else
    (found, _) = read_reports([tmp_path / "made" / "here"])
    assert (found["name"], found["rank"], found["seconds"]["read"]) == ("org/model", 2, 1.0)
    assert not [name for name in found if name.startswith("_")]


def test_a_report_that_cannot_be_written_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(REPORT_DIR, str(tmp_path / "file"))
    assert write_report(report(0)) is None
    assert "the report of the load of org/model cannot be written" in caplog.text


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no reports: set {REPORT_DIR}"):
        read_reports([tmp_path])
    for content, message in (("{", "cannot be read as a report"), ("[]", "is no report"), ('{"format": 9}', "release")):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_reports([tmp_path / "a.json"])


def test_ranks_are_joined() -> None:
    other = report(0)
    other.name = "org/other"
    first, second = join(as_read(report(0), report(2, read_s=4.0), other))
    assert (first.name, second.name) == ("org/model", "org/other")
    assert ([rank.rank for rank in first.ranks], first.missing_ranks) == ([2, 0], [1])
    assert (first.ranks[0].seconds, first.ranks[0].peak_bytes) == ({"describe": 0.5, "read": 4.0}, 14 * MIB)


def test_reports_of_several_jobs_are_not_mixed() -> None:
    former, now = join(as_read(report(5, world_size=8), report(0, world_size=2), report(1, world_size=2)))[::-1]
    assert (former.world_size, [rank.rank for rank in former.ranks]) == (8, [5])
    assert (now.world_size, [rank.rank for rank in now.ranks], now.missing_ranks) == (2, [0, 1], [])
    with pytest.raises(ConfigError, match="two reports of rank 1 of load 1 of org/model, 3 ranks: name the reports"):
        join(as_read(report(1), report(1)))


def test_a_report_that_lacks_something_is_refused(tmp_path: Path) -> None:
    whole = as_dict(report(0), 1)
    for key in ("rank", "host", "seconds", "peak_memory"):
        for value in ({key: None}, {key: []}, {}):
            broken = {name: each for name, each in whole.items() if name != key} | value
            (tmp_path / "a.json").write_text(json.dumps(broken, default=str))
            with pytest.raises(ConfigError, match=f"a.json: is no whole report: {key} "):
                read_reports([tmp_path])


def test_the_command_joins_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for each in as_read(report(0), report(1, read_s=4.0)):
        (tmp_path / f"{each['rank']}.json").write_text(json.dumps(each))
    app(["report", str(tmp_path)], standalone_mode=False)
    title, _, heads, _, slowest, other, medians, *_ = capsys.readouterr().out.splitlines()
    assert title == "org/model, load 1: 2 of 3 ranks, slowest reader first; no report of 2"
    assert heads.split() == ["rank", "host", "describe", "read", "bytes", "read", "reads", "peak", "memory"]
    assert slowest.split()[0] == "1" and "4.00 s" in slowest and "14.0 MiB" in slowest
    assert other.split()[0] == "0" and "1.00 s" in other
    assert medians.split() == ["median", "0.50", "s", "2.50", "s", "3.00", "MiB", "3", "14.0", "MiB"]
    app(["report", str(tmp_path / "0.json"), "--json"], standalone_mode=False)
    assert [rank["rank"] for rank in json.loads(capsys.readouterr().out)[0]["ranks"]] == [0]
