"""Local files as byte sources, beyond tests/contracts/test_sources.py; and any source as a file object."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.read.source import LocalFile, SourceFile, read_bytes
from lowmem_load.testing.memory import MemorySource

DATA = bytes(range(256))


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "data").write_bytes(DATA)
    return str(tmp_path / "data")


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


def test_it_holds_one_descriptor_until_it_is_closed(file: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    source = LocalFile(file)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(CheckpointError, match="Bad file descriptor"):
        source.read_into(0, [memoryview(bytearray(1))])


def test_the_system_may_return_less_than_was_asked_for(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, or beyond 2 GiB: here it gives 7 bytes at a time."""

    def some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return ordinary(descriptor, [buffers[0][:7]], offset)

    ordinary = os.preadv
    monkeypatch.setattr(os, "preadv", some)
    buffers = [bytearray(size) for size in (3, 0, 20, 7, 100)]
    LocalFile(file).read_into(5, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == DATA[5:135]


def test_errors_of_the_system_are_ours(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = LocalFile(file)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="data: cannot be read: Input/output error") as caught:
        source.read_into(0, [memoryview(bytearray(1))])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_that_shrinks_says_where_it_ended(file: str) -> None:
    source = LocalFile(file)
    os.truncate(file, 100)
    with pytest.raises(TruncatedFileError, match=r"data: ended at byte 100 \(20 bytes short\)"):
        source.read_into(90, [memoryview(bytearray(10)), memoryview(bytearray(20))])


def test_a_file_that_is_written_to_has_another_version(file: str) -> None:
    before = LocalFile(file).version
    os.utime(file, ns=(0, 0))
    changed = LocalFile(file).version
    with open(file, "ab") as opened:
        opened.write(b"x")
    assert len({before, changed, LocalFile(file).version}) == 3


def test_read_bytes_ends_with_the_source(file: str) -> None:
    source = LocalFile(file)
    assert read_bytes(source, 250, 100) == DATA[250:]
    assert read_bytes(source, 0, 3) == DATA[:3]
    assert read_bytes(source, 256, 3) == read_bytes(source, 1000, 3) == b""


def test_a_source_is_a_file_to_zipfile(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zip", "w") as written:
        written.writestr("a/b", b"content")
    source = LocalFile(str(tmp_path / "zip"))
    with zipfile.ZipFile(SourceFile(source)) as opened:
        assert {name: opened.read(name) for name in opened.namelist()} == {"a/b": b"content"}


def test_positions_are_those_of_a_file() -> None:
    file = SourceFile(MemorySource("x", DATA))
    assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    assert file.read(3) == DATA[:3]
    assert (file.seek(10), file.read(2), file.tell()) == (10, DATA[10:12], 12)
    assert (file.seek(-2, os.SEEK_CUR), file.seek(-6, os.SEEK_END)) == (10, 250)
    assert (file.read(100), file.read(1)) == (DATA[250:], b"")
    assert (file.seek(300), file.read(1)) == (300, b""), "beyond the end"
    with pytest.raises(ValueError, match="x: byte -1 lies before the file"):
        file.seek(-1)
