"""What the ranks check before they read: room on disks and in memory; the same files, on ranks that are scripted."""

import contextlib
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_load.errors import CheckpointError, ConfigError, MemoryShortageError
from lowmem_load.files.source import LocalFile, OpenSources
from lowmem_load.load.checks import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_BLOCKS_IN_ALL,
    MIN_BLOCKS,
    Use,
    check_room,
    check_same,
    disk_uses,
    has_room_for_cache,
    identify_files,
    sample_digests,
    sample_offsets,
)
from lowmem_load.planning.load_plan import PlannedFile

DATA = random.Random(1).randbytes(100_001)
"""No round number of blocks, so that the seed decides which bytes are sampled."""


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


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        (["0 xy", "1 xz"], "b: the ranks have 2 .*: rank\\(s\\) 0: /0/b; rank\\(s\\) 1: /1/b\\. Give"),
        (["0 xy", "1 zz"], "a: the ranks have 2"),
        (["0 xy", "1 xz", "2 xy", "0 xy", "1 xz"], "0, 2-3: /0/b; rank\\(s\\) 1, 4: /1/b"),
        (["0 xy", "1 xz", "2 xw"], "the ranks have 3 .*0: /0/b; .*1: /1/b; .*2: /2/b"),
    ],
)
def test_views_of_other_bytes_are_named_with_their_ranks(views: list[str], expected: str) -> None:
    """What each rank found in the files `a` and `b`: the folder that it opened, and their digests."""
    samples = [[(f"/{view[0]}/{name}", digest) for name, digest in zip("ab", view[2:], strict=True)] for view in views]
    with pytest.raises(CheckpointError, match=expected):
        check_same(samples)


def test_a_file_that_changes_is_another_view_and_is_refused(tmp_path: Path) -> None:
    """Of one path: what was opened before and after a change is not the very same."""
    files = checkpoint(tmp_path / "first", b=DATA, a=DATA)
    view = identify_files(files)
    assert identify_files(files[::-1]) == view, "in any order"
    assert identify_files([files[0], replace(files[1], version="another")]) != view
    Path(files[1].path).write_bytes(DATA + b"more")
    with (
        contextlib.closing(OpenSources(LocalFile)) as sources,
        pytest.raises(CheckpointError, match="first/a: was replaced or written to"),
    ):
        sample_digests(files, "seed", sources)


# -- samples of files --------------------------------------------------------------------------------------------------


def file(nbytes: int, path: str = "model.safetensors") -> PlannedFile:
    return PlannedFile(path, nbytes, "", "")


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 3000), st.text())
def test_every_stratum_has_one_block(nbytes: int, num_files: int, seed: str) -> None:
    sampled = sample_offsets([file(nbytes)] * num_files, seed)
    for offsets in sampled[:3]:
        assert 1 <= len(offsets) <= MAX_BLOCKS
        stratum = nbytes / len(offsets)
        for number, offset in enumerate(offsets):
            assert int(number * stratum) <= offset <= int((number + 1) * stratum)
            assert offset + BLOCK_BYTES <= nbytes or nbytes < BLOCK_BYTES
    assert sum(map(len, sampled)) <= max(MAX_BLOCKS_IN_ALL, MIN_BLOCKS * num_files)


def test_places_depend_on_the_seed_alone() -> None:
    first, second, other = (sample_offsets([file(1 << 30)], seed) for seed in "778")
    assert first == second != other


# -- room --------------------------------------------------------------------------------------------------------------


def use(needed: int, free: int, file_system: str = "node0", folder: str = "/nvme") -> list[Use]:
    return [Use(folder, file_system, needed, free)]


def test_a_rank_s_use_is_that_of_its_folder(tmp_path: Path) -> None:
    assert disk_uses({}) == []
    (use,) = disk_uses({str(tmp_path): 5})
    assert (use.place, use.needed_bytes) == (str(tmp_path), 5)
    assert use.pool.endswith(f" {os.stat(tmp_path).st_dev}")
    assert 0 < use.free_bytes <= shutil.disk_usage(tmp_path).total


def test_ranks_that_share_a_file_system_add_up() -> None:
    uses = use(6, 11), use(8, 10, "node1"), use(6, 12, folder="/nvme/2"), [], use(4, 3, "node2", "/other")
    with pytest.raises(ConfigError) as caught:
        check_room("model", uses, ConfigError)
    assert str(caught.value) == (
        "model: offload_param.nvme_path: its file system is too full: rank(s) 0, 2 need 12 B, and 11 B are free "
        "(/nvme); rank(s) 4 need 4 B, and 3 B are free (/other). Free space, or name another folder; nothing has been "
        "read yet"
    )


def test_what_is_read_has_to_fit_as_well_to_be_cached() -> None:
    """A node caches what its ranks read, of each file at most all of it."""
    uses = [use(10, 100), use(20, 90), use(30, 1000, "node1")]
    assert has_room_for_cache(uses, read_bytes=30, file_bytes=1000)
    assert not has_room_for_cache(uses, read_bytes=31, file_bytes=1000)
    assert has_room_for_cache(uses, read_bytes=31, file_bytes=60)
    assert not has_room_for_cache([*uses, use(30, 60, "node2")], read_bytes=31, file_bytes=60)


def test_host_memory_is_added_up_by_what_bounds_it() -> None:
    def uses(needed: int, own: int, node: str = "0") -> list[Use]:
        return [
            Use("node0: MemAvailable", f"memory {node}", needed, 11 << 20),
            Use("ulimit", f"{own}", needed, 7 << 20),
        ]

    check_room("model", [uses(5 << 20, 0), uses(6 << 20, 1), uses(7 << 20, 2, "1")], MemoryShortageError)
    with pytest.raises(MemoryShortageError) as caught:
        check_room("model", [uses(5 << 20, 0), uses(8 << 20, 1), []], MemoryShortageError)
    assert str(caught.value) == (
        "model: does not fit into host memory: rank(s) 0-1 need 13.0 MiB, and 11.0 MiB are free (node0: MemAvailable); "
        "rank(s) 1 need 8.00 MiB, and 7.00 MiB are free (ulimit). Use more nodes or fewer ranks on each, offload_param "
        "to nvme (there already: a smaller buffer_size), end other processes, or raise the limit; nothing has been "
        "allocated or read yet"
    )
    assert isinstance(caught.value, MemoryError)
