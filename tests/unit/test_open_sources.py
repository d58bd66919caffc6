"""Sources stay open, none is opened twice, and none that changed goes unnoticed."""

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.files.executor import Executor
from lowmem_load.files.source import LocalFile, OpenSources, read_bytes
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import FlatRange

NUM_FILES = 1500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abcd":
        (tmp_path / name).write_bytes(name.encode() * 100)
    return tmp_path


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(map(int, os.listdir("/proc/self/fd")))  # by other tests of this process; the limit is on numbers
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 64, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def read(sources: OpenSources, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        assert read_bytes(sources.opened(str(folder / name)), 0, 3) == name[:1].encode() * 3


def num_open(folder: Path) -> int:
    """Return how many files of a folder this process has open; threads of other tests have others."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile: that of the listing itself
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(path.startswith(f"{folder}/") for path in paths)


@pytest.mark.usefixtures("few_descriptors")
@pytest.mark.parametrize("num_threads", [1, 8])
def test_the_limit_of_open_files_is_raised(tmp_path: Path, num_threads: int) -> None:
    """Twice through all files, as parameters whose parts are in several would have it."""
    for number in range(NUM_FILES):
        (tmp_path / str(number)).write_bytes(number.to_bytes(8, "little"))
    planner, destination = Planner(), torch.zeros(2 * NUM_FILES, dtype=torch.int64)
    with Executor(num_threads=num_threads) as executor:
        for place in range(2 * NUM_FILES):
            number = place % NUM_FILES
            leaf = ex.Source(str(tmp_path / str(number)), f"w{number}", 0, (1,), torch.int64)
            fill = planner.plan_fill("w", leaf, FlatRange(0, 1))
            executor.fill(fill, destination[place : place + 1], planner.values, planner.constants)
        executor.finish()
        executor.sources.check_unchanged()
        assert num_open(tmp_path) == NUM_FILES
    assert destination.tolist() == 2 * list(range(NUM_FILES))
    assert num_open(tmp_path) == 0


def test_threads_that_read_the_same_files(folder: Path) -> None:
    sources, start = OpenSources(LocalFile), threading.Barrier(8, timeout=60)

    def work(number: int) -> None:
        start.wait()
        read(sources, folder, "abcd"[number % 4 :] * 200)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert num_open(folder) == 4
    sources.close()
    assert num_open(folder) == 0


def test_a_file_that_cannot_be_opened_may_be_there_later(folder: Path) -> None:
    sources = OpenSources(LocalFile)
    with pytest.raises(CheckpointError, match="late: cannot be read"):
        sources.opened(str(folder / "late"))
    (folder / "late").write_bytes(b"lll")
    read(sources, folder, ["late"])
    sources.close()


def test_more_files_than_a_process_may_open_are_an_error_that_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError, match=r"a: cannot be read: Too many open files; raise the limit"):
        LocalFile(str(folder / "a"))
