"""A row of each kind of outcome; `make faults` runs every fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.faults import Case, subset
from tests.faults.matrix import Matrix
from tests.faults.shim import Unavailable


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    try:
        running = Matrix(tmp_path_factory.mktemp("checkpoints"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running:
        yield running


@pytest.mark.ranks
@pytest.mark.parametrize("case", subset(), ids=lambda case: case.name)
def test_a_fault_has_one_clean_outcome(matrix: Matrix, case: Case) -> None:
    verdict = matrix.run(case)
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert [*verdict.problems, *verdict.left] == [], f"{verdict.outcome}\n{verdict.text}"
