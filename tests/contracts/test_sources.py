"""Every byte source passes the shipped contract; and what local files alone can get wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.io.source import ByteSource, LocalFile
from tests.kits.memory import MemorySource
from tests.kits.source import SourceContract


class TestLocalFile(SourceContract):
    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def put(self, name: str, data: bytes) -> str:
        (self.folder / "incoming").write_bytes(data)
        os.replace(self.folder / "incoming", self.folder / name)  # as huggingface_hub does
        return str(self.folder / name)

    def open(self, path: str) -> ByteSource:
        return LocalFile(path)


class TestMemorySource(SourceContract):
    @pytest.fixture(autouse=True)
    def empty(self) -> None:
        self.stored: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> str:
        self.stored[name] = data
        return name

    def open(self, path: str) -> ByteSource:
        if path not in self.stored:
            raise CheckpointError(f"{path}: is not there")
        return MemorySource(path, self.stored[path])
