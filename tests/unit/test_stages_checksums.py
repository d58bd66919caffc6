"""How ranks share the hashing. Loads: `tests/multi_rank/test_integrity.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_load.pipeline.verify_checkpoint import share_files
from lowmem_load.planning.load_plan import PlannedFile


def planned(path: Path) -> PlannedFile:
    return PlannedFile(str(path), path.stat().st_size, "", "")


def sized(name: str, nbytes: int) -> PlannedFile:
    return PlannedFile(name, nbytes, "", "")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_each_file_is_hashed_once(num_ranks: int) -> None:
    files = [sized(f"model-{number}", 100 - number) for number in range(7)]
    found = share_files(files, num_ranks)
    assert len(found) == num_ranks
    assert sorted(file.path for share in found for file in share) == [file.path for file in files]
    assert found == share_files(files[::-1], num_ranks), "ranks may list files in any order"


def test_shares_are_balanced_by_bytes() -> None:
    files = [sized(name, nbytes) for name, nbytes in {"a": 5, "b": 4, "c": 3, "d": 3, "e": 3}.items()]
    assert [sum(file.nbytes for file in share) for share in share_files(files, 2)] == [8, 10]
    assert [len(share) for share in share_files(files, 4)] == [1, 1, 2, 1]
