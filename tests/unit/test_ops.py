"""One process at a time builds an extension, and a build that was killed does not keep the next one waiting."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils import cpp_extension

from lowmem_load.ds.ops import ABANDONED_S, OUR_LOCK, POLL_S, load_op
from lowmem_load.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")

BUILD = """
import ctypes, logging, sys
from torch.utils.cpp_extension import load
from lowmem_load.ds import ops

class Tiny:
    name, _loaded_ops = "tiny", {}

    def load(self, verbose):
        load("tiny", [sys.argv[1]], is_python_module=False)

logging.basicConfig()
ops.ABANDONED_S = 1.0
ops.load_op(Tiny())
print(ctypes.CDLL(sys.argv[2]).answer())
"""

# Starts to compile at once, and ends when it is told to: until then the build is in the middle.
COMPILER = """#!/bin/sh
touch "$WORKPLACE/started"
while [ ! -e "$WORKPLACE/go" ]; do sleep 0.05; done
exec c++ "$@"
"""


class Workplace:
    """A folder with a source, a slow compiler, and the folder that the build goes to."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "extensions" / "tiny"
        (root / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
        (root / "compiler").write_text(COMPILER)
        (root / "compiler").chmod(0o755)

    def build(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, str(self.root / "tiny.cpp"), str(self.folder / "tiny.so")],
            env={
                **os.environ,
                "CXX": str(self.root / "compiler"),
                "PYTHONPATH": str(REPO),
                "TORCH_DONT_CHECK_COMPILER_ABI": "1",
                "TORCH_EXTENSIONS_DIR": str(self.folder.parent),
                "WORKPLACE": str(self.root),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_compiler
@pytest.mark.release  # three processes that import all, in turn; the next test has the same without a compiler
def test_a_build_that_was_killed_is_done_again(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    killed = workplace.build()
    wait_for((workplace.root / "started").exists)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert (workplace.folder / "lock").exists()
    (workplace.root / "go").touch()
    out, log = workplace.build().communicate(timeout=60)
    assert out == "42\n", log
    assert f"{workplace.folder}/lock: was left by a build that was killed; removed" in log
    _, log = workplace.build().communicate(timeout=60)
    assert "lock" not in log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "op").mkdir()
    return tmp_path / "op"


def op(load: Callable[[], object] = lambda: "loaded", **attributes: Any) -> Any:
    return SimpleNamespace(**{"name": "op", "_loaded_ops": {}, "load": lambda verbose: load(), **attributes})


class Loading(threading.Thread):
    """Loads an op meanwhile."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: object = None
        self.start()

    def run(self) -> None:
        self.found = load_op(op())


def test_a_build_is_waited_for_until_nothing_changes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "lock").touch()
    loading = Loading()
    wait_for(lambda: "waiting for the build that made it" in caplog.text)
    loading.join(3 * POLL_S)
    assert loading.is_alive() and (folder / "lock").exists()
    past = time.time() - ABANDONED_S - 1
    os.utime(folder / "lock", (past, past))
    loading.join(60)
    assert loading.found == "loaded" and not (folder / "lock").exists()
    assert "lock: was left by a build that was killed; removed" in caplog.text


def test_one_builds_at_a_time(folder: Path) -> None:
    building, most = 0, 0

    def load() -> None:
        nonlocal building, most
        building += 1
        most = max(most, building)
        time.sleep(0.05)
        building -= 1

    threads = [threading.Thread(target=load_op, args=(op(load),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (building, most) == (0, 1)


@pytest.mark.parametrize("loaded", [True, False])
def test_what_needs_no_build_waits_for_nobody(folder: Path, loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lock").touch()
    if loaded:
        assert load_op(op(_loaded_ops={"op": "loaded"})) == "loaded"
    else:
        from deepspeed import git_version_info
        from deepspeed.accelerator import get_accelerator

        monkeypatch.setitem(git_version_info.installed_ops, "op", True)
        monkeypatch.setattr(git_version_info, "accelerator_name", get_accelerator().device_name())
        assert load_op(op()) == "loaded"
    assert sorted(entry.name for entry in folder.iterdir()) == ["lock"]


def test_a_folder_that_cannot_be_locked_is_built_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert load_op(op()) == "loaded"


def test_a_lock_of_another_user_is_passed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may open it, so the answer is given by hand."""
    ordinary = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith(OUR_LOCK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return ordinary(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert load_op(op()) == "loaded"
    assert f"{OUR_LOCK}: cannot be opened (Permission denied)" in caplog.text


def test_a_lock_that_the_kernel_frees_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.15 stays after every build."""
    lock = folder / "lock"
    lock.touch()
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    loading = Loading()
    loading.join(10)
    assert loading.found == "loaded"
    assert lock.exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Root may write in any folder, so the answers of a read-only file system are given by hand."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "op"
    if is_there:
        folder.mkdir()

    def refuse(path: Any, *_: Any, **__: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "makedirs", refuse)
    message = rf"{folder}.*: .* cannot be written \(Read-only file system\); set TORCH_EXTENSIONS_DIR to a folder"
    with pytest.raises(ConfigError, match=message):
        load_op(op())
