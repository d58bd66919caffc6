"""How ranks share the hashing, and the warning about holes. Loads: `tests/multi_rank/test_integrity.py`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.read.open_sources import OpenSources
from lowmem_load.read.source import LocalFile
from lowmem_load.stages.checksums import shares, warn_of_holes


def planned(path: Path) -> PlannedFile:
    return PlannedFile(str(path), path.stat().st_size, "", "")


def sized(name: str, nbytes: int) -> PlannedFile:
    return PlannedFile(name, nbytes, "", "")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_each_file_is_hashed_once(num_ranks: int) -> None:
    files = [sized(f"model-{number}", 100 - number) for number in range(7)]
    found = shares(files, num_ranks)
    assert len(found) == num_ranks
    assert sorted(file.path for share in found for file in share) == [file.path for file in files]
    assert found == shares(files[::-1], num_ranks), "ranks may list files in any order"


def test_shares_are_balanced_by_bytes() -> None:
    files = [sized(name, nbytes) for name, nbytes in {"a": 5, "b": 4, "c": 3, "d": 3, "e": 3}.items()]
    assert [sum(file.nbytes for file in share) for share in shares(files, 2)] == [8, 10]
    assert [len(share) for share in shares(files, 4)] == [1, 1, 2, 1]


def test_holes_are_warned_of(tmp_path: Path) -> None:
    whole, hollow = tmp_path / "whole", tmp_path / "hollow"
    for path in (whole, hollow):
        path.write_bytes(bytes(1 << 16))
    os.truncate(hollow, 1 << 20)
    with pytest.warns(UserWarning, match=rf"m: bytes of 1 file\(s\) .* \({hollow}: 983040 of 1048576 bytes\)"):
        warn_of_holes("m", [planned(whole), planned(hollow)], OpenSources(LocalFile))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_holes("m", [planned(whole)], OpenSources(LocalFile))


def test_a_source_that_knows_of_no_holes_is_whole(tmp_path: Path) -> None:
    class Remote:
        def __init__(self, path: str) -> None:
            self.path, self.nbytes, self.version = path, 3, ""

        def read_into(self, offset: int, buffers: object) -> None:
            raise NotImplementedError

        def close(self) -> None:
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_holes("m", [sized("s3://x", 3)], OpenSources(Remote))
