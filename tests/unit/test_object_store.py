"""Files in object stores, through obstore: every way in which an answer goes wrong, and what must not leak."""

from __future__ import annotations

import builtins
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io import object_store, remote_file
from lowmem_load.io.object_store import list_files
from lowmem_load.io.remote_checkpoint import folder_of_url
from lowmem_load.io.remote_file import RemoteFile, Traffic
from lowmem_load.io.source import read_bytes
from lowmem_load.io.stand_ins import open_file
from tests.remote import stores
from tests.remote.behaviour import CHANCES
from tests.remote.range_server import RangeServer, range_server

pytest.importorskip("obstore")

CONTENT = os.urandom(1 << 20)
NUM_READS = 64
URL = "s3://bucket/models/one"
NAME = f"{URL}/model.safetensors"
CREDENTIALS = {
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "access-key",
    "AWS_SECRET_ACCESS_KEY": "secret-key",
    "AWS_SESSION_TOKEN": "session-token",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bucket" / "models" / "one" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(autouse=True)
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """A count that begins with each test, and delays that take no time."""
    found = Traffic()
    monkeypatch.setattr(remote_file, "TRAFFIC", found)
    monkeypatch.setattr(remote_file, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(remote_file, "LAST_DELAY_S", 0.004)
    monkeypatch.setattr(object_store, "TIMEOUT_S", 1)
    return found


@pytest.fixture
def server(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """A server that the environment names as S3, and whose answers can be made to fail."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    with range_server({"bucket": file.parents[2]}) as found:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": found.url}.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def source(server: RangeServer) -> RemoteFile:
    found = RemoteFile(list_files(URL, "")["model.safetensors"])
    server.reset()
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "PATIENCE_S", 0.2)
    monkeypatch.setattr(remote_file, "THROTTLED_PATIENCE_S", 0.2)


def read_all(source: RemoteFile, nbytes: int = len(CONTENT)) -> bytes:
    step = nbytes // NUM_READS
    with ThreadPoolExecutor(8) as pool:
        return b"".join(pool.map(lambda number: read_bytes(source, number * step, step), range(NUM_READS)))


# -- lists -------------------------------------------------------------------------------------------------------------


def test_the_files_of_a_folder_and_of_a_subfolder_are_listed(server: RangeServer, file: Path) -> None:
    for name in ("config.json", "sub/config.json", "sub/below/a", "other/config.json", "ümläut & <b>.json"):
        path = file.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    (file.parents[1] / "one-more").mkdir()
    (file.parents[1] / "one-more" / "model.safetensors").write_bytes(b"")
    here = {"model.safetensors", "config.json", "ümläut & <b>.json"}
    for url in (URL, f"{URL}/", f"{URL}//"[:-1]):
        found = list_files(url, "")
        assert set(found) == here
        assert (found["model.safetensors"].name, found["model.safetensors"].nbytes) == (NAME, len(CONTENT))
    assert set(list_files(URL, "sub")) == set(list_files(URL, "/sub/")) == here | {"sub/config.json"}
    assert set(list_files("s3://bucket", "models/one")) == {f"models/one/{name}" for name in here}
    assert list_files("s3://bucket/nothing", "") == {}
    assert read_bytes(RemoteFile(list_files(URL, "")["ümläut & <b>.json"]), 0, 2) == b"{}"


def test_shards_in_subfolders_that_the_index_names_are_there(server: RangeServer, file: Path) -> None:
    names = {"layers.0/a.safetensors": 1, "layers.1/ü b.safetensors": 2, "absent/c.safetensors": 3, "../d": 4}
    for name in (*names, "layers.0/unnamed.safetensors"):
        (file.parent / name).parent.mkdir(exist_ok=True)
        (file.parent / name).write_bytes(CONTENT)
    (file.parent / "absent/c.safetensors").unlink()
    (file.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in names}}))
    folder = Path(folder_of_url(URL))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in there if "/" in name and ".heads" not in name} == {*list(names)[:2]}
    for name in list(names)[:2]:
        found = open_file(str(folder / name))
        assert (found.path, found.nbytes) == (f"{URL}/{name}", len(CONTENT))
        assert read_bytes(found, 1000, 1000) == CONTENT[1000:2000]


def test_a_bucket_that_is_not_there_is_an_error(server: RangeServer) -> None:
    with pytest.raises(CheckpointError, match="s3://other/models: is not there"):
        folder_of_url("s3://other/models")
    assert server.stats()["requests"] == 1


def test_a_folder_that_is_not_there_is_an_error(server: RangeServer) -> None:
    with pytest.raises(CheckpointError, match="s3://bucket/nothing: no files are there; name the folder that holds"):
        folder_of_url("s3://bucket/nothing")


@pytest.mark.parametrize("fault", ["error_500", "error_503", "slow_down", "too_many", "reset_before"])
def test_a_list_is_asked_for_again(fault: str, server: RangeServer, traffic: Traffic) -> None:
    server.set(**{fault: 1, "at_most": 2, "retry_after_s": 0})
    folder_of_url(URL)
    assert server.stats()["faults"] == {fault: 2}
    assert traffic.counts.num_retries == 2


def test_a_list_that_may_not_be_had_is_one_error(server: RangeServer) -> None:
    server.set(gone=True, repeats=True)
    with pytest.raises(CheckpointError, match="s3://bucket/models/one: the store refuses access") as caught:
        folder_of_url(URL)
    assert "check the credentials, and that they may list and read it" in str(caught.value)
    assert_no_secrets(str(caught.value))
    assert server.stats()["requests"] == 1


@pytest.mark.parametrize(
    "url",
    ["s3://bucket name/a", "s3://bucket//a", "az://container/a", "abfss://a/b"],
)
def test_urls_that_name_nothing_are_told_at_once(url: str, server: RangeServer, traffic: Traffic) -> None:
    with pytest.raises(CheckpointError, match="is no URL of a store, or one that lacks settings: "):
        folder_of_url(url)
    with pytest.raises(CheckpointError) as caught:
        folder_of_url(url.replace("://", "://user:session-token@", 1) + "?X-Amz-Signature=1")
    assert_no_secrets(str(caught.value))
    assert (server.stats()["requests"], traffic.counts.num_retries) == (0, 0)


@pytest.mark.parametrize(
    ("text", "said", "is_transient"),
    [
        ("... status: 301 ... Received redirect without LOCATION, this normally indicates an incorrectly configured "
         "region ...", "incorrectly configured region", False),
        ("... 400 Bad Request: <Code>AuthorizationHeaderMalformed</Code> ...", "400, AuthorizationHeaderM", False),
        ("... status: 405 ...", "405", False),
        ("Error performing PUT http://169.254.169.254/latest/api/token: 403 Forbidden", "403, asked this mach", False),
        ("... 200 OK: <Code>SlowDown</Code> ...", "SlowDown", True),
        ("... status: 503 ...", "503", True),
        ("... status: 408 ...", "408", True),
        ("... error sending request for url (http://x?token=session-token)", "error sending request", True),
        ("... PUT http://169.254.169.254/: error sending request", "asked this machine for credentials", True),
        ("...", r"GenericError \(", True),
    ],
)  # fmt: skip
def test_what_may_pass_is_asked_for_again_and_nothing_else(
    text: str, said: str, is_transient: bool, server: RangeServer, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def fail(*_: Any) -> None:
        raise GenericError(f"session-token {text}")

    monkeypatch.setattr(obstore, "list_with_delimiter", fail)
    with pytest.raises(CheckpointError, match=rf"{URL}: .*{said}") as caught:
        folder_of_url(URL)
    assert ("cannot be listed" in str(caught.value)) is (" attempts in " in str(caught.value)) is is_transient
    assert (remote_file.TRAFFIC.counts.num_requests > 1) is is_transient
    assert (remote_file.TRAFFIC.limit < 16) is (said in ("SlowDown", "503"))
    assert_no_secrets(str(caught.value))


# -- failures that may pass --------------------------------------------------------------------------------------------


def test_bytes_are_right_although_requests_fail_in_all_ways(
    server: RangeServer, source: RemoteFile, traffic: Traffic
) -> None:
    server.set(**dict.fromkeys(CHANCES, 0.05), retry_after_s=0, stall_s=2)
    before = traffic.counts
    assert read_all(source) == CONTENT
    stats, counts = server.stats(), traffic.counts.since(before)
    assert len(stats["faults"]) > 4
    assert counts.num_requests == stats["requests"] == NUM_READS + counts.num_retries
    assert counts.received_bytes == len(CONTENT)


@pytest.mark.parametrize("fault", CHANCES)
def test_one_fault_is_waited_for_and_patience_ends_with_one_error(
    fault: str, server: RangeServer, source: RemoteFile, traffic: Traffic, impatient: None
) -> None:
    server.set(**{fault: 1, "at_most": 1, "retry_after_s": 0, "stall_s": 2})
    assert read_bytes(source, 0, 8) == CONTENT[:8]
    assert (traffic.limit < 9) is (fault in ("slow_down", "error_503", "too_many"))
    server.reset()
    server.set(at_most=-1)
    began_s = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        read_bytes(source, 10, 100)
    assert time.monotonic() - began_s < 5
    assert str(caught.value).startswith(f"{NAME}: cannot be read at bytes 10 to 109: ")
    assert " attempts in " in str(caught.value)
    assert len(str(caught.value)) < 300
    assert_no_secrets(str(caught.value))


def test_a_server_that_is_gone_is_one_error(server: RangeServer, source: RemoteFile, impatient: None) -> None:
    server.close()
    with pytest.raises(CheckpointError, match=rf"{NAME}: cannot be read at bytes 0 to 7: .*error sending request"):
        read_bytes(source, 0, 8)
    with pytest.raises(CheckpointError, match=rf"{URL}: cannot be listed: .*error sending request"):
        folder_of_url(URL)


# -- answers that are wrong --------------------------------------------------------------------------------------------


def test_a_server_without_ranges_is_refused(server: RangeServer, source: RemoteFile) -> None:
    server.set(ignores_ranges=True)
    with pytest.raises(CheckpointError, match=rf"{NAME}: the store does not serve ranges; use a server that serves"):
        read_bytes(source, 0, 8)
    assert server.stats()["requests"] == 1


@pytest.mark.parametrize("behaviour", [{"shifts": 1}, {"adds": 64 << 20}])
def test_other_ranges_and_longer_bodies_are_refused(
    behaviour: dict[str, int], server: RangeServer, source: RemoteFile, impatient: None
) -> None:
    server.set(**behaviour)
    with pytest.raises(CheckpointError, match=NAME):
        read_bytes(source, 8, 4)


@pytest.mark.parametrize(
    ("parts", "said"), [([5], "the store sent 5 bytes, expected 8"), ([5, 4], "more than 8 bytes")]
)
def test_the_bytes_of_a_body_are_counted(
    parts: list[int], said: str, source: RemoteFile, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore does it by itself, so far."""
    import obstore

    class Found:
        meta = {"e_tag": source.version}  # noqa: RUF012

        def stream(self, min_chunk_size: int) -> list[bytes]:
            return [bytes(part) for part in parts]

    monkeypatch.setattr(obstore, "get", lambda *_, **__: Found())
    with pytest.raises(CheckpointError, match=said):
        read_bytes(source, 0, 8)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_who_may_not_read_is_told_at_once(server: RangeServer, source: RemoteFile) -> None:
    server.set(gone=True, repeats=True)
    with pytest.raises(
        CheckpointError, match=rf"{NAME}: the store refuses access \(.*403.*\); check the cred"
    ) as caught:
        read_bytes(source, 0, 8)
    server.set(gone=False, token="another")
    with pytest.raises(CheckpointError, match=rf"{NAME}: the store refuses access \(.*401.*\)"):
        read_bytes(source, 0, 8)
    assert server.stats()["requests"] == 2
    assert_no_secrets(str(caught.value))


def test_a_file_that_is_not_there_is_told_at_once(server: RangeServer, source: RemoteFile, file: Path) -> None:
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{NAME}: is not there"):
        read_bytes(source, 0, 8)
    assert server.stats()["requests"] == 1


def test_a_file_that_is_replaced_in_the_middle_is_an_error(server: RangeServer, source: RemoteFile, file: Path) -> None:
    read_bytes(source, 0, 8)
    file.write_bytes(os.urandom(len(CONTENT)))
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=f"{NAME}: was replaced after its header was read; load again once"):
        read_bytes(source, 0, 8)
    stats = server.stats()
    assert stats["statuses"] == {206: 1, 412: 1}
    assert stats["asked"] == [f"GET /bucket/models/one/model.safetensors bytes=0-7 if-match={source.version}"] * 2
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=f"{NAME}: was replaced after its header was read"):
        read_bytes(source, 1000, 8)


def test_so_it_is_where_the_store_ignores_conditions(
    server: RangeServer, source: RemoteFile, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(file, ns=(1, 1))
    monkeypatch.setattr("tests.remote.range_server._matches", lambda wanted, etag: True)
    with pytest.raises(CheckpointError, match=f"{NAME}: was replaced after its header was read"):
        read_bytes(source, 0, 8)
    assert server.stats()["statuses"] == {206: 1}


# -- secrets -----------------------------------------------------------------------------------------------------------


def assert_no_secrets(*texts: str) -> None:
    secrets = ("access-key", "secret-key", "session-token", "AWS4-HMAC", "Signature")
    for text in texts:
        assert [secret for secret in secrets if secret in text] == [], text


@pytest.mark.parametrize("fault", [*CHANCES, "gone", "ignores_ranges", "shifts", "adds", "token"])
def test_no_message_has_secrets(
    fault: str, server: RangeServer, source: RemoteFile, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    values: dict[str, Any] = {"gone": True, "ignores_ranges": True, "shifts": 1, "adds": 1, "token": "another"}
    server.set(**{fault: values.get(fault, 1), "repeats": True, "retry_after_s": 0})
    with pytest.raises(CheckpointError) as caught:
        read_bytes(source, 0, 8)
    assert_no_secrets(str(caught.value), repr(caught.value), caplog.text, source.path)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_the_answer_would_have_told_them(server: RangeServer, source: RemoteFile) -> None:
    import obstore

    server.set(gone=True, repeats=True)
    with pytest.raises(Exception, match="session-token"):
        obstore.get(source._item._store, source._item._key)  # type: ignore[attr-defined]


# -- obstore -----------------------------------------------------------------------------------------------------------


def test_without_obstore_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    ordinary = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "obstore":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return ordinary(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for url in ("s3://key:secret@bucket/a", "gs://bucket/a", "az://container/a", "abfss://c@account/a"):
        with pytest.raises(ConfigError, match="install obstore to read from it: pip install 'lowmem-load") as caught:
            folder_of_url(url)
        assert "secret" not in str(caught.value)


# -- other stores ------------------------------------------------------------------------------------------------------


def test_files_in_gcs_are_read(server: RangeServer, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    source = RemoteFile(list_files("gs://bucket/models/one", "")["model.safetensors"])
    assert (source.path, source.nbytes) == ("gs://bucket/models/one/model.safetensors", len(CONTENT))
    assert read_bytes(source, 100, 1000) == CONTENT[100:1100]
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was replaced after its header was read"):
        read_bytes(source, 100, 1000)


@pytest.mark.release
@pytest.mark.parametrize("store", [stores.s3, stores.gcs, stores.azure])
def test_real_stores(store: Callable[[], AbstractContextManager[stores.Server]], file: Path, tmp_path: Path) -> None:
    """Servers of others, so that ours is not the only one to agree with obstore."""
    try:
        started = store()
        found = started.__enter__()
    except stores.StoreMissing as error:
        pytest.skip(str(error))
    try:
        with found.environment_set():
            url = found.upload(file.parent, "models/one")
            item = list_files(url, "")["model.safetensors"]
            source = RemoteFile(item)
            assert (source.path, source.nbytes) == (f"{url}/model.safetensors", len(CONTENT))
            assert read_all(source) == CONTENT
            file.write_bytes(os.urandom(len(CONTENT)))
            found.put(file, "models/one/model.safetensors")
            with pytest.raises(CheckpointError, match="was replaced after its header was read"):
                read_bytes(source, 0, 8)
            again = list_files(url, "")["model.safetensors"]
            assert again.version != item.version
            assert read_bytes(RemoteFile(again), 0, 8) == file.read_bytes()[:8]
            with pytest.raises(CheckpointError, match="no files are there"):
                folder_of_url(f"{found.root}/nothing")
    finally:
        started.__exit__(None, None, None)
