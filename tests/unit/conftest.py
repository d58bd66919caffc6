"""A file on a server that is an HTTP server and, as the environment says, S3."""

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.range_server import RangeServer, range_server

S3 = {
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "access-key",
    "AWS_SECRET_ACCESS_KEY": "secret-key",
    "AWS_SESSION_TOKEN": "session-token",
}


@contextlib.contextmanager
def memory_below(nbytes: int) -> Iterator[None]:
    """Fail if Python's objects take as much memory inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def stored_file(tmp_path: Path) -> Path:
    """A file of a MiB: s3://bucket/models/one/model.safetensors."""
    path = tmp_path / "bucket" / "models" / "one" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(1 << 20))
    return path


@pytest.fixture
def store(stored_file: Path, monkeypatch: pytest.MonkeyPatch, quick_requests: None) -> Iterator[RangeServer]:
    """The server that has it, and whose answers can be made to fail."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    with range_server({"bucket": stored_file.parents[2]}) as server:
        for name, value in {**S3, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        yield server
