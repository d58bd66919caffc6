"""Samples of files: blocks lie inside, one in each stratum, at places that the seed decides."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import CheckpointError
from lowmem_load.io.open_sources import OpenSources
from lowmem_load.io.sample import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_BLOCKS_IN_ALL,
    MAX_SMALL_TENSORS,
    MIN_BLOCKS,
    drawn_tensors,
    sample_digests,
    sample_offsets,
)
from lowmem_load.io.source import LocalFile
from lowmem_load.planning.load_plan import PlannedFile


def file(nbytes: int, path: str = "model.safetensors") -> PlannedFile:
    return PlannedFile(path, nbytes, "", "")


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 3000), st.integers(0, 1 << 64))
def test_every_stratum_has_one_block(nbytes: int, num_files: int, seed: int) -> None:
    sampled = sample_offsets([file(nbytes)] * num_files, seed)
    for _, offsets in sampled[:3]:
        assert 1 <= len(offsets) <= MAX_BLOCKS
        stratum = nbytes / len(offsets)
        for number, offset in enumerate(offsets):
            assert int(number * stratum) <= offset <= int((number + 1) * stratum)
            assert offset + BLOCK_BYTES <= nbytes or nbytes < BLOCK_BYTES
    assert sum(len(offsets) for _, offsets in sampled) <= max(MAX_BLOCKS_IN_ALL, MIN_BLOCKS * num_files)


def test_a_stretch_of_two_strata_is_always_hit() -> None:
    nbytes = 256 << 20
    for seed in range(20):
        ((_, offsets),) = sample_offsets([file(nbytes)], seed)
        gaps = [b - a for a, b in pairwise(offsets)]
        assert max(gaps) <= 2 * nbytes / len(offsets)


def test_places_depend_on_the_seed_alone() -> None:
    assert sample_offsets([file(1 << 30)], 7) == sample_offsets([file(1 << 30)], 7)
    assert sample_offsets([file(1 << 30)], 7) != sample_offsets([file(1 << 30)], 8)


def test_small_tensors_are_all_compared_or_drawn_alike() -> None:
    small = [[(8, 4), (0, 8)], [], [(16, 2)]]
    assert drawn_tensors(small, 1) == [[(0, 8), (8, 4)], [], [(16, 2)]]
    many = [[(8 * number, 8) for number in range(MAX_SMALL_TENSORS)] for _ in range(3)]
    drawn = drawn_tensors(many, 1)
    assert sum(map(len, drawn)) == MAX_SMALL_TENSORS
    assert all(spans == sorted(set(spans)) for spans in drawn)
    assert drawn == drawn_tensors(many, 1) != drawn_tensors(many, 2)


def test_a_small_tensor_that_differs_is_found(tmp_path: Path) -> None:
    """The blocks of the sample miss it: 2 KiB of 64 MiB."""
    for name, value in (("a", 0), ("b", 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(64 << 20)
            file.seek(32 << 20)
            file.write(bytes([value]) * 2048)
    versions = [LocalFile(str(tmp_path / name)).version for name in "ab"]
    for small, differs in (([[]], False), ([[(32 << 20, 2048)]], True)):
        found = [digests(tmp_path / name, version, small=small) for name, version in zip("ab", versions, strict=True)]
        assert (found[0] != found[1]) is differs


def digests(path: Path, version: str, seed: int = 0, small: Any = ((),)) -> list[str]:
    planned = PlannedFile(str(path), path.stat().st_size, "", version)
    with contextlib.closing(OpenSources(LocalFile)) as sources:
        return sample_digests([planned], small, seed, sources, num_threads=1)


def test_digests_tell_other_bytes(tmp_path: Path) -> None:
    found = []
    for value in (b"\0", b"\1", b"\0"):
        (tmp_path / "file").write_bytes(value * 100_000)
        found += digests(tmp_path / "file", LocalFile(str(tmp_path / "file")).version)
    assert found[0] == found[2] != found[1]


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="was replaced or written to"):
        digests(tmp_path / "file", "another")
