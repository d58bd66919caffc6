"""Ranks compare what their files hold. The other ranks are scripted: what they say is gathered from copies of files."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import CheckpointError
from lowmem_load.io.source import LocalFile, OpenSources
from lowmem_load.pipeline.same_bytes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_BLOCKS_IN_ALL,
    MIN_BLOCKS,
    FilesId,
    View,
    agree_on_bytes,
    check_same,
    identify_files,
    sample_digests,
    sample_offsets,
)
from lowmem_load.planning.load_plan import PlannedFile
from tests.steps import ScriptedRanks

DATA = random.Random(1).randbytes(100_001)
"""No round number of blocks, so that the seed decides which bytes are sampled."""

SEED = 7


class Others:
    """What the other ranks bring; each answers for the checkpoint that it holds.

    `nodes[i]` names the checkpoint of rank i; ranks of one name look at the very same files.
    """

    def __init__(self, rank: int, nodes: list[str], checkpoints: dict[str, list[PlannedFile]]) -> None:
        self._rank, self._nodes, self._checkpoints = rank, nodes, checkpoints
        self.seed = SEED

    def seen(self, own: FilesId) -> list[FilesId]:
        """What all ranks have opened; of this one what it is given."""
        mine = self._nodes[self._rank]
        self.seed = own[1] if self._rank == 0 else SEED
        others = [(own[0] if node == mine else node, SEED) for node in self._nodes]
        return [own if rank == self._rank else other for rank, other in enumerate(others)]

    def samples(self, own: Any) -> list[Any]:
        """What all ranks bring to the comparison: only the first rank that looks at the same files has read them."""
        return [
            (
                self._digests(node) if self._nodes.index(node) == rank else [],
                self._paths(node),
            )
            for rank, node in enumerate(self._nodes)
        ]

    def _digests(self, node: str) -> list[str]:
        with contextlib.closing(OpenSources(LocalFile)) as sources:
            return sample_digests(self._ordered(node), self.seed, sources, num_threads=1)

    def _paths(self, node: str) -> list[str]:
        return [file.path for file in self._ordered(node)]

    def _ordered(self, node: str) -> list[PlannedFile]:
        return sorted(self._checkpoints[node], key=lambda file: Path(file.path).name)


def checkpoint(folder: Path, **contents: bytes) -> list[PlannedFile]:
    folder.mkdir()
    files = []
    for name, data in contents.items():
        path = folder / name
        path.write_bytes(data)
        source = LocalFile(str(path))
        files.append(PlannedFile(str(path), len(data), "header", source.version))
        source.close()
    return files


@pytest.fixture
def held(tmp_path: Path) -> dict[str, list[PlannedFile]]:
    """One checkpoint, a copy that lists its files the other way round, and one that differs in every byte of `b`."""
    other = bytes(255 - byte for byte in DATA)
    return {
        "first": checkpoint(tmp_path / "first", a=DATA, b=DATA),
        "copy": checkpoint(tmp_path / "copy", b=DATA, a=DATA),
        "other": checkpoint(tmp_path / "other", a=DATA, b=other),
    }


def run(rank: int, nodes: list[str], held: dict[str, list[PlannedFile]]) -> tuple[ScriptedRanks, list[str]]:
    """Return the ranks, and the files that this one opened."""
    read: list[str] = []

    def open_source(path: str) -> LocalFile:
        read.append(Path(path).name)
        return LocalFile(path)

    others = Others(rank, nodes, held)
    ranks: Any = ScriptedRanks(rank, others.samples)
    with contextlib.closing(OpenSources(open_source)) as sources:
        files = held[nodes[rank]]
        agree_on_bytes(
            ranks,
            "model",
            files,
            sources=sources,
            ids=others.seen(identify_files(files)),
            num_threads=1,
        )
    assert ranks.progress is None or bool(ranks.progress().amount) == bool(read)
    return ranks, read


def view(*ranks: int, digests: str = "xy") -> View:
    """What ranks found in the files `a` and `b` of a folder named after the first of them."""
    return View(ranks, tuple(digests), [f"/{ranks[0]}/{name}" for name in "ab"])


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([view(0), view(1, digests="xz")], "b: the ranks hold 2 .*: rank\\(s\\) 0: /0/b; rank\\(s\\) 1: /1/b\\. Give"),
        ([view(0), view(1, digests="zz")], "a: the ranks hold 2"),
        ([view(0, 3), view(1, 4, digests="xz"), view(2)], "0, 2-3: /0/b; rank\\(s\\) 1, 4: /1/b"),
        ([view(0), view(1, digests="xz"), view(2, digests="xw")], "the ranks hold 3 .*0: /0/b; .*1: /1/b; .*2: /2/b"),
    ],
)
def test_views_of_other_bytes_are_named_with_their_ranks(views: list[View], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        check_same(views)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_very_same_files_are_not_sampled(rank: int, held: dict[str, list[PlannedFile]]) -> None:
    ranks, read = run(rank, ["first", "first"], held)
    assert (ranks.brought, ranks.titles, read) == ([], [], [])


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, ["a", "b"]), (1, []), (2, ["a", "b"]), (3, [])], ids=["0", "1", "2", "3"]
)
def test_copies_are_sampled_by_one_rank_of_each(
    rank: int, expected: list[str], held: dict[str, list[PlannedFile]]
) -> None:
    ranks, read = run(rank, ["first", "first", "copy", "copy"], held)
    assert read == expected
    assert ranks.titles == ["model: comparing the files of the ranks"]
    if not expected:
        assert ranks.brought == [None], "with a thousand ranks, the same from all would be too much for the store"
        return
    digests, paths = ranks.brought[0]
    assert digests
    assert [Path(path).name for path in paths] == ["a", "b"]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_different_files_are_named_with_their_ranks_and_paths(
    rank: int, held: dict[str, list[PlannedFile]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        run(rank, ["first", "other", "copy", "other"], held)
    assert str(caught.value) == (
        "b: the ranks hold 2 different files of this name, so the model would be a mixture: "
        f"rank(s) 0, 2: {tmp_path}/first/b; rank(s) 1, 3: {tmp_path}/other/b. "
        "Give all ranks the same checkpoint and revision"
    )


def test_a_file_that_was_replaced_since_its_header_was_read_is_refused(held: dict[str, list[PlannedFile]]) -> None:
    Path(held["first"][0].path).write_bytes(DATA + b"more")
    with pytest.raises(CheckpointError, match="first/a: was replaced or written to"):
        run(0, ["first", "copy"], held)


def test_a_file_that_changes_is_another_view(held: dict[str, list[PlannedFile]]) -> None:
    """Of one path: what was opened before and after a change is not the very same."""
    views = [identify_files(held["first"])[0] for _ in range(2)]
    assert views[0] == views[1]
    held["first"][0] = PlannedFile(held["first"][0].path, len(DATA), "header", "another version")
    assert identify_files(held["first"])[0] != views[0]


# -- samples of files --------------------------------------------------------------------------------------------------


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


def test_places_depend_on_the_seed_alone() -> None:
    assert sample_offsets([file(1 << 30)], 7) == sample_offsets([file(1 << 30)], 7)
    assert sample_offsets([file(1 << 30)], 7) != sample_offsets([file(1 << 30)], 8)
