"""Local files as byte sources, which stay open: none that changed goes unnoticed."""

import contextlib
import errno
import gc
import mmap
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files import source as source_module
from lowmem_load.files.executor import Executor
from lowmem_load.files.memory import untouched_bytes
from lowmem_load.files.source import (
    DIRECT_BYTES,
    MIN_DIRECT_BYTES,
    OPENING_BYTES,
    LocalFile,
    OpenSources,
    read_bytes,
)
from lowmem_load.planning import expression as ex
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.regions import FlatRange

DATA = bytes(range(256))


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "data").write_bytes(DATA)
    return str(tmp_path / "data")


def test_memory_is_filled_from_any_byte_on_and_nothing_around_it(file: str) -> None:
    source = LocalFile(file)
    assert (source.nbytes, LocalFile(source.path).version) == (256, source.version)
    for offset, nbytes in ((0, 1), (0, 256), (7, 100), (255, 1), (0, 0), (1000, 0)):
        memory = bytearray(b"\xaa" * 456)
        source.read_into(offset, memoryview(memory)[100 : 100 + nbytes])
        assert memory == b"\xaa" * 100 + DATA[offset : offset + nbytes] + b"\xaa" * (356 - nbytes)
    source.close()
    source.close()  # does nothing


@pytest.mark.parametrize(("offset", "nbytes"), [(256, 1), (251, 6), (0, 257), (1 << 40, 1)])
def test_bytes_beyond_the_end_are_an_error(file: str, offset: int, nbytes: int) -> None:
    source = LocalFile(file)
    with pytest.raises(TruncatedFileError, match=re.escape(file)):
        read(source, offset, nbytes)
    assert read(source, 0, 10) == DATA[:10], "after an error"


def test_a_read_may_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with contextlib.closing(LocalFile(str(tmp_path / "file"))) as source:
        assert os.get_blocking(source._descriptor)  # a file that is on tape would have no bytes otherwise


def fifo(path: str) -> str:
    os.mkfifo(path)
    return path


def folder(path: str) -> str:
    os.mkdir(path)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fifo, "is not a regular file"),
        (folder, "is not a regular file"),
        (lambda _: "/dev/zero", "is not a regular file"),
        (lambda path: path, "cannot be read: No such file or directory"),
        (lambda path: f"{path}/\0", "cannot be opened: embedded null byte"),
        (lambda path: "x" * 5000, "cannot be read: File name too long"),
    ],
)
def test_what_is_no_file_is_refused(make: Callable[[str], str], message: str, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=message):
        LocalFile(make(str(tmp_path / "thing")))  # of a FIFO: without waiting for a writer
    assert os.listdir("/proc/self/fd") == before


