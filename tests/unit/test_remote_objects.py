"""What holds of a file on an HTTP server and of one in an object store: faults, wrong answers, refusals, secrets."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.files.object_store import RemoteObject, list_files
from lowmem_load.files.remote_file import RemoteFile
from lowmem_load.files.source import read_bytes
from lowmem_load.text import plain_url
from tests.remote.answering import assert_no_secrets, with_login
from tests.remote.behaviour import CHANCES
from tests.remote.listing import etag
from tests.remote.range_server import RangeServer

NUM_READS = 64

MAY_PASS = [fault for fault in CHANCES if fault != "short"]


@pytest.fixture(params=["http", "s3"])
def source(request: pytest.FixtureRequest, store: RangeServer, stored_file: Path) -> RemoteFile:
    if request.param == "s3":
        source = RemoteFile(list_files("s3://bucket/models/one", "")["model.safetensors"])
    else:
        url = with_login(f"{store.url}/bucket/models/one")
        status = stored_file.stat()
        item = RemoteObject(plain_url(url), "model.safetensors", status.st_size, etag(status), secret=url)
        source = RemoteFile(item)
    store.reset()
    return source


# -- faults that may pass ----------------------------------------------------------------------------------------------


def test_bytes_are_right_although_requests_fail_in_all_ways(
    store: RangeServer, source: RemoteFile, stored_file: Path
) -> None:
    """All but an answer that is well-formed and too short, as no store gives it."""
    store.set(**dict.fromkeys(MAY_PASS, 0.05), stall_s=2)
    content = stored_file.read_bytes()
    step = len(content) // NUM_READS
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda number: read_bytes(source, number * step, step), range(NUM_READS))
        assert b"".join(parts) == content
    stats = store.stats()
    assert len(stats["faults"]) > 4
    assert stats["requests"] == NUM_READS + sum(stats["faults"].values())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", MAY_PASS)
def test_one_fault_is_waited_for_and_patience_ends_with_one_error(
    fault: str, store: RangeServer, source: RemoteFile, stored_file: Path
) -> None:
    store.set(**{fault: 1, "at_most": 1, "stall_s": 2})
    assert read_bytes(source, 0, 8) == stored_file.read_bytes()[:8]
    store.reset()
    store.set(at_most=-1)
    began_s = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        read_bytes(source, 10, 4096)  # of which each attempt may get a half
    assert time.monotonic() - began_s < 5
    assert str(caught.value).startswith(f"{source.path}: cannot be read: ")
    assert len(str(caught.value)) < 300


# -- wrong answers and refusals ----------------------------------------------------------------------------------------


def test_a_server_without_ranges_is_refused(store: RangeServer, source: RemoteFile) -> None:
    store.set(ignores_ranges=True)
    with pytest.raises(CheckpointError, match=rf"{source.path}: the .*; use a server that serves ranges"):
        read_bytes(source, 0, 8)
    assert store.stats()["requests"] == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("behaviour", [{"shifts": 1}, {"adds": 64 << 20}])
def test_other_ranges_and_longer_bodies_are_refused(
    behaviour: dict[str, int], store: RangeServer, source: RemoteFile, stored_file: Path
) -> None:
    store.set(**behaviour)
    with pytest.raises(CheckpointError, match=source.path):
        read_bytes(source, 8, 4)
    store.set(shifts=0, adds=0)
    assert read_bytes(source, 8, 4) == stored_file.read_bytes()[8:12]


@pytest.mark.parametrize(("behaviour", "status"), [({"gone": True, "repeats": True}, 403), ({"token": "another"}, 401)])
def test_who_may_not_read_is_told_at_once(
    behaviour: dict[str, Any], status: int, store: RangeServer, source: RemoteFile
) -> None:
    store.set(**behaviour)
    said = rf"{source.path}: the store refuses access \(.*{status}.*\); check the credentials"
    with pytest.raises(CheckpointError, match=said):
        read_bytes(source, 0, 8)
    assert store.stats()["requests"] == 1


REPLACED = "was replaced after its header was read; load again once nobody writes to it"


def test_a_file_that_is_replaced_in_the_middle_is_an_error(
    store: RangeServer, source: RemoteFile, stored_file: Path
) -> None:
    read_bytes(source, 0, 8)
    stored_file.write_bytes(os.urandom(1 << 20))
    os.utime(stored_file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=f"{source.path}: {REPLACED}"):
        read_bytes(source, 0, 8)
    stats = store.stats()
    assert stats["statuses"] == {206: 1, 412: 1}
    assert all(line.endswith(f" bytes=0-7 if-match={source.version}") for line in stats["asked"])
    os.truncate(stored_file, 100)
    with pytest.raises(CheckpointError, match=f"{source.path}: {REPLACED}"):
        read_bytes(source, 1000, 8)


def test_so_it_is_where_the_server_ignores_conditions(
    store: RangeServer, source: RemoteFile, stored_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(stored_file, ns=(1, 1))
    monkeypatch.setattr("tests.remote.range_server._matches", lambda wanted, etag: True)
    with pytest.raises(CheckpointError, match=f"{source.path}: {REPLACED}"):
        read_bytes(source, 0, 8)
    assert store.stats()["statuses"] == {206: 1}


# -- secrets -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [*CHANCES, "gone", "ignores_ranges", "shifts", "adds", "token", "redirect"])
def test_no_message_has_secrets(
    fault: str, store: RangeServer, source: RemoteFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    values: dict[str, Any] = {"gone": True, "ignores_ranges": True, "shifts": 1, "adds": 1, "token": "secret-token"}
    redirect = {"redirect_to": "ftp://user-name:signature@second.example"}
    store.set(**(redirect if fault == "redirect" else {fault: values.get(fault, 1)}), repeats=True)
    with pytest.raises(CheckpointError) as caught:
        read_bytes(source, 0, 4096)  # of which each attempt may get a half
    assert_no_secrets(str(caught.value), repr(caught.value), caplog.text, source.path, repr(source._item))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert caught.value.__cause__ is None
