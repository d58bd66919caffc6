"""GPUDirect Storage against a stand-in with kvikio's signatures: there is no such hardware here."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

from lowmem_load.errors import CheckpointError, ConfigError, TruncatedFileError
from lowmem_load.read.gds import VARIABLE, GdsFile, chosen_source
from lowmem_load.read.source import ByteSource, LocalFile
from tests.kits.source import SourceContract
from tests.kvikio import CuFile, stand_in

DATA = bytes(range(256)) * 64


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = stand_in()
    monkeypatch.setitem(sys.modules, "kvikio", made)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", made.cufile_driver)
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "OFF")
    return made


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "data").write_bytes(DATA)
    return str(tmp_path / "data")


@pytest.mark.usefixtures("kvikio")
class TestGdsFile(SourceContract):
    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def put(self, name: str, data: bytes) -> str:
        (self.folder / "incoming").write_bytes(data)
        os.replace(self.folder / "incoming", self.folder / name)
        return str(self.folder / name)

    def open(self, path: str) -> ByteSource:
        return GdsFile(path)


@pytest.mark.usefixtures("kvikio")
def test_memory_is_filled_from_any_byte_on(path: str) -> None:
    source = GdsFile(path)
    for offset, nbytes in ((0, len(DATA)), (4095, 2), (777, 5000), (len(DATA) - 1, 1), (5, 0)):
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        source.read_to_device(offset, memory)
        assert bytes(memory.tolist()) == DATA[offset : offset + nbytes]
    with pytest.raises(TruncatedFileError, match=rf"data: ended at byte {len(DATA)} \(7 bytes short\)"):
        source.read_to_device(len(DATA) - 3, torch.zeros(10, dtype=torch.uint8))
    source.close()
    assert CuFile.num_open == 0


def test_errors_of_kvikio_are_checkpoint_errors(
    kvikio: types.ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cuFile error")

    source = GdsFile(path)
    monkeypatch.setattr(CuFile, "pread", fail)
    with pytest.raises(CheckpointError, match="data: cannot be read by GPUDirect Storage: cuFile error"):
        source.read_to_device(0, torch.zeros(1, dtype=torch.uint8))
    source.close()
    monkeypatch.setattr(kvikio, "CuFile", fail)
    with pytest.raises(CheckpointError, match="data: cannot be opened for GPUDirect Storage: cuFile error"):
        GdsFile(path)


def test_another_file_of_the_name_is_not_read(
    kvikio: types.ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(name: str, flags: str = "r") -> CuFile:
        Path(name).unlink()
        Path(name).write_bytes(DATA)
        return CuFile(name, flags)

    monkeypatch.setattr(kvikio, "CuFile", replaced)
    with pytest.raises(CheckpointError, match="data: was replaced while it was opened"):
        GdsFile(path)
    assert CuFile.num_open == 0


def test_it_is_used_where_it_is_asked_for_only(kvikio: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_source() is LocalFile
    monkeypatch.setenv(VARIABLE, "1")
    assert chosen_source() is GdsFile
    assert kvikio.cufile_driver.opened == [1]


def test_what_is_asked_for_and_not_there_is_an_error(kvikio: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ConfigError, match=f"{VARIABLE}: the environment has 'yes', expected 0 or 1"):
        chosen_source()
    monkeypatch.setenv(VARIABLE, "1")

    def initialize() -> None:
        raise RuntimeError("cuFile isn't available")

    monkeypatch.setattr(kvikio.cufile_driver, "initialize", initialize)
    with pytest.raises(ConfigError, match="no GPUDirect Storage here: RuntimeError: cuFile isn't available; install"):
        chosen_source()
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "AUTO")
    with pytest.raises(ConfigError, match="needs KVIKIO_COMPAT_MODE=OFF, set before Python starts"):
        chosen_source()
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "OFF")
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigError, match=r"no GPUDirect Storage here: .*kvikio"):
        chosen_source()
