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
from lowmem_load.io.source import LocalFile, OpenSources
from lowmem_load.pipeline.same_bytes import (
    BLOCK_BYTES,
    GAP_BYTES,
    MAX_BLOCKS,
    MAX_BLOCKS_IN_ALL,
    MAX_READ_BYTES,
    MIN_BLOCKS,
    SMALL_BYTES,
    Span,
    join_spans,
    sample_digests,
    sample_offsets,
)
from lowmem_load.planning.load_plan import PlannedFile


def file(nbytes: int, path: str = "model.safetensors") -> PlannedFile:
    return PlannedFile(path, nbytes, "", "")


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 3000), st.integers(0, 1 << 64))
def test_every_stratum_has_one_block(nbytes: int, num_files: int, seed: int) -> None:
    sampled = sample_offsets([file(nbytes)] * num_files, seed)
    for offsets in sampled[:3]:
        assert 1 <= len(offsets) <= MAX_BLOCKS
        stratum = nbytes / len(offsets)
        for number, offset in enumerate(offsets):
            assert int(number * stratum) <= offset <= int((number + 1) * stratum)
            assert offset + BLOCK_BYTES <= nbytes or nbytes < BLOCK_BYTES
    assert sum(map(len, sampled)) <= max(MAX_BLOCKS_IN_ALL, MIN_BLOCKS * num_files)


def test_a_stretch_of_two_strata_is_always_hit() -> None:
    nbytes = 256 << 20
    for seed in range(20):
        (offsets,) = sample_offsets([file(nbytes)], seed)
        gaps = [b - a for a, b in pairwise(offsets)]
        assert max(gaps) <= 2 * nbytes / len(offsets)


def test_places_depend_on_the_seed_alone() -> None:
    assert sample_offsets([file(1 << 30)], 7) == sample_offsets([file(1 << 30)], 7)
    assert sample_offsets([file(1 << 30)], 7) != sample_offsets([file(1 << 30)], 8)


def test_tensors_side_by_side_are_read_at_once() -> None:
    """As the scales of DeepSeek-V3's experts: safetensors sorts tensors by dtype."""
    scales = [(1000 + 3584 * number, 3584) for number in range(900)]
    assert join_spans(scales[::-1]) == [(1000, 3584 * 900)]
    assert join_spans([]) == []
    assert join_spans([(0, 8), (8 + GAP_BYTES, 8), (17 + 2 * GAP_BYTES, 8)]) == [
        (0, 16 + GAP_BYTES),
        (17 + 2 * GAP_BYTES, 8),
    ]


@given(st.lists(st.tuples(st.integers(0, 100 << 20), st.integers(1, SMALL_BYTES)), max_size=300))
def test_reads_cover_all_small_tensors(tensors: list[Span]) -> None:
    reads = join_spans(tensors)
    assert all(nbytes <= MAX_READ_BYTES for _, nbytes in reads)
    assert reads == sorted(reads)
    for first, nbytes in tensors:
        assert any(start <= first and first + nbytes <= start + length for start, length in reads)


def test_one_of_many_small_tensors_that_differs_is_found(tmp_path: Path) -> None:
    """FP8 checkpoints of mixtures of experts have tens of thousands of scales beside their norms."""
    small = [[(8192 * number, 64) for number in range(10_000)]]
    for name, value in (("a", 0), ("b", 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(80 << 20)
            file.seek(8192 * 7001)
            file.write(bytes([value]) * 64)
    first, second = (
        digests(tmp_path / name, LocalFile(str(tmp_path / name)).version, small=small) for name in ("a", "b")
    )
    assert first != second


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
