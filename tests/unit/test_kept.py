"""Files of a cache: what was written comes back, and nothing else does."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.formats import kept
from lowmem_load.formats.kept import MAGIC, read_kept, write_kept

KEY, CONTENT = bytes(range(32)), b"what was found out" * 100


def test_what_was_written_comes_back_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    assert read_kept(str(path), KEY) is None
    for content in (b"", CONTENT):
        write_kept(str(path), KEY, content)
        assert read_kept(str(path), KEY) == content
    assert os.listdir(path.parent) == ["file"]


def test_a_file_that_was_cut_or_changed_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_kept(str(path), KEY, b"content")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"file: is (no file of this cache|damaged)"):
            read_kept(str(path), KEY)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"file: is (no file of this cache|damaged)"):
            read_kept(str(path), KEY)


def test_what_was_kept_for_another_key_is_refused(tmp_path: Path) -> None:
    write_kept(str(tmp_path / "file"), KEY[::-1], CONTENT)
    with pytest.raises(CheckpointError, match="was kept for something else"):
        read_kept(str(tmp_path / "file"), KEY)


def test_what_is_no_file_or_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: is no file"):
        read_kept(str(tmp_path / "pipe"), KEY)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_kept(str(tmp_path), KEY)
    monkeypatch.setattr(kept, "MAX_NBYTES", 200)
    rest = KEY + bytes(200)
    (tmp_path / "large").write_bytes(MAGIC + hashlib.sha256(rest).digest() + rest)
    with pytest.raises(CheckpointError, match="large: has 280 bytes, more than 200"):
        read_kept(str(tmp_path / "large"), KEY)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_kept(str(tmp_path / "taken"), KEY, CONTENT)
    assert os.listdir(tmp_path) == ["taken"]
