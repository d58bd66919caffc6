"""Hashes of whole sources, against hashlib, sha256sum and git."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.io.checksums import GIT, SHA256
from lowmem_load.io.source import LocalFile
from lowmem_load.pipeline.verify_checkpoint import CHUNK_BYTES, hash_source


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5])
def test_hashes_are_those_of_the_tools(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(nbytes).randbytes(nbytes))
    source = LocalFile(str(path))
    assert hash_source(source, SHA256) == hashlib.sha256(path.read_bytes()).hexdigest()
    of_git = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True)
    assert hash_source(source, GIT) == of_git.stdout.strip()
    source.close()


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))

    class Changing(LocalFile):
        def read_into(self, offset: int, memory: memoryview) -> None:
            super().read_into(offset, memory)
            os.utime(path, ns=(1, 1))

    source = Changing(str(path))
    with pytest.raises(CheckpointError, match="was replaced or written to while it was hashed"):
        hash_source(source, SHA256)
    source.close()
