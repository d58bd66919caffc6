"""Every byte source passes the shipped contract; and what local files alone can get wrong."""

import os
from pathlib import Path

import pytest

from lowmem_load.files.source import ByteSource, LocalFile
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
