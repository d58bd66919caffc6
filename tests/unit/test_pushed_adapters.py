"""The folder in memory through which an engine gets an adapter."""

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.weights_out import push_weights as adapters


def hold(connection: Any) -> None:
    folder = adapters._shared_folder()
    connection.send(folder.name)
    connection.recv()


def test_what_a_killed_process_left_is_removed_and_what_another_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_SHARED_MEMORY", tmp_path)
    context = multiprocessing.get_context("fork")
    folders, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=hold, args=(theirs,)))
        processes[-1].start()
        folders.append(Path(ours.recv()))
    (folders[0] / "adapter_model.safetensors").write_bytes(b"weights")
    processes[0].kill()
    processes[0].join()
    assert processes[0].exitcode == -signal.SIGKILL and all(folder.is_dir() for folder in folders)
    made = adapters._shared_folder.__wrapped__()
    assert set(tmp_path.iterdir()) == {folders[1], Path(made.name)}
    made.cleanup()
    processes[1].kill()
    processes[1].join()
