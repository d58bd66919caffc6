"""The rig itself: faults strike where they are meant to, and what is not clean is seen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowmem_load
from tests.faults.faults import FIRST, PLANNING, READ_FAULTS, Case, Fault, cases, sample, subset
from tests.faults.matrix import MARKS, Verdict, judge
from tests.faults.shim import Action, Call, Control, Rule, Unavailable, build
from tests.faults.worker import Answer
from tests.ranks import REPO

READS = """
import os, sys
from tests.faults.shim import attach
attach(sys.argv[1])
for _ in range(4):
    try:
        descriptor = os.open(sys.argv[2], os.O_RDONLY)
        found = [bytearray(4), bytearray(4)]
        number = os.preadv(descriptor, found, 8)
        print(number, b"".join(found).decode().strip(chr(0)), os.fstat(descriptor).st_size)
        os.close(descriptor)
    except OSError as error:
        print(error.errno)
"""


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build(REPO / ".cache" / "faults")
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("rule", "expected"),
    {
        "none": (Rule(Call.READ), ["8 ijklmnop 16"] * 4),
        "second and third read": (
            Rule(Call.READ, "letters", Action.FAIL, errno.EIO, skip=1, times=2),
            ["8 ijklmnop 16", str(errno.EIO), str(errno.EIO), "8 ijklmnop 16"],
        ),
        "after a mark that never came": (
            Rule(Call.FSTAT, "letters", Action.FAIL, errno.ESTALE, mark="mark"),
            ["8 ijklmnop 16"] * 4,
        ),
        "short": (Rule(Call.READ, "letters", Action.SHORT, 3, times=1), ["3 ijk 16"] + ["8 ijklmnop 16"] * 3),
        "open": (Rule(Call.OPEN, "letters", Action.FAIL, errno.EMFILE), [str(errno.EMFILE)] * 4),
        "another file": (Rule(Call.OPEN, "numbers", Action.FAIL, errno.EMFILE), ["8 ijklmnop 16"] * 4),
        "these bytes": (Rule(Call.READ, "letters", Action.FAIL, errno.EIO, size=(15, 16)), [str(errno.EIO)] * 4),
        "other bytes": (Rule(Call.READ, "letters", Action.FAIL, errno.EIO, size=(0, 8)), ["8 ijklmnop 16"] * 4),
    }.values(),
)
def test_rules_strike_where_they_say(library: Path, tmp_path: Path, rule: Rule, expected: list[str]) -> None:
    (tmp_path / "letters").write_text("abcdefghijklmnop")
    control = Control(tmp_path / "rules")
    control.set([rule])
    env = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", READS, str(tmp_path / "rules"), str(tmp_path / "letters")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == expected
    assert bool(control.num_fired()) is (expected != ["8 ijklmnop 16"] * 4)


def case(fault: Fault) -> Case:
    return Case(fault, FIRST, rank=1, world_size=2)


def raised(text: str = "reading failed: rank 1: gone", **fields: Any) -> Answer:
    return Answer(kind="RankError", is_ours=True, text=text, **fields)


EXACT = {0: "a", 1: "b"}
LOADS, RAISES = Fault("", "loads"), Fault("", "raises")
INTERRUPTED, DIES = Fault("", "interrupted"), Fault("", "dies")
CLEAN: list[tuple[Fault, dict[int, Answer | None]]] = [
    (LOADS, {0: Answer(digest="a"), 1: Answer(digest="b")}),
    (RAISES, {0: raised(), 1: raised()}),
    (Fault("", "either"), {0: raised(), 1: raised()}),
    (INTERRUPTED, {0: raised(), 1: Answer(kind="KeyboardInterrupt")}),
    (DIES, {0: raised(), 1: None}),
]
UNCLEAN: list[tuple[Fault, dict[int, Answer | None], str]] = [
    (LOADS, {0: Answer(digest="a"), 1: Answer(digest="a")}, "other weights"),
    (LOADS, {0: raised(), 1: raised()}, "other weights"),
    (LOADS, {0: Answer(digest="a"), 1: Answer(digest="b", left=["a file"])}, "a file"),
    (RAISES, {0: Answer(digest="a"), 1: raised()}, "returned a model"),
    (RAISES, {0: raised(), 1: Answer(kind="OSError", text="rank 1")}, "not ours"),
    (RAISES, {0: raised(), 1: raised("reading failed: rank 1: other")}, "texts differ"),
    (RAISES, {0: raised("no"), 1: raised("no")}, "no 'rank 1"),
    (RAISES, {0: raised(left=["a thread"]), 1: raised()}, "a thread"),
    (RAISES, {0: raised(), 1: None}, "died"),
    (INTERRUPTED, {0: raised(), 1: raised()}, "no KeyboardInterrupt"),
    (DIES, {0: raised(), 1: raised()}, "died"),
    (Fault("", "either"), {0: Answer(digest="a"), 1: raised()}, "returned a model"),
]


@pytest.mark.parametrize(("fault", "answers"), CLEAN)
def test_clean_is_clean(fault: Fault, answers: dict[int, Answer | None]) -> None:
    verdict = Verdict(case(fault), seconds=1.0)
    judge(verdict, [EXACT], answers)
    assert verdict.is_clean, verdict


@pytest.mark.parametrize(("fault", "answers", "problem"), UNCLEAN)
def test_what_is_not_clean_is_seen(fault: Fault, answers: dict[int, Answer | None], problem: str) -> None:
    verdict = Verdict(case(fault), seconds=1.0)
    judge(verdict, [EXACT], answers)
    assert any(problem in found for found in [*verdict.problems, *verdict.left]), verdict


def test_late_is_not_clean() -> None:
    verdict = Verdict(case(RAISES), seconds=RAISES.limit_s + 1)
    judge(verdict, [EXACT], {0: raised(), 1: raised()})
    assert not verdict.is_clean


def test_moments_are_marked_by_functions_that_there_are() -> None:
    package = Path(lowmem_load.__file__).parent
    defined = [line.split("(")[0].split()[-1] for path in package.rglob("*.py") for line in _definitions(path)]
    assert {mark: mark in defined for mark in MARKS} == dict.fromkeys(MARKS, True)


def _definitions(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.lstrip().startswith("def ")]


def test_the_sample_has_every_fault_at_every_moment_of_every_job() -> None:
    def kinds(rows: list[Case]) -> list[tuple[str, str, str]]:
        return sorted((row.fault.name, row.moment.phase, row.job) for row in rows)

    assert kinds(sample()) == sorted(set(kinds(cases())))
    assert {(row.rank, row.world_size) for row in sample()} == {(0, 2), (1, 2), (0, 3), (2, 3)}


def test_the_subset_has_every_outcome_and_job() -> None:
    for field in ("expect", "action"):
        assert {getattr(row.fault, field) for row in subset()} >= {getattr(row.fault, field) for row in cases()}, field
    assert {row.job for row in subset()} == {row.job for row in cases()}
    assert len({row.moment.phase for row in subset()}) > 10
    assert {row.rank for row in subset()} == {0, 1, 2}


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in cases()]
    assert sorted(set(names)) == sorted(names)
    assert any(PLANNING.phase in name for name in names) and any(READ_FAULTS[0].name in name for name in names)
