"""Loads of DeepSpeed's ops: a lock of another build is named, and so is a folder that cannot be written."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_load.engines import ops
from lowmem_load.engines.ops import load_op, old_locks
from lowmem_load.errors import ConfigError


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(ops, "PATIENCE_S", 0.0)
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    return tmp_path / "op" / "lock"


def op(load: Callable[[], object] = lambda: "loaded", **attributes: Any) -> Any:
    return SimpleNamespace(**{"name": "op", "_loaded_ops": {}, "load": lambda verbose: load(), **attributes})


def test_the_lock_of_a_build_is_named(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But not of an op that is loaded."""
    assert load_op(op(_loaded_ops={"op": "loaded"})) == "loaded" and not caplog.text
    os.utime(lock, (time.time() - 7200,) * 2)
    assert load_op(op()) == "loaded"
    assert f"{lock}: is 120 minutes old. torch waits silently" in caplog.text
    assert [text.partition(":")[0] for text in old_locks()] == [str(lock)]


def test_a_build_that_ends_is_no_news(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ops, "PATIENCE_S", 30.0)
    assert not old_locks()
    Timer(0.3, lock.unlink).start()
    assert load_op(op()) == "loaded" and not caplog.text and not lock.exists()


def test_a_folder_that_cannot_be_written_is_named(lock: Path) -> None:
    """Root may write in any folder, so the answer of a read-only file system is given by hand."""

    def refuse() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(lock))

    message = rf"{lock}: .* cannot be written \(Read-only file system\); set TORCH_EXTENSIONS_DIR to a folder"
    with pytest.raises(ConfigError, match=message):
        load_op(op(refuse))