def test_a_large_read_from_a_disk_begins_with_two_small_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DATA * (OPENING_BYTES // 64)  # four times so much
    (tmp_path / "large").write_bytes(data)
    calls: list[int] = []

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(sum(buffer.nbytes for buffer in buffers))
        return ordinary(descriptor, buffers, offset)

    ordinary = os.preadv
    monkeypatch.setattr(os, "preadv", counted)
    large, small = len(data) - 5, OPENING_BYTES
    for device, size, expected in [
        (8, large, [OPENING_BYTES, OPENING_BYTES, len(data) - 5 - 2 * OPENING_BYTES]),
        (8, small, [OPENING_BYTES]),
        (0, large, [large]),
    ]:
        calls.clear()
        monkeypatch.setattr(os, "major", lambda _, device=device: device)
        assert read(LocalFile(str(tmp_path / "large")), 5, size) == data[5 : 5 + size]
        assert calls == expected


LARGE = DATA * (5 << 12) + b"end"  # of several direct reads, and not of full blocks


def cached_bytes(path: str) -> int:
    """Return how much of a file is cached, by mincore: a read with RWF_NOWAIT has the kernel read ahead."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        cached = memory.nbytes - untouched_bytes(memory)
        del memory  # which keeps the map open
        return cached


@pytest.fixture
def past_cache(tmp_path: Path) -> Iterator[LocalFile]:
    """A file that is not cached, read past the page cache."""
    (tmp_path / "large").write_bytes(LARGE)
    with contextlib.closing(LocalFile(str(tmp_path / "large"))) as source:
        os.fsync(source._descriptor)
        for _ in range(100):  # some pages may stay at first
            os.posix_fadvise(source._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if cached_bytes(source.path) < len(LARGE) // 8:
                break
            time.sleep(0.01)
        if not source.bypass_cache():
            pytest.skip(f"{tmp_path} cannot be read past the page cache")
        yield source


def test_large_reads_go_past_the_cache(past_cache: LocalFile) -> None:
    for offset, nbytes in (
        (0, len(LARGE)),
        (4095, 3 << 20),
        (1, MIN_DIRECT_BYTES),
        (4096, DIRECT_BYTES),
        (513, 2 << 20),
    ):
        memory = bytearray(b"\xaa" * (nbytes + 20))
        past_cache.read_into(offset, memoryview(memory)[10 : 10 + nbytes])
        assert memory == b"\xaa" * 10 + LARGE[offset : offset + nbytes] + b"\xaa" * 10, (offset, nbytes)
    assert cached_bytes(past_cache.path) < len(LARGE) // 2, "more than the ends of reads, with what is read ahead"
    assert read(past_cache, 7, 100) == LARGE[7:107], "a small read"


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ESTALE])
@pytest.mark.parametrize("at_call", [0, 1])
def test_an_error_past_the_cache_leaves_the_rest_to_an_ordinary_read(
    past_cache: LocalFile, number: int, at_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, calls = os.preadv, list[int]()

    def preadv(descriptor: int, *args: Any) -> int:
        calls.append(descriptor)
        if descriptor == past_cache._direct and calls.count(descriptor) > at_call:
            raise OSError(number, os.strerror(number))
        return ordinary(descriptor, *args)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(past_cache, 5, len(LARGE) - 5) == LARGE[5:]
    assert calls.count(past_cache._direct) == at_call + 1 and calls[-1] == past_cache._descriptor


@pytest.mark.parametrize("most", [100, 512, 4097, 1 << 20])
def test_reads_past_the_cache_may_be_short(past_cache: LocalFile, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: min(most, ordinary(*args)))
    assert read(past_cache, 4095, 1 << 20) == LARGE[4095 : 4095 + (1 << 20)]


def test_a_file_that_shrinks_is_an_error_past_the_cache_too(past_cache: LocalFile) -> None:
    os.truncate(past_cache.path, (3 << 20) + 7)
    with pytest.raises(TruncatedFileError, match=rf"ended at byte {(3 << 20) + 7} "):
        read(past_cache, 5, 4 << 20)
    assert read(past_cache, 5, 2 << 20) == LARGE[5 : 5 + (2 << 20)]


@pytest.mark.parametrize("name", ["open", "preadv", "major"])
def test_what_cannot_be_read_past_the_cache_is_read_through_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system refuses it, or is not on a disk."""
    (tmp_path / "large").write_bytes(LARGE)
    with contextlib.closing(LocalFile(str(tmp_path / "large"))) as source:
        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch:
            if name == "major":
                source._is_on_disk = False
            else:
                patch.setattr(os, name, Faults(name, errno.EINVAL, 1))
            assert not source.bypass_cache()
        assert os.listdir("/proc/self/fd") == before
        assert read(source, 5, len(LARGE) - 5) == LARGE[5:]


class Faults:
    """Takes the place of a function of `os`, and fails some times before it does what it should.

    Attributes:
        descriptors: first argument of each call.
    """

    def __init__(self, name: str, number: int, times: int, before: Callable[[], None] = lambda: None) -> None:
        self.descriptors: list[Any] = []
        self._ordinary, self._number, self._times, self._before = getattr(os, name), number, times, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.descriptors.append(args[0])
        if self._times > 0:
            self._times -= 1
            self._before()
            raise OSError(self._number, os.strerror(self._number))
        return self._ordinary(*args, **kwargs)


TRANSIENT = [errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE]


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))


