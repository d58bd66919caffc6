"""Files in object stores and on HTTP servers, beyond test_remote_objects.py: lists, URLs, redirects, proxies, TLS."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.files import object_store
from lowmem_load.files.object_store import RemoteObject, aws_settings, list_files, read_list
from lowmem_load.files.remote_checkpoint import folder_of_url
from lowmem_load.files.remote_file import RemoteFile
from lowmem_load.files.source import read_bytes
from tests.hub import pointed_at
from tests.remote import stores
from tests.remote.answering import answering, asked, assert_no_secrets, in_child, with_login
from tests.remote.hub_front import HubServer, hub_front
from tests.remote.listing import etag
from tests.remote.range_server import RangeServer, range_server

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


@pytest.mark.parametrize("fault", ["error_500", "error_503", "slow_down", "too_many", "reset_before"])
def test_a_list_is_asked_for_again(fault: str, store: RangeServer) -> None:
    store.set(**{fault: 1, "at_most": 2})
    folder_of_url(URL)
    assert store.stats()["faults"] == {fault: 2}


@pytest.mark.parametrize("url", ["s3://bucket name/a", "s3://bucket//a", "az://container/a", "abfss://a/b"])
def test_urls_that_name_nothing_are_told_at_once(url: str, store: RangeServer) -> None:
    with pytest.raises(CheckpointError, match="is not the URL of a store, or lacks settings: "):
        folder_of_url(url)
    with pytest.raises(CheckpointError) as caught:
        folder_of_url(url.replace("://", "://user:session-token@", 1) + "?X-Amz-Signature=1")
    assert_no_secrets(str(caught.value))
    assert store.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("... status: 301 ... Received redirect without LOCATION, this normally indicates an incorrectly configured "
         "region ...", "incorrectly configured region"),
        ("... 400 Bad Request: <Code>AuthorizationHeaderMalformed</Code> ...", "400, AuthorizationHeaderM"),
        ("... status: 405 ...", "405"),
        ("Error performing PUT http://169.254.169.254/latest/api/token: 403 Forbidden", "403, asked this mach"),
        ("... 200 OK: <Code>SlowDown</Code> ...", "SlowDown"),
        ("... status: 503 ...", "503"),
        ("... status: 408 ...", "408"),
        ("... error sending request for url (http://x?token=session-token)", "error sending request"),
        ("... PUT http://169.254.169.254/: error sending request", "asked this machine for credentials"),
        ("...", "GenericError"),
    ],
)  # fmt: skip
def test_errors_of_obstore_are_told_without_its_text(
    text: str, said: str, store: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def fail(*_: Any) -> None:
        raise GenericError(f"session-token {text}")

    monkeypatch.setattr(obstore, "list_with_delimiter", fail)
    with pytest.raises(CheckpointError, match=rf"{URL}: .*{said}") as caught:
        folder_of_url(URL)
    assert_no_secrets(str(caught.value))


# -- HTTP servers ------------------------------------------------------------------------------------------------------

PART = {"Content-Range": "bytes 0-7/100", "ETag": '"1"'}


def at(url: str) -> RemoteFile:
    """The file of 100 bytes at the URL of `answering`."""
    folder, _, key = url.rpartition("/")
    return RemoteFile(RemoteObject(folder, key, 100, '"1"'))


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        *(({"Content-Range": said}, "file: ") for said in ("bytes", "bytes 1-8/100", "bytes 7-0/100", "items 0-7/100")),
        ({**PART, "Content-Encoding": "gzip"}, "sends compressed bytes"),
        ({**PART, "ETag": '"2"'}, "was replaced after its header was read"),
    ],
)
def test_wrong_answers_are_refused(headers: dict[str, str], said: str, impatient: None) -> None:
    with answering(headers, status=206, content=b"12345678") as url, pytest.raises(CheckpointError, match=said):
        read_bytes(at(url), 0, 8)


@pytest.mark.parametrize(("status", "said"), [(404, "is not there"), (410, "is not there"), (451, "451")])
def test_refusals_are_told_at_once(status: int, said: str) -> None:
    before = len(asked)
    with answering({}, status=status) as url, pytest.raises(CheckpointError, match=said):
        read_bytes(at(url), 0, 8)
    assert len(asked) == before + 1


def test_a_login_and_a_query_in_the_url_are_sent() -> None:
    with answering(PART, status=206, content=b"12345678") as url:
        read_bytes(RemoteFile(RemoteObject(url, "f", 100, '"1"', secret=with_login(url))), 0, 8)
    assert asked[-1]["authorization"] == "Basic dXNlci1uYW1lOnBhc3Mvd29yZA=="
    assert asked[-1]["path"] == "/file/f?X-Amz-Signature=signature&sig=other"


def test_a_login_is_not_sent_to_the_host_of_a_redirect(stored_file: Path) -> None:
    with (
        range_server(stored_file.parent, refuse_authorization=True) as second,
        range_server(stored_file.parent, redirect_to=second.url) as first,
    ):
        version, secret = etag(stored_file.stat()), with_login(first.url)
        item = RemoteObject(first.url, stored_file.name, 1 << 20, version, secret=secret)
        assert read_bytes(RemoteFile(item), 0, 8) == stored_file.read_bytes()[:8]
        assert (first.stats()["authorized"], second.stats()["authorized"]) == (1, 0)


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(PART, status=206, content=b"12345678") as url:
        monkeypatch.setenv("http_proxy", url.replace("http://", "http://user-name:pass%2Fword@").removesuffix("/file"))
        assert read_bytes(at("http://models.invalid/file"), 0, 8) == b"12345678"
    assert (asked[-1]["path"], asked[-1]["host"]) == ("http://models.invalid/file", "models.invalid")
    assert asked[-1]["proxy-authorization"] == "Basic dXNlci1uYW1lOnBhc3Mvd29yZA=="


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_only_servers_that_the_environment_trusts_are_read_and_not_by_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -days 1 -addext subjectAltName=IP:127.0.0.1"
    command += " -addext basicConstraints=critical,CA:FALSE"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with answering(PART, status=206, content=b"12345678", tls=tls) as url:
        with pytest.raises(CheckpointError, match="cannot be read: "):
            read_bytes(at(url), 0, 8)
        for name in names:
            with monkeypatch.context() as environment:
                environment.setenv(name, certificate)
                assert read_bytes(at(url), 0, 8) == read_list(url, "") == b"12345678"
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    with answering(PART, content=b"12345678") as plain, answering({"Location": plain}, status=302, tls=tls) as url:
        for read in (lambda: read_bytes(at(url), 0, 8), lambda: read_list(url, "")):
            with pytest.raises(CheckpointError, match="redirects from https to what is not https"):
                read()


@pytest.mark.parametrize("length", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_list_that_comes_too_slowly_is_an_error(length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "LIST_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(f"HTTP/1.1 200 OK\r\n{length}\r\n\r\n".encode())
                for _ in range(100):
                    connection.sendall(b"x" if "100" in length else b"1\r\nx\r\n")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(CheckpointError, match=r"SHA256SUMS: only \d bytes of this list of files came in 0[.]3 s"):
            read_list(f"http://127.0.0.1:{server.getsockname()[1]}/m", "SHA256SUMS")
        thread.join(15)


def test_a_list_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the files that it would have named next would be missing without an error."""
    monkeypatch.setattr(object_store, "DELAYS_S", ())
    with (
        answering({"Content-Length": "100", "Connection": "close"}, content=b"12345678") as url,
        pytest.raises(CheckpointError, match=r"IncompleteRead.8 bytes read, 92 more"),
    ):
        read_list(url, "")


