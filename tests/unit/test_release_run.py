"""What `make release` reads from logs, what it keeps, and the page that it writes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests import release_parts as parts_of
from tests.release_parts import Part, parts
from tests.release_run import (
    Outcome,
    changed,
    clean_commit,
    estimate,
    keep_outcome,
    page,
    read_outcomes,
    run_all,
    startable,
)

LOGS = {
    "test": (
        "12 files left unchanged\nFAILED tests/unit/test_a.py::test_b - took 3 in 2.0s\n"
        "= 2 failed, 4079 passed, 11 skipped, 1 xfailed, 3 warnings, 1 error in 700.12s (0:11:40) =\n",
        (4079, 3, 12),
    ),
    "device": ("............ [100%]\n== 120 passed in 40.10s ==\n", (120, 0, 0)),
    "resume": ('{"saved_by": 2, "way": "bf16"}\n{"saved_by": 2, "way": "fp32"}\nsaved\n', (2, 0, 0)),
    "scale": (
        "done: llama-3.1-405b  1,137  3/8\nfailed: kimi-k2-fp8  139,583  517/1024  failed: took more\n",
        (1, 1, 0),
    ),
    "main-table": (
        "done: stock, 2 ranks: 3.10 s, peak 5 MiB\nskipped: ordinary, 4 ranks: needs 9 GiB\n"
        "skipped: ordinary, 4 ranks: needs 9 GiB\nFAILED: other weights\n",
        (1, 1, 1),
    ),
    "faults": ("SIGKILL 0/2 clean\n412 rows in 2000 s: 2 unclean, 5 skipped; errors after 0.5 s\n", (405, 2, 5)),
    "zoo": (
        "== lowmem, 2 ranks, fp32: cases 9, exact 5, unsteady 1, unloadable 2, failed 1, recast 3, seconds 7\n"
        "== lowmem, 3 ranks, fp32: cases 9, exact 7, unsteady 0, unloadable 2, failed 0, recast 3, seconds 7\n"
        "== stock, 2 ranks, fp32: cases 9, exact 1, unsteady 0, unloadable 0, failed 8, recast 0, seconds 7\n",
        (13, 1, 4),
    ),
    "frameworks": (
        "Collecting trl: failed once\ntrl-sft: equal, 25 tensors\naxolotl-fft: losses: 2.5; tensors: 3 of 9 differ\n"
        "swift: failed: pip ended with 1\nnot as expected: swift\n",
        (2, 1, 0),
    ),
    "compat/oldest": (
        "10:00:01 oldest: took 9 s; so far: compared\n"
        "10:09:01 oldest: took 540 s; so far: seams 80, 3 skipped, parity 22, 1 failed, 2 skipped, modes not run\n",
        (102, 1, 5),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_counts_are_read_from_the_log_of_each_part(name: str) -> None:
    log, (passed, failed, skipped) = LOGS[name]
    (part,) = [each for each in parts() if each.name == name]
    assert part.read(log) == {"passed": passed, "failed": failed, "skipped": skipped}
    assert not part.read("Traceback (most recent call last):\nKeyError: 3\n")


def test_every_set_of_releases_is_a_part() -> None:
    names = [part.name for part in parts()]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("compat/") for name in names) == 10


def make_part(code: str) -> Part:
    return Part("group/one", "that it works", f'python -c "{code}"', parts_of.lines("good", "bad"), 1)


def run(part: Part, folder: Path, limit_s: float = 60) -> Outcome:
    [(ran, outcome)] = run_all([part], folder, limit_s)
    assert ran is part
    return outcome


def test_all_parts_fit_into_one_sitting() -> None:
    assert sum(part.minutes for part in parts()) <= 100
    assert estimate(parts()).endswith("The first time 38 GB of downloads come on top.")


def test_two_parts_run_side_by_side_where_neither_runs_alone() -> None:
    alone, one, again, two = (replace(make_part(""), name=str(n), lane=lane) for n, lane in enumerate((0, 1, 1, 2)))
    assert startable([alone, one, two], []) == [alone]
    assert startable([one, two], [alone]) == []
    assert startable([one, again, two], []) == [one, two]
    assert startable([again, two], [one]) == [two]
    assert startable([again], [two]) == [again]
    assert startable([alone], [two]) == []


def test_a_part_that_ends_well_and_counts_no_failure_has_passed(tmp_path: Path) -> None:
    outcome = run(make_part("print('good')"), tmp_path)
    assert outcome.has_passed
    assert outcome.counts == {"passed": 1, "failed": 0, "skipped": 0}
    assert (tmp_path / "group" / "one.log").read_text() == "good\n"
    keep_outcome(tmp_path, "group/one", outcome)
    assert read_outcomes(tmp_path, ["group/one", "group/two"]) == {"group/one": outcome}


@pytest.mark.parametrize(
    "code", ["print('good'); raise SystemExit(3)", "print('good'); print('bad')", "print('nothing to count')"]
)
def test_a_failure_keeps_the_end_of_the_log(tmp_path: Path, code: str) -> None:
    outcome = run(make_part(code), tmp_path)
    assert not outcome.has_passed
    assert outcome.tail == (tmp_path / "group" / "one.log").read_text().strip()


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    outcome = run(make_part("print('good', flush=True); import time; time.sleep(600)"), tmp_path, limit_s=2.0)
    assert not outcome.has_passed
    assert outcome.counts["passed"] == 1
    assert outcome.minutes < 1


def test_arguments_of_make_do_not_reach_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGS", "--only zoo")
    monkeypatch.setenv("MAKEFLAGS", "-- ARGS=--only\\ zoo")
    run(make_part("import os; print({'ARGS', 'MAKEFLAGS'} & set(os.environ))"), tmp_path)
    assert (tmp_path / "group" / "one.log").read_text() == "set()\n"


def test_the_page_names_every_part() -> None:
    table = [replace(make_part(""), name=name) for name in ("one", "two", "three")]
    good = Outcome(0, {"passed": 7, "failed": 0, "skipped": 2}, 3.5, "2026-01-02 10:00 UTC", "machine: M", "")
    bad = replace(good, status=1, counts={}, date="2026-01-03 10:00 UTC", tail="KeyError: 3")
    text = page("abc123", table, {"one": good, "three": bad})
    assert "- commit: `abc123`" in text
    assert "2026-01-02 10:00 UTC to 2026-01-03 10:00 UTC" in text
    assert text.count("machine: M") == 1
    assert "1 of 3 parts passed, 1 failed, 1 not run." in text
    assert "| 7 | 0 | 2 | 3.5 |" in text
    assert '| two | that it works | `python -c ""` | not run |' in text
    assert "not counted" in text
    assert "KeyError: 3" in text


def test_changed_files_are_refused_but_for_those_that_parts_write(tmp_path: Path) -> None:
    assert changed(" M docs/evidence.md\n?? new.py\n M docs/pipelines/frameworks.md\nM  README.md\n") == [
        "new.py",
        "README.md",
    ]
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    assert len(clean_commit(tmp_path)) == 40
    (tmp_path / "new.py").write_text("")
    with pytest.raises(SystemExit, match=r"commit or remove new\.py first"):
        clean_commit(tmp_path)


def test_the_page_in_the_documentation_lists_the_present_parts() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert [part.name for part in parts() if f"| {part.name} |" not in text] == []
