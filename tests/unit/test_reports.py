"""Reports beyond one rank: as files, joined, as a trace, as pictures and tables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowmem_load.cli.main import app
from lowmem_load.errors import ConfigError
from lowmem_load.phases import FileReads, Memory, Span
from lowmem_load.planning.load_plan import SlowPath
from lowmem_load.report import LoadReport
from lowmem_load.reports import file as report_file
from lowmem_load.reports.file import REPORT_DIR, as_dict, read_reports, write_json, write_report
from lowmem_load.reports.join import Spread, join
from lowmem_load.reports.trace import trace_of

MIB = 1 << 20


def report(rank: int, *, read_s: float = 1.0, begin_s: float = 100.0, world_size: int = 3) -> LoadReport:
    """One that read two files, the second of which is slower, at the same time."""
    read = begin_s + 0.5
    return LoadReport(
        "org/model",
        rank=rank,
        world_size=world_size,
        read_bytes=3 * MIB,
        num_reads=3,
        seconds={"describe": 0.5, "read": read_s},
        spans=[Span("describe", begin_s, read, 10 * MIB), Span("read", read, read + read_s, 20 * MIB)],
        files={
            "/m/a.safetensors": FileReads(2 * MIB, 2, 0.2, read, read + 0.2, {MIB: 2}),
            "/m/b.safetensors": FileReads(MIB, 1, read_s, read, read + read_s, {MIB: 1}),
        },
        start_memory=Memory(5 * MIB, MIB),
        peak_memory=Memory(19 * MIB, MIB),
        slow_paths=[SlowPath("w", "why", 7)],
    )


def as_read(*reports: LoadReport) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(as_dict(each, 1), default=str)) for each in reports]


def test_reads_of_a_file_add_up() -> None:
    reads = FileReads()
    for nbytes, begin_s, end_s in ((1024, 10.0, 11.0), (1025, 10.5, 10.75), (1, 9.0, 9.5)):
        reads.add(nbytes, begin_s, end_s)
    assert reads == FileReads(2050, 3, 1.75, 9.0, 11.0, {1024: 1, 2048: 1, 1: 1})


def test_a_report_is_written_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT_DIR, raising=False)
    assert write_report(report(0)) is None
    monkeypatch.setenv(REPORT_DIR, str(tmp_path / "made" / "here"))
    paths = [write_report(report(rank)) for rank in (2, 2)]
    assert all(path is not None and path.name.endswith("-model-rank00002.json") for path in paths)
    assert len(set(paths)) == 2  # each load of a process has its own
    assert sorted(os.listdir(tmp_path / "made" / "here")) == sorted(path.name for path in paths if path)  # nothing else
    (found, _) = read_reports([tmp_path / "made" / "here"])
    assert (found["name"], found["rank"], found["pid"]) == ("org/model", 2, os.getpid())
    assert found["files"]["/m/b.safetensors"]["sizes"] == {str(MIB): 1}


def test_a_report_that_cannot_be_written_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(REPORT_DIR, str(tmp_path / "file"))
    assert write_report(report(0)) is None
    assert "the report of the load of org/model cannot be written" in caplog.text
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "file" / "x.json", {})


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no reports: set {report_file.REPORT_DIR}"):
        read_reports([tmp_path])
    for content, message in (("{", "cannot be read as a report"), ("[]", "is no report"), ('{"format": 9}', "release")):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_reports([tmp_path / "a.json"])


def test_ranks_are_joined() -> None:
    other = report(0)
    other.name = "org/other"
    slow = report(2, read_s=4.0, begin_s=100.25)
    first, second = join(as_read(slow, report(0), other))
    assert (first.name, second.name) == ("org/model", "org/other")
    assert ([rank.rank for rank in first.ranks], first.missing_ranks) == ([0, 2], (1,))
    assert (first.slowest.rank, first.slowest.grown_bytes) == (2, 14 * MIB)
    assert (first.wall_s, first.begin_spread_s) == (4.75, 0.25)
    assert [file.path for file in first.files] == ["/m/b.safetensors", "/m/a.safetensors"]
    slowest = first.files[0]
    assert (slowest.bytes_per_s, slowest.slowest_rank, slowest.num_reads) == (2 * MIB / 5.0, 2, 2)
    assert first.sizes == {MIB: 6}
    assert first.spreads["read"] == Spread(1.0, 2.5, 4.0)
    assert first.spreads["bytes read"] == Spread(3 * MIB, 3 * MIB, 3 * MIB)


def test_reports_of_several_jobs_are_not_mixed() -> None:
    former, now = join(as_read(report(5, world_size=8), report(0, world_size=2), report(1, world_size=2)))[::-1]
    assert (former.world_size, [rank.rank for rank in former.ranks]) == (8, [5])
    assert (now.world_size, [rank.rank for rank in now.ranks], now.missing_ranks) == (2, [0, 1], ())
    with pytest.raises(ConfigError, match="two reports of rank 1 of load 1 of org/model, 3 ranks: name the reports"):
        join(as_read(report(1), report(1)))


def test_a_report_that_lacks_something_is_refused(tmp_path: Path) -> None:
    whole = as_dict(report(0), 1)
    for key in ("rank", "files", "spans", "seconds", "peak_memory"):
        for value in ({key: None}, {key: "x"}, {}):
            broken = {name: each for name, each in whole.items() if name != key} | value
            (tmp_path / "a.json").write_text(json.dumps(broken, default=str))
            with pytest.raises(ConfigError, match=f"a.json: is no whole report: {key} "):
                read_reports([tmp_path])


def test_a_trace_has_phases_files_and_memory() -> None:
    events = trace_of(as_read(report(0), report(2, begin_s=101.0)))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["name"], event["tid"]) for event in complete if event["tid"] == 0} == {
        (rank, phase, 0) for rank in (0, 2) for phase in ("describe", "read")
    }
    describe = next(event for event in complete if event["pid"] == 2 and event["name"] == "describe")
    assert (describe["ts"], describe["dur"]) == (1e6, 0.5e6)
    of_files = [event for event in complete if event["tid"] and event["pid"] == 0]
    assert len({event["tid"] for event in of_files}) == 2  # side by side, as both were read at the same time
    assert {event["name"] for event in events if event["ph"] == "M"} >= {"process_name", "thread_name"}
    assert [event["args"] for event in events if event["ph"] == "C" and event["pid"] == 0] == [
        {"host memory, MiB": 10.0},
        {"host memory, MiB": 20.0},
    ]
    assert trace_of([])["traceEvents"] == []


def test_the_command_joins_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for each in as_read(report(0), report(1, read_s=4.0)):
        write_json(tmp_path / f"{each['rank']}.json", each)
    picture, trace = tmp_path / "load.png", tmp_path / "trace"
    app(["report", str(tmp_path), "--timeline", str(picture), "--trace", str(trace)], standalone_mode=False)
    told = capsys.readouterr().out
    assert "2 of 3" in told and "1 on " in told and "b.safetensors" in told
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    app(["report", str(tmp_path / "0.json"), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["slowest_rank"] == 0


def test_a_report_is_a_table_on_a_terminal_and_text_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    one = report(1)
    one.show()
    assert capsys.readouterr().out == f"{one}\n"
    console = Console(width=80, record=True, force_terminal=True)
    with console.capture() as captured:
        console.print(one)
    text = captured.get()
    assert "rank 1 of 3" in text and "slow paths" in text and max(map(len, text.splitlines())) < 200