# -- the Hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(stored_file: Path, tmp_path: Path, quick_requests: None) -> Iterator[HubServer]:
    front = hub_front({"org/model": stored_file.parent}, token="hub-token", valid_s=0.1)
    with front as server, pointed_at(server.url, str(tmp_path / "cache")):
        yield server


def on_hub(hub: HubServer) -> RemoteFile:
    url = f"{hub.url}/org/model/resolve/main/model.safetensors"
    return RemoteFile(RemoteObject(url, "", 1 << 20, "commit", on_hub=True, secret="hub-token"))


def test_a_redirect_of_the_hub_is_looked_up_once_until_it_expires(hub: HubServer, stored_file: Path) -> None:
    """The second host, which answers 400 to an Authorization header, gets no token."""
    source, content, num_reads, files = on_hub(hub), stored_file.read_bytes(), 0, hub.files
    assert files is not None
    while files.stats()["statuses"][403] < 2:  # a signed URL is good to the next whole second
        assert read_bytes(source, num_reads, 100) == content[num_reads : num_reads + 100]
        num_reads += 1
        time.sleep(0.1)
    assert files.stats()["statuses"] == {206: num_reads, 403: 2}
    assert files.stats()["authorized"] == 0
    assert hub.stats()["requests"] <= 4


def test_what_the_hub_refuses_is_told_at_once(hub: HubServer) -> None:
    assert hub.files is not None
    hub.files.set(gone=True)
    with pytest.raises(CheckpointError, match="the store refuses access"):
        read_bytes(on_hub(hub), 0, 8)
    hub.set(token="another")
    with pytest.raises(CheckpointError, match="the store refuses access") as caught:
        read_bytes(on_hub(hub), 0, 8)
    assert_no_secrets(str(caught.value))


# -- the profile of AWS ------------------------------------------------------------------------------------------------


def test_the_profile_of_aws_is_read_by_boto3(
    store: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile mine]\nregion = eu-north-1\nendpoint_url = {store.url}\n")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = key-id\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "boto3", None)
        with pytest.raises(ConfigError, match="pip install boto3"):
            list_files(URL, "")
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert aws_settings()["region"] == "eu-north-1"
    assert aws_settings()["credential_provider"]()["access_key_id"] == "key-id"
    assert set(list_files(URL, "")) == {"model.safetensors"}
    assert store.stats()["authorized"] == 1
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(ConfigError, match=r"the profile of AWS .* cannot be used: .*other"):
        list_files(URL, "")


# -- obstore -----------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize(("start", "program"), [(stores.s3, stores.MOTO), (stores.azure, stores.AZURITE)])
def test_real_stores(
    start: Callable[[], AbstractContextManager[stores.Server]], program: Path, stored_file: Path, tmp_path: Path
) -> None:
    """Servers of others, so that ours is not the only one to agree with obstore."""
    if not program.exists():
        pytest.skip("not installed by `make test-stores`")
    with start() as found, found.environment_set():
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
