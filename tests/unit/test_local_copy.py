"""Copies on a disk of the node: what is read there, and what is read from the store."""

import errno
import logging
import os
import tempfile
from pathlib import Path

import pytest

from lowmem_load import ConfigError, load_model
from lowmem_load.files.local_copy import LocalCopies
from lowmem_load.files.remote_checkpoint import folder_of_url
from lowmem_load.files.source import LocalFile, read_bytes
from tests import builders
from tests.remote.range_server import RangeServer

URL = "s3://bucket/models/one"
READS = ((0, 1000), (100_000, 300_000), (250_000, 500_000))
"""The first one is of what the stand-in has."""


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "copies"


def read(copies: Path, stored_file: Path, *more: tuple[int, int]) -> None:
    """Reads as a load does, and compares."""
    source = LocalCopies(str(copies)).open(f"{folder_of_url(URL)}/model.safetensors")
    content = stored_file.read_bytes()
    for offset, nbytes in (*READS, *more):
        assert read_bytes(source, offset, nbytes) == content[offset : offset + nbytes]
    source.close()


def sent(store: RangeServer, copies: Path, stored_file: Path, *more: tuple[int, int]) -> int:
    """How many bytes come from the store for the reads."""
    folder_of_url(URL)
    store.reset()
    read(copies, stored_file, *more)
    return store.stats()["bytes_sent"]


def copied(copies: Path) -> list[Path]:
    """The copies, and their lists."""
    return sorted(path for path in copies.rglob("*") if path.is_file())


def test_the_same_reads_are_made_in_the_copy(store: RangeServer, stored_file: Path, copies: Path) -> None:
    assert sent(store, copies, stored_file) == 800_000
    assert sent(store, copies, stored_file) == 0
    assert sent(store, copies, stored_file, (100_000, 299_999)) == 299_999  # another read of the same bytes
    assert sent(store, copies, stored_file, (100_000, 299_999)) == 0
    copy, _ = copied(copies)
    assert copy.stat().st_size == 750_000
    assert copy.stat().st_mode & 0o077 == 0
    (stored_file.parent / "config.json").write_text("{}")
    assert isinstance(LocalCopies(str(copies)).open(f"{folder_of_url(URL)}/config.json"), LocalFile)


def test_an_object_that_was_replaced_is_read_again(store: RangeServer, stored_file: Path, copies: Path) -> None:
    read(copies, stored_file)
    former = copied(copies)
    stored_file.write_bytes(os.urandom(1 << 20))
    assert sent(store, copies, stored_file) == 800_000
    assert len(copied(copies)) == 2
    assert not {*copied(copies)} & {*former}
    assert sent(store, copies, stored_file) == 0


def test_what_was_lost_is_read_again(store: RangeServer, stored_file: Path, copies: Path) -> None:
    """As after a kill between two writes, a crash before the disk has it all, or a list that another disk cut."""
    read(copies, stored_file)
    copy, entries = copied(copies)
    with copy.open("r+b") as file:
        file.seek(200_000)
        file.write(bytes(4096))
    assert sent(store, copies, stored_file) == 300_000  # of the two reads that overlap, the other one is whole
    assert sent(store, copies, stored_file) == 0
    os.truncate(copy, 600_000)
    assert sent(store, copies, stored_file) == 500_000
    lines = entries.read_bytes()
    entries.write_bytes(lines[: lines.index(b"\n250000 ") + 4])
    assert sent(store, copies, stored_file) == 500_000
    assert sent(store, copies, stored_file) == 0  # after a line that was cut, the next ones can be read
    copy.unlink()
    assert sent(store, copies, stored_file) == 800_000
    assert sent(store, copies, stored_file) == 0


def test_a_full_disk_is_one_warning(
    store: RangeServer,
    stored_file: Path,
    copies: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read(copies, stored_file)
    stored_file.write_bytes(os.urandom(1 << 20))

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches, caplog.at_level(logging.WARNING):
        patches.setattr(os, "pwrite", fail)
        assert sent(store, copies, stored_file) == 800_000
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith(f"{copies}: copies cannot be written there") and "No space left" in text
    assert copied(copies) == []


def test_a_folder_that_cannot_be_made_is_one_warning(
    store: RangeServer, stored_file: Path, copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies.write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert sent(store, copies, stored_file) == 800_000
    assert len(caplog.records) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_copies_of_another_user_are_neither_read_nor_removed(
    store: RangeServer, stored_file: Path, copies: Path
) -> None:
    assert sent(store, copies, stored_file) == 800_000
    before = copied(copies)
    os.chown(before[0].parent, 12345, -1)
    assert sent(store, copies, stored_file) == 800_000
    assert copied(copies) == before


@pytest.mark.parametrize(
    ("folder", "shown"), [("", ""), ("https://user:secret@host/copies?sig=secret", "https://host/copies")]
)
def test_what_is_not_a_local_folder_is_refused(folder: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"local_copy: expected a folder on a disk of the node, got '{shown}'"):
        load_model(URL, {}, local_copy=folder)


def test_a_local_folder_needs_no_copy(checkpoints: Path, copies: Path) -> None:
    path = builders.tiny_llama(checkpoints)
    with pytest.raises(ConfigError, match=f"{path}: is not read from a store, so remove local_copy"):
        load_model(path, {"zero_optimization": {"stage": 0}, "train_batch_size": 1}, local_copy=copies)
    assert not copies.exists()


def test_training_checkpoints_are_not_copied(copies: Path) -> None:
    for checkpoint in ("s3://bucket/run", "run"):
        with pytest.raises(ConfigError, match="local_copy: is for the files of a model, not of a training checkpoint"):
            load_model(URL, {}, local_copy=copies, weights_from=checkpoint)
