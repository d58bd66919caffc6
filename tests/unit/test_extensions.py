"""One process at a time builds an extension, and a build that was killed does not keep the next one waiting."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from lowmem_load.ds import extensions
from lowmem_load.ds.extensions import ABANDONED_S, OUR_LOCK, load_op
from lowmem_load.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")

BUILD = """
import ctypes, logging, sys
from torch.utils.cpp_extension import load
from lowmem_load.ds.extensions import load_op

class Tiny:
    name, _loaded_ops = "tiny", {}

    def load(self, verbose):
        load("tiny", [sys.argv[1]], is_python_module=False)

logging.basicConfig()
load_op(Tiny())
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

    def killed_in_the_middle(self, kill: Callable[[int, int], None]) -> None:
        build = self.build()
        wait_for((self.root / "started").exists)
        kill(build.pid, signal.SIGKILL)
        build.communicate()
        assert (self.folder / "lock").exists()


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    yield Workplace(tmp_path)
    (tmp_path / "go").touch()  # whatever compiler is still there ends


@needs_compiler
def test_a_build_that_was_killed_is_done_again_at_once(workplace: Workplace) -> None:
    workplace.killed_in_the_middle(os.killpg)
    (workplace.root / "go").touch()
    out, log = workplace.build().communicate(timeout=60)
    assert out == "42\n", log
    assert f"{workplace.folder}/lock: was left by a build that was killed; removed" in log
    assert (workplace.folder / OUR_LOCK).stat().st_size == 0
    _, log = workplace.build().communicate(timeout=60)
    assert "lock" not in log


@needs_compiler
def test_compilers_that_a_killed_build_has_left_are_waited_for(workplace: Workplace) -> None:
    workplace.killed_in_the_middle(os.kill)
    build = workplace.build()
    assert build.stderr is not None and build.stdout is not None
    assert "which a build that was killed has left" in build.stderr.readline()
    (workplace.root / "go").touch()
    assert "removed" in build.stderr.readline()
    assert build.communicate(timeout=60)[0] == "42\n"


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


def test_a_live_build_is_waited_for_however_long_it_takes(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "ABANDONED_S", -1.0)
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    loading = Loading()
    wait_for(lambda: f"waiting for the build of process {os.getpid()}" in caplog.text)
    loading.join(3 * extensions.POLL_S)
    assert loading.is_alive() and (folder / "lock").exists()
    baton.release()
    loading.join(60)
    assert loading.found == "loaded"
    assert "removed" not in caplog.text


def test_an_unseen_build_is_waited_for_until_nothing_changes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "lock").touch()
    loading = Loading()
    wait_for(lambda: "waiting for a build of no process here" in caplog.text)
    loading.join(3 * extensions.POLL_S)
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


def test_a_build_that_fails_leaves_no_mark(folder: Path) -> None:
    def load() -> None:
        assert (folder / OUR_LOCK).stat().st_size > 0
        raise RuntimeError("no libaio")

    with pytest.raises(RuntimeError, match="no libaio"):
        load_op(op(load))
    assert (folder / OUR_LOCK).stat().st_size == 0


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


def test_a_folder_that_cannot_be_locked_is_built_in(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / OUR_LOCK).mkdir()
    with caplog.at_level(logging.WARNING):
        assert load_op(op()) == "loaded"
    assert f"{folder}: cannot be locked" in caplog.text


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
    monkeypatch.setattr(os, "access", lambda *_: False)
    message = rf"{folder}: .* cannot be written \(Read-only file system\); set TORCH_EXTENSIONS_DIR to a folder"
    with pytest.raises(ConfigError, match=message):
        load_op(op())
