"""The file with the replicated part: what is written comes back, and what cannot be used is refused by name."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.partial.partial_checkpoint import (
    FORMAT,
    REPLICATED_FILE,
    load_replicated,
    save_replicated,
)


@dataclasses.dataclass
class OwnState:
    step: int


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tag"
    weight = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    save_replicated(str(folder), {"module": {"w": weight}, "betas": (0.9, 0.95), "steps": [1, None]})
    state = load_replicated(str(folder))
    assert torch.equal(state.pop("module")["w"], weight)
    assert state == {"format": FORMAT, "betas": (0.9, 0.95), "steps": [1, None]}
    assert [file.name for file in folder.iterdir()] == [REPLICATED_FILE]


def test_numbers_of_numpy_become_pythons_wherever_they_are(tmp_path: Path) -> None:
    state = {"lrs": [np.float64(0.5), np.float32(0.25)], "pair": (np.int64(3), {np.int64(7): np.bool_(True)})}
    save_replicated(str(tmp_path), state)
    found = load_replicated(str(tmp_path))
    assert found == {"format": FORMAT, "lrs": [0.5, 0.25], "pair": (3, {7: True})}
    assert [type(value) for value in (*found["lrs"], found["pair"][0])] == [float, float, int]
    assert found["pair"][1][7] is True


def test_a_state_that_could_not_be_loaded_leaves_the_file_before_as_it_was(tmp_path: Path) -> None:
    save_replicated(str(tmp_path), {"step": 1})
    with pytest.raises(CheckpointError, match=rf"(?s){REPLICATED_FILE}: cannot be written .*OwnState"):
        save_replicated(str(tmp_path), {"step": OwnState(2)})
    assert load_replicated(str(tmp_path))["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == [REPLICATED_FILE]


def test_a_disk_that_is_full_is_named_and_nothing_is_left_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_: object, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match=f"{REPLICATED_FILE}: cannot be written .*No space left on device"):
        save_replicated(str(tmp_path), {"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no {REPLICATED_FILE}"):
        load_replicated(str(tmp_path))


@pytest.mark.parametrize("kept", [0, 10, 500])
def test_a_damaged_file_is_refused(kept: int, tmp_path: Path) -> None:
    save_replicated(str(tmp_path), {"w": torch.ones(300)})
    path = tmp_path / REPLICATED_FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{REPLICATED_FILE}: cannot be read"):
        load_replicated(str(tmp_path))


@pytest.mark.parametrize("state", [{"format": FORMAT + 1}, {"step": 1}, [FORMAT]])
def test_another_format_is_refused(state: object, tmp_path: Path) -> None:
    torch.save(state, tmp_path / REPLICATED_FILE)
    with pytest.raises(CheckpointError, match=f"{REPLICATED_FILE}: not of format {FORMAT}"):
        load_replicated(str(tmp_path))
