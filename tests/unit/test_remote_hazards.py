"""What a review found in reads from remote stores: forked processes, trickling servers, folders that were cleaned."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io import http_files, object_store, remote_checkpoint, remote_file
from lowmem_load.io.executor import Tasks
from lowmem_load.io.http_files import HttpObject
from lowmem_load.io.remote_checkpoint import folder_of_url
from lowmem_load.io.remote_file import RemoteFile, TransientError, retry
from lowmem_load.io.source import read_bytes
from lowmem_load.io.stand_ins import open_file
from tests.remote.range_server import range_server
from tests.unit.test_remote_checkpoint import write_checkpoint


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def forked(act: Callable[[], bool]) -> int:
    """Returns the number of a forked process that does something."""
    child = os.fork()
    if child == 0:
        os._exit(0 if act() else 1)
    return child


def is_good(child: int, timeout_s: float = 60) -> bool:
    """Returns what a forked process found."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def in_child(act: Callable[[], bool], timeout_s: float = 60) -> bool:
    return is_good(forked(act), timeout_s)


def test_a_forked_process_has_connections_of_its_own(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * (4 << 20))
    with range_server(tmp_path) as server:
        found = open_items(server.url, files)
        read_bytes(found[0], 0, 8)  # so that the parent has a connection

        def reads(number: int) -> bool:
            parts = (read_bytes(found[number], at, 4096) for at in range(0, 4 << 20, 1 << 16))
            return all(part == bytes([number]) * 4096 for part in parts)

        children = [forked(lambda: reads(0)), forked(lambda: reads(1))]
        assert reads(0)
        assert list(map(is_good, children)) == [True, True]


def open_items(url: str, files: list[Path]) -> list[RemoteFile]:
    import urllib.request

    found = []
    for file in files:
        with urllib.request.urlopen(f"{url}/{file.name}") as answer:
            found.append(RemoteFile(HttpObject(f"{url}/{file.name}", file.stat().st_size, answer.headers["ETag"])))
    return found


def test_a_process_forked_while_a_request_waits_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with range_server(tmp_path) as server:
        (found,) = open_items(server.url, [tmp_path / "a"])
        server.set(latency_ms=2000)
        waiting = threading.Thread(target=lambda: read_bytes(found, 0, 8))
        waiting.start()
        time.sleep(0.3)
        assert in_child(lambda: True, timeout_s=5)
        waiting.join()


def test_a_process_forked_from_one_that_used_obstore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    with range_server({"bucket": Path(tempfile.gettempdir())}) as server:
        for name, value in {"ENDPOINT_URL": server.url, "REGION": "x", "ACCESS_KEY_ID": "k"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        with pytest.raises(CheckpointError):
            folder_of_url("s3://bucket/nothing")

    def is_refused() -> bool:
        with pytest.raises(ConfigError, match="start it by spawn"):
            object_store.list_files("s3://bucket/nothing", "")
        return True

    assert in_child(is_refused)


def test_patience_begins_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "PATIENCE_S", 0.5)
    errors = [TransientError("once")]

    def slow() -> str:
        time.sleep(0.7)
        if errors:
            raise errors.pop()
        return "there"

    assert retry(slow, "it cannot be read") == "there"


@pytest.fixture
def trickling() -> Iterator[str]:
    """A server that sends a byte every 50 ms."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            head = "206 Partial Content\r\nContent-Length: 100000\r\nContent-Range: bytes 0-99999/100000"
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(65536)
                        connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode())
                        for _ in range(400):
                            connection.sendall(b"x")
                            time.sleep(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_server_that_trickles_is_not_waited_for(trickling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_files, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_files, "LEAST_BYTES_PER_S", 1 << 20)
    monkeypatch.setattr(remote_file, "PATIENCE_S", 0.1)
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"sent only \d+ bytes of 100000 in time"):
        read_bytes(RemoteFile(HttpObject(trickling, 100_000, '"1"')), 0, 100_000)
    assert time.monotonic() - start_s < 3


def test_closing_ends_a_trickle(trickling: str) -> None:
    file = RemoteFile(HttpObject(trickling, 100_000, '"1"'))
    threading.Timer(0.5, file.close).start()
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match="was closed"):
        read_bytes(file, 0, 100_000)
    assert time.monotonic() - start_s < 2


def test_finding_files_ends_when_another_rank_fails(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one")
    until_s = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > until_s:
            raise KeyboardInterrupt

    with range_server(tmp_path / "one", error_503=1.0) as server:
        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            folder_of_url(server.url, check=check)
        assert time.monotonic() - start_s < 3


def test_a_folder_that_was_cleaned_is_filled_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one")
    with range_server(tmp_path / "one") as server:
        folder = Path(folder_of_url(server.url))
        for broken in ("config.json", "model-0.safetensors"):
            (folder / broken).unlink()
            assert folder_of_url(server.url) == str(folder)
        (folder / "config.json").write_bytes(b"")
        assert folder_of_url(server.url) == str(folder)
        assert (folder / "config.json").read_bytes() == (tmp_path / "one" / "config.json").read_bytes()
        shutil.rmtree(folder)
        folder_of_url(server.url)
        whole = (tmp_path / "one" / "model-1.safetensors").read_bytes()
        assert read_bytes(open_file(str(folder / "model-1.safetensors")), 0, len(whole)) == whole


def test_a_checkpoint_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_checkpoint, "MAX_FILES", 3)
    write_checkpoint(tmp_path / "one", num_shards=4)
    with range_server(tmp_path / "one") as server, pytest.raises(CheckpointError, match="names 4 files, expected at"):
        folder_of_url(server.url)


def test_code_that_code_imports_is_fetched(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one")
    (tmp_path / "one" / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.X"}}')
    (tmp_path / "one" / "modeling_x.py").write_text("from .layers_x import Layer\n")
    (tmp_path / "one" / "layers_x.py").write_text("from .modeling_x import X\n")
    with range_server(tmp_path / "one") as server:
        folder = Path(folder_of_url(server.url))
    assert {path.name for path in folder.glob("*.py")} == {"modeling_x.py", "layers_x.py"}


def test_threads_that_start_late_are_as_many_as_asked_for() -> None:
    tasks, at_a_time, most = Tasks(4, starts_late=True), [0], [0]
    lock, all_there = threading.Lock(), threading.Barrier(4)

    def task() -> None:
        with lock:
            at_a_time[0] += 1
            most[0] = max(most[0], at_a_time[0])
        all_there.wait(5)
        with lock:
            at_a_time[0] -= 1

    tasks.have_threads(1)  # as a computed value does
    for _ in range(4):
        tasks.run(task)
    tasks.finish()
    tasks.close()
    assert most[0] == 4