def read(source: LocalFile, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize("name", ["preadv", "fstat", "open"])
@pytest.mark.parametrize("number", TRANSIENT)
def test_transient_faults_are_tried_again(
    file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, number: int
) -> None:
    gc.collect()  # of tests before
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, name, Faults(name, number, times=3))
    source = LocalFile(file)
    assert read(source, 5, 100) == DATA[5:105]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"{file}: {os.strerror(number)}; trying again in 0.00 s"] * 3
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize(("number", "attempts"), [*((number, 4) for number in TRANSIENT), (errno.EACCES, 1)])
def test_errors_that_persist_are_ours(file: str, monkeypatch: pytest.MonkeyPatch, number: int, attempts: int) -> None:
    source, faults = LocalFile(file), Faults("preadv", number, times=100)
    monkeypatch.setattr(os, "preadv", faults)
    with pytest.raises(CheckpointError, match=f"data: cannot be read: {os.strerror(number)}") as caught:
        read(source, 0, 1)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(faults.descriptors) == attempts


@pytest.mark.usefixtures("no_delays")
def test_a_stale_file_is_opened_again(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor is what no longer works: only one that was opened later does."""
    source = LocalFile(file)
    source.read_no_further()
    advised: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: advised.append(args))

    def close_the_file() -> None:
        other = os.open(os.devnull, os.O_RDONLY)  # reading it gives nothing, as if the file were cut off
        os.dup2(other, faults.descriptors[-1])
        os.close(other)

    faults = Faults("preadv", errno.ESTALE, 1, close_the_file)
    monkeypatch.setattr(os, "preadv", faults)
    assert read(source, 5, 100) == DATA[5:105]
    before, after = faults.descriptors
    assert before == after, "the number stays: other threads may be reading by it"
    assert os.get_inheritable(after) is False
    assert advised == [(after, 0, 0, os.POSIX_FADV_RANDOM)], "advice is of the open file, not of its number"


@pytest.mark.usefixtures("no_delays")
def test_another_file_is_not_read_in_place_of_a_stale_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LocalFile(file)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", Faults("preadv", errno.ESTALE, 1, lambda: os.utime(file, ns=(0, 0))))
    with pytest.raises(CheckpointError, match="data: was replaced or written to while it was read; load again"):
        read(source, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_written_to_has_another_version(file: str) -> None:
    before = LocalFile(file).version
    os.utime(file, ns=(0, 0))
    changed = LocalFile(file).version
    with open(file, "ab") as opened:
        opened.write(b"x")
    assert len({before, changed, LocalFile(file).version}) == 3


# -- the open files of a load -----------------------------------------------------------------------------------------

NUM_FILES = 1500


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files a, b, c and d."""
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


def read_all(sources: OpenSources, files: Path, names: Iterable[str]) -> None:
    for name in names:
        assert read_bytes(sources.opened(str(files / name)), 0, 3) == name[:1].encode() * 3


def num_open(files: Path) -> int:
    """Return how many files of a folder this process has open; threads of other tests have others."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile: that of the listing itself
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(path.startswith(f"{files}/") for path in paths)


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


def test_threads_that_read_the_same_files(files: Path) -> None:
    sources, start = OpenSources(LocalFile), threading.Barrier(8, timeout=60)

    def work(number: int) -> None:
        start.wait()
        read_all(sources, files, "abcd"[number % 4 :] * 200)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert num_open(files) == 4
    sources.close()
    assert num_open(files) == 0


def test_a_file_that_is_opened_while_others_are_closed_is_closed_too(files: Path) -> None:
    class Slow(LocalFile):
        def close(self) -> None:
            super().close()
            if self.path.endswith("a"):  # another thread is at work meanwhile
                sources.opened(str(files / "b"))

    sources = OpenSources(Slow)
    read_all(sources, files, "ac")
    sources.close()
    assert num_open(files) == 0


def test_a_file_that_cannot_be_opened_may_be_there_later(files: Path) -> None:
    sources = OpenSources(LocalFile)
    with pytest.raises(CheckpointError, match="late: cannot be read"):
        sources.opened(str(files / "late"))
    (files / "late").write_bytes(b"lll")
    read_all(sources, files, ["late"])
    sources.close()


def test_more_files_than_a_process_may_open_are_an_error_that_says_what_to_do(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError, match=r"a: cannot be read: Too many open files; raise the limit"):
        LocalFile(str(files / "a"))
