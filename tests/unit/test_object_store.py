"""Files in object stores, through obstore, beyond test_remote_objects.py: lists, URLs, errors of obstore."""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io import remote_file
from lowmem_load.io.object_store import list_files
from lowmem_load.io.open_file import open_file
from lowmem_load.io.remote_checkpoint import folder_of_url
from lowmem_load.io.remote_file import RemoteFile, Traffic
from lowmem_load.io.source import read_bytes
from tests.remote import stores
from tests.remote.range_server import RangeServer
from tests.unit.test_http_files import assert_no_secrets, in_child

pytest.importorskip("obstore")

URL = "s3://bucket/models/one"
NAME = f"{URL}/model.safetensors"


@pytest.fixture
def source(store: RangeServer) -> RemoteFile:
    source = RemoteFile(list_files(URL, "")["model.safetensors"])
    store.reset()
    return source


# -- lists -------------------------------------------------------------------------------------------------------------


def test_the_files_of_a_folder_and_of_a_subfolder_are_listed(store: RangeServer, stored_file: Path) -> None:
    for name in ("config.json", "sub/config.json", "sub/below/a", "other/config.json", "ümläut & <b>.json"):
        path = stored_file.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    (stored_file.parents[1] / "one-more").mkdir()
    (stored_file.parents[1] / "one-more" / "model.safetensors").write_bytes(b"")
    here = {"model.safetensors", "config.json", "ümläut & <b>.json"}
    for url in (URL, f"{URL}/", f"{URL}//"[:-1]):
        found = list_files(url, "")
        assert set(found) == here
        assert (found["model.safetensors"].name, found["model.safetensors"].nbytes) == (NAME, 1 << 20)
    assert set(list_files(URL, "sub")) == set(list_files(URL, "/sub/")) == here | {"sub/config.json"}
    assert set(list_files("s3://bucket", "models/one")) == {f"models/one/{name}" for name in here}
    assert list_files("s3://bucket/nothing", "") == {}
    assert read_bytes(RemoteFile(list_files(URL, "")["ümläut & <b>.json"]), 0, 2) == b"{}"


def test_shards_in_subfolders_that_the_index_names_are_there(store: RangeServer, stored_file: Path) -> None:
    names = {"layers.0/a.safetensors": 1, "layers.1/ü b.safetensors": 2, "absent/c.safetensors": 3, "../d": 4}
    content = stored_file.read_bytes()
    for name in (*names, "layers.0/unnamed.safetensors"):
        (stored_file.parent / name).parent.mkdir(exist_ok=True)
        (stored_file.parent / name).write_bytes(content)
    (stored_file.parent / "absent/c.safetensors").unlink()
    (stored_file.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in names}}))
    folder = Path(folder_of_url(URL))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in there if "/" in name and ".heads" not in name} == {*list(names)[:2]}
    for name in list(names)[:2]:
        found = open_file(str(folder / name))
        assert (found.path, found.nbytes) == (str(folder / name), 1 << 20)
        assert read_bytes(found, 1000, 1000) == content[1000:2000]


def test_a_bucket_that_is_not_there_is_an_error(store: RangeServer) -> None:
    with pytest.raises(CheckpointError, match="s3://other/models: is not there"):
        folder_of_url("s3://other/models")
    assert store.stats()["requests"] == 1


def test_a_folder_that_is_not_there_is_an_error(store: RangeServer) -> None:
    with pytest.raises(CheckpointError, match="s3://bucket/nothing: no files are there; name the folder that holds"):
        folder_of_url("s3://bucket/nothing")


@pytest.mark.parametrize("fault", ["error_500", "error_503", "slow_down", "too_many", "reset_before"])
def test_a_list_is_asked_for_again(fault: str, store: RangeServer, traffic: Traffic) -> None:
    store.set(**{fault: 1, "at_most": 2, "retry_after_s": 0})
    folder_of_url(URL)
    assert store.stats()["faults"] == {fault: 2}
    assert traffic.counts.num_retries == 2


def test_a_list_that_may_not_be_had_is_one_error(store: RangeServer) -> None:
    store.set(gone=True, repeats=True)
    with pytest.raises(CheckpointError, match="s3://bucket/models/one: the store refuses access") as caught:
        folder_of_url(URL)
    assert "check the credentials, and that they may list and read it" in str(caught.value)
    assert_no_secrets(str(caught.value))
    assert store.stats()["requests"] == 1


@pytest.mark.parametrize(
    "url",
    ["s3://bucket name/a", "s3://bucket//a", "az://container/a", "abfss://a/b"],
)
def test_urls_that_name_nothing_are_told_at_once(url: str, store: RangeServer, traffic: Traffic) -> None:
    with pytest.raises(CheckpointError, match="is no URL of a store, or one that lacks settings: "):
        folder_of_url(url)
    with pytest.raises(CheckpointError) as caught:
        folder_of_url(url.replace("://", "://user:session-token@", 1) + "?X-Amz-Signature=1")
    assert_no_secrets(str(caught.value))
    assert (store.stats()["requests"], traffic.counts.num_retries) == (0, 0)


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
    text: str, said: str, is_transient: bool, store: RangeServer, impatient: None, monkeypatch: pytest.MonkeyPatch
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


# -- answers that are wrong --------------------------------------------------------------------------------------------


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


def test_a_process_forked_from_one_that_used_obstore_is_refused(source: RemoteFile) -> None:
    read_bytes(source, 0, 8)

    def is_refused() -> bool:
        with pytest.raises(ConfigError, match="start it by spawn"):
            list_files(URL, "")
        return True

    assert in_child(is_refused)


# -- other stores ------------------------------------------------------------------------------------------------------


def test_files_in_gcs_are_read(store: RangeServer, stored_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", store.url)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    source = RemoteFile(list_files("gs://bucket/models/one", "")["model.safetensors"])
    assert (source.path, source.nbytes) == ("gs://bucket/models/one/model.safetensors", 1 << 20)
    assert read_bytes(source, 100, 1000) == stored_file.read_bytes()[100:1100]
    os.utime(stored_file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was replaced after its header was read"):
        read_bytes(source, 100, 1000)


@pytest.mark.release
@pytest.mark.parametrize("start", [stores.s3, stores.gcs, stores.azure])
def test_real_stores(
    start: Callable[[], AbstractContextManager[stores.Server]], stored_file: Path, tmp_path: Path
) -> None:
    """Servers of others, so that ours is not the only one to agree with obstore."""
    try:
        started = start()
        found = started.__enter__()
    except stores.StoreMissing as error:
        pytest.skip(str(error))
    try:
        with found.environment_set():
            url = found.upload(stored_file.parent, "models/one")
            item = list_files(url, "")["model.safetensors"]
            source = RemoteFile(item)
            assert (source.path, source.nbytes) == (f"{url}/model.safetensors", 1 << 20)
            assert read_bytes(source, 0, 1 << 20) == stored_file.read_bytes()
            stored_file.write_bytes(os.urandom(1 << 20))
            found.put(stored_file, "models/one/model.safetensors")
            with pytest.raises(CheckpointError, match="was replaced after its header was read"):
                read_bytes(source, 0, 8)
            again = list_files(url, "")["model.safetensors"]
            assert again.version != item.version
            assert read_bytes(RemoteFile(again), 0, 8) == stored_file.read_bytes()[:8]
            with pytest.raises(CheckpointError, match="no files are there"):
                folder_of_url(f"{found.root}/nothing")
    finally:
        started.__exit__(None, None, None)
