"""A row of each kind of outcome; `make faults` runs every fault.

Each fault strikes at each moment once, on the first or the last of 2 or 3 ranks in turn.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lowmem_load
from tests.faults.faults import Case, cases, subset
from tests.faults.matrix import MARKS, Matrix
from tests.faults.shim import Unavailable

FEW = subset()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    try:
        running = Matrix(tmp_path_factory.mktemp("checkpoints"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running:
        yield running


def test_moments_are_marked_by_functions_that_there_are() -> None:
    code = "".join(path.read_text() for path in Path(lowmem_load.__file__).parent.rglob("*.py"))
    assert {mark: f"def {mark.split('.')[-1]}(" in code for mark in MARKS} == dict.fromkeys(MARKS, True)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case in FEW else pytest.mark.release) for case in cases()]
)
def test_a_fault_has_one_clean_outcome(matrix: Matrix, case: Case) -> None:
    verdict = matrix.run(case)
    assert [*verdict.problems, *verdict.left] == [], f"{verdict.outcome}\n{verdict.text}"
