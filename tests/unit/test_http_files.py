"""Files on HTTP servers, beyond test_remote_objects.py: strange answers, redirects, proxies, TLS."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from urllib3 import HTTPConnectionPool, PoolManager

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io import http_files, remote_file
from lowmem_load.io.http_files import HttpObject, without_secrets
from lowmem_load.io.remote_file import RemoteFile, Traffic
from lowmem_load.io.source import read_bytes
from lowmem_load.io.stand_ins import plain_url
from tests.remote.hub_front import hub_front
from tests.remote.listing import etag
from tests.remote.range_server import RangeServer, range_server

CONTENT = os.urandom(1 << 20)
NUM_READS = 64

pytestmark = pytest.mark.usefixtures("traffic")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def item_at(server: RangeServer, file: Path, **keywords: Any) -> HttpObject:
    keywords = {"version": etag(file.stat()), "nbytes": file.stat().st_size, **keywords}
    return HttpObject(f"{server.url}/{file.name}", **keywords)


def read_all(source: RemoteFile, nbytes: int = len(CONTENT)) -> bytes:
    """The whole file, by as many reads as there are threads' worth of."""
    step = nbytes // NUM_READS
    with ThreadPoolExecutor(8) as pool:
        return b"".join(pool.map(lambda number: read_bytes(source, number * step, step), range(NUM_READS)))


# -- failures that may pass --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "status"), [("error_503", 503), ("too_many", 429)])
def test_retry_after_is_obeyed(fault: str, status: int, file: Path, traffic: Traffic) -> None:
    with range_server(file.parent, **{fault: 1, "at_most": 1, "retry_after_s": 1}) as server:
        began_s = time.monotonic()
        assert read_bytes(RemoteFile(item_at(server, file)), 0, 8) == CONTENT[:8]
        assert time.monotonic() - began_s >= 1
        assert server.stats()["statuses"] == {status: 1, 206: 1}
    assert 1 <= traffic.counts.waited_s < 1.1


@pytest.mark.parametrize("text", ["Wed, 21 Oct 2099 07:28:00 GMT", "-1", "1e9", "nan", "9" * 400, ""])
def test_a_strange_retry_after_is_no_reason_to_wait_for_ever(text: str, impatient: None) -> None:
    with answering({"Retry-After": text}, status=503) as url:
        began_s = time.monotonic()
        with pytest.raises(CheckpointError, match="the server answers with status 503"):
            read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)
        assert time.monotonic() - began_s < 5


def test_a_host_that_has_no_address_is_one_error(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        CheckpointError,
        match=r"http://nothing.invalid/f: cannot be read at bytes 0 to 7: NameResolutionError: .*Name or",
    ):
        read_bytes(RemoteFile(HttpObject("http://nothing.invalid/f", 100, '"1"')), 0, 8)


def test_a_connection_that_was_idle_for_long_is_no_failure(file: Path, traffic: Traffic) -> None:
    with range_server(file.parent) as server:
        source = RemoteFile(item_at(server, file))
        for number in range(10):
            read_bytes(source, number, 100)
        assert server.stats()["connections"] == 1
        for connection in list(server._open):
            connection.cut_off()
        time.sleep(0.05)
        assert read_bytes(source, 8, 8) == CONTENT[8:16]
        assert server.stats()["connections"] == 2
    assert traffic.counts.num_retries == 0


# -- answers that are wrong --------------------------------------------------------------------------------------------


def test_a_whole_file_needs_no_ranges(file: Path) -> None:
    with range_server(file.parent, ignores_ranges=True) as server:
        assert read_bytes(RemoteFile(item_at(server, file)), 0, len(CONTENT)) == CONTENT


def test_compressed_bodies_are_refused() -> None:
    headers = {"Content-Encoding": "gzip", "Content-Range": "bytes 0-7/100", "ETag": '"1"'}
    with (
        answering(headers, status=206, content=b"12345678") as url,
        pytest.raises(CheckpointError, match="sent compressed bytes although identity was asked for"),
    ):
        read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)


@pytest.mark.parametrize(
    "content_range",
    [
        *("bytes", "bytes 0-7", "bytes 0-7/99", "bytes 1-8/100", "bytes 7-0/100", "items 0-7/100"),
        "bytes 0-7/100 " + "x" * 500,
    ],
)
def test_strange_ranges_are_refused(content_range: str) -> None:
    with answering({"Content-Range": content_range, "ETag": '"1"'}, status=206, content=b"12345678") as url:
        with pytest.raises(CheckpointError, match="the server answers a request for bytes 0-7/100") as caught:
            read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)
        assert len(str(caught.value)) < 400


def test_a_part_without_its_range_is_taken_if_its_length_is_right() -> None:
    for content, is_right in ((b"12345678", True), (b"123", False)):
        with answering({"ETag": '"1"'}, status=206, content=content) as url:
            source = RemoteFile(HttpObject(url, 100, '"1"'))
            with contextlib.nullcontext() if is_right else pytest.raises(CheckpointError, match="with status 206"):
                assert read_bytes(source, 0, 8) == content


def test_a_range_of_unknown_total_is_taken() -> None:
    with answering({"Content-Range": "bytes 0-7/*"}, status=206, content=b"12345678") as url:
        assert read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8) == b"12345678"


def test_bodies_in_chunks_are_taken_and_checked(impatient: None) -> None:
    headers = {"Content-Range": "bytes 0-7/100", "Transfer-Encoding": "chunked"}
    with answering(headers, status=206, content=b"4\r\n1234\r\n4\r\n5678\r\n0\r\n\r\n") as url:
        source = RemoteFile(HttpObject(url, 100, '"1"'))
        assert read_bytes(source, 0, 8) == read_bytes(source, 0, 8) == b"12345678"
    with (
        answering(headers, status=206, content=b"9\r\n123456789\r\n0\r\n\r\n") as url,
        pytest.raises(CheckpointError, match="more than 8 bytes"),
    ):
        read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)
    with (
        answering(headers, status=206, content=b"zz\r\n") as url,
        pytest.raises(CheckpointError, match="cannot be read at bytes 0 to 7: "),
    ):
        read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)


@pytest.mark.parametrize("answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500 + b"\r\n"])
def test_what_is_no_http_is_one_error(answer: bytes, impatient: None) -> None:
    with (
        answering({}, raw=answer) as url,
        pytest.raises(CheckpointError, match="cannot be read at bytes 0 to 7: ") as caught,
    ):
        read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)
    assert len(str(caught.value)) < 400


# -- slow servers, and forks -------------------------------------------------------------------------------------------


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
        sources = [RemoteFile(item_at(server, file)) for file in files]
        read_bytes(sources[0], 0, 8)  # so that the parent has a connection

        def reads(number: int) -> bool:
            parts = (read_bytes(sources[number], at, 4096) for at in range(0, 4 << 20, 1 << 16))
            return all(part == bytes([number]) * 4096 for part in parts)

        children = [forked(lambda: reads(0)), forked(lambda: reads(1))]
        assert reads(0)
        assert list(map(is_good, children)) == [True, True]


def test_a_process_forked_while_a_request_waits_goes_on(file: Path) -> None:
    with range_server(file.parent, latency_ms=800) as server:
        waiting = threading.Thread(target=lambda: read_bytes(RemoteFile(item_at(server, file)), 0, 8))
        waiting.start()
        time.sleep(0.3)
        assert in_child(lambda: True, timeout_s=5)
        waiting.join()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "what"), [(404, "is not there"), (410, "is not there"), *((code, "answers") for code in (400, 451, 501))]
)
def test_other_refusals_are_told_at_once(status: int, what: str, traffic: Traffic) -> None:
    with answering({}, status=status) as url, pytest.raises(CheckpointError, match=rf"{what}.*status {status}"):
        read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)
    assert traffic.counts.num_requests == 1


# -- a file that is replaced -------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_is_an_error(file: Path) -> None:
    with range_server(file.parent) as server:
        source = RemoteFile(item_at(server, file, of_hub=True, version="commit"))
        os.truncate(file, 100)
        with pytest.raises(CheckpointError, match="was replaced after its header was read"):
            read_bytes(source, 1000, 8)  # status 416
        with pytest.raises(CheckpointError, match="range 'bytes 50-99/100'"):
            read_bytes(source, 50, 100)


# -- redirects ---------------------------------------------------------------------------------------------------------


def at_hub(url: str, file: Path, token: str = "hub-token") -> HttpObject:
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{url}/org/model/resolve/main/{file.name}"
    return HttpObject(url, file.stat().st_size, "commit", lambda: headers, of_hub=True)


def test_a_redirect_is_followed_once_and_the_token_stays_behind(file: Path) -> None:
    """The second host answers 400 to an Authorization header."""
    with hub_front({"org/model": file.parent}, token="hub-token") as server:
        assert read_all(RemoteFile(at_hub(server.url, file))) == CONTENT
        assert server.files is not None
        at_files, at_front = server.files.stats(), server.stats()
    assert at_files["authorized"] == 0
    assert at_files["statuses"] == {206: NUM_READS}
    assert at_front["authorized"] == at_front["requests"] <= 8  # as many as read at the start
    assert not any("if-match" in line for line in at_files["asked"])  # a commit does not change


def test_a_redirect_that_has_expired_is_renewed(file: Path, traffic: Traffic) -> None:
    with hub_front({"org/model": file.parent}, valid_s=0.1) as server:
        source, num_reads = RemoteFile(at_hub(server.url, file)), 0
        assert server.files is not None
        while server.files.stats()["statuses"][403] < 2:  # it is good to the next whole second
            assert read_bytes(source, num_reads, 100) == CONTENT[num_reads : num_reads + 100]
            num_reads += 1
            time.sleep(0.1)
        assert num_reads < 50
        assert server.files.stats()["statuses"] == {206: num_reads, 403: 2}
        assert server.stats()["requests"] == 3
    assert traffic.counts[:2] == (num_reads + 2, 2)
    assert traffic.limit == 16


def test_a_redirect_that_is_refused_at_once_is_an_error(file: Path) -> None:
    with hub_front({"org/model": file.parent}) as server:
        assert server.files is not None
        server.files.set(secret="another")
        server.files.behaviour, ours = server.files.behaviour.changed({"secret": "secret"}), server.files.behaviour
        source = RemoteFile(at_hub(server.url, file))
        assert read_bytes(source, 0, 8) == CONTENT[:8]
        server.files.behaviour = ours.changed({"gone": True})
        with pytest.raises(CheckpointError, match=r"refuses access \(status 403\)"):
            read_bytes(source, 0, 8)
        assert server.files.stats()["statuses"] == {206: 1, 403: 2}  # once more by a new URL


def test_a_redirect_to_nowhere_is_an_error() -> None:
    with answering({}, status=302) as url, pytest.raises(CheckpointError, match="status 302"):
        read_bytes(RemoteFile(HttpObject(url, 100, '"1"')), 0, 8)


@pytest.fixture
def any_host(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """A server that is asked in place of every host, by http and https."""
    with range_server(file.parent) as server:
        port = int(server.url.rpartition(":")[2])

        pool = HTTPConnectionPool("127.0.0.1", port)
        monkeypatch.setattr(PoolManager, "connection_from_host", lambda *_, **__: pool)
        yield server


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("https://models.example", "http://models.example"),
        ("https://models.example", "http://127.0.0.1:1"),
        ("https://127.0.0.1:1", "http://127.0.0.1:1"),
        ("http://models.example", "ftp://models.example"),
        ("https://models.example", "file:///etc"),
    ],
)
def test_a_redirect_away_from_https_is_refused(first: str, then: str, any_host: RangeServer, file: Path) -> None:
    any_host.set(redirect_to=then, secret="sign")
    with pytest.raises(CheckpointError, match="which is not https; name an https URL") as caught:
        read_bytes(RemoteFile(HttpObject(f"{first}/{file.name}", len(CONTENT), "v")), 0, 8)
    assert any_host.stats()["requests"] == 1
    assert "Signature" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("http://models.example", "https://models.example"),
        ("https://models.example", "https://other.example"),
        ("http://127.0.0.1:1", "http://127.0.0.1:2"),
        ("http://localhost:1", "http://10.0.0.1"),
        ("http://seaweed:8888", "http://volume-1:8080"),
        ("http://[::1]:1", "https://models.example"),
    ],
)
def test_other_redirects_are_followed(first: str, then: str, any_host: RangeServer, file: Path) -> None:
    any_host.set(redirect_to=then, secret="sign", check_signature=False)
    url = f"{first}/{file.name}"
    # It answers any host so: the redirects go on, each followed, until there are too many.
    with pytest.raises(CheckpointError, match="redirects more than 5 times") as caught:
        read_bytes(RemoteFile(HttpObject(url, len(CONTENT), "v")), 0, 8)
    assert any_host.stats()["requests"] == 6
    assert "sign" not in str(caught.value)


# -- secrets -----------------------------------------------------------------------------------------------------------


def with_login(url: str) -> str:
    return url.replace("http://", "http://user-name:pass%2Fword@") + "?X-Amz-Signature=signature&sig=other"


SECRETS = (
    *("user-name", "pass%2Fword", "pass/word", "signature", "other", "secret-token", "hub-token", "Bearer", "dXNlc"),
    *("access-key", "secret-key", "session-token", "AWS4-HMAC", "Signature"),
)


def assert_no_secrets(*texts: str) -> None:
    for text in texts:
        assert [secret for secret in SECRETS if secret in text] == [], text


def test_a_login_in_the_url_is_sent(file: Path) -> None:
    with answering({"Content-Range": "bytes 0-7/100"}, status=206, content=b"12345678") as url:
        read_bytes(RemoteFile(HttpObject(with_login(url), 100, '"1"')), 0, 8)
    assert asked[-1]["Authorization"] == "Basic dXNlci1uYW1lOnBhc3Mvd29yZA=="
    assert asked[-1]["path"] == "/file?X-Amz-Signature=signature&sig=other"
    assert asked[-1]["Accept-Encoding"] == "identity"


def test_a_login_is_not_sent_to_the_host_of_a_redirect(file: Path) -> None:
    with (
        range_server(file.parent, refuse_authorization=True) as second,
        range_server(file.parent, redirect_to=second.url) as first,
    ):
        item = HttpObject(with_login(f"{first.url}/{file.name}"), len(CONTENT), etag(file.stat()))
        assert read_bytes(RemoteFile(item), 0, 8) == CONTENT[:8]
        assert (first.stats()["authorized"], second.stats()["authorized"]) == (1, 0)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("https://u:p@host:1/a/b?q=1#f", "https://host:1/a/b"),
        ("https://u:p@q@host/a", "https://host/a"),
        ("https://host/a%20b", "https://host/a%20b"),
        ("s3://bucket/a?x=y", "s3://bucket/a"),
        ("https://user:pa/ss@host/a", "https://..."),
        ("https://[::1/a", "https://..."),
    ],
)
def test_plain_urls(url: str, plain: str) -> None:
    assert plain_url(url) == plain
    if "..." not in plain:
        assert without_secrets(f"cannot connect to '{url}': no").startswith(f"cannot connect to '{plain}")


def test_texts_lose_their_secrets() -> None:
    text = "x (https://user:signature@host/a?X-Amz-Signature=signature&b) 'http://other@host?sig=signature' y"
    assert_no_secrets(without_secrets(text.replace("user:", "user-name:")))
    assert without_secrets("GET /a?b=c failed").startswith("GET /a?... failed")


# -- a proxy -----------------------------------------------------------------------------------------------------------


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering({"Content-Range": "bytes 0-7/100"}, status=206, content=b"12345678") as url:
        proxy = url.replace("http://", "http://user-name:pass%2Fword@").removesuffix("/file")
        monkeypatch.setenv("http_proxy", proxy)
        assert read_bytes(RemoteFile(HttpObject("http://models.invalid/file", 100, '"1"')), 0, 8) == b"12345678"
    request = asked[-1]
    assert (request["path"], request["Host"]) == ("http://models.invalid/file", "models.invalid")
    assert request["Proxy-Authorization"] == "Basic dXNlci1uYW1lOnBhc3Mvd29yZA=="


def test_who_needs_no_proxy_asks_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with range_server(file.parent) as server:
        assert read_bytes(RemoteFile(item_at(server, file)), 0, 8) == CONTENT[:8]


def test_other_proxies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "socks5://user-name:signature@127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"a proxy by socks5://; only http\(s\):// proxies") as caught:
        read_bytes(RemoteFile(HttpObject("http://models.invalid/file", 100, '"1"')), 0, 8)
    assert_no_secrets(str(caught.value))


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_only_servers_that_the_environment_trusts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with answering({"Content-Range": "bytes 0-7/100"}, status=206, content=b"12345678", tls=tls) as url:
        item = HttpObject(url, 100, '"1"')
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.delenv(name, raising=False)
        http_files._client.cache_clear()
        with pytest.raises(CheckpointError, match="CERTIFICATE_VERIFY_FAILED"):
            read_bytes(RemoteFile(item), 0, 8)
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            http_files._client.cache_clear()
            with monkeypatch.context() as environment:
                environment.setenv(name, certificate)
                assert read_bytes(RemoteFile(item), 0, 8) == b"12345678"
    http_files._client.cache_clear()


# -- a server that answers as it is told -------------------------------------------------------------------------------

asked: list[dict[str, str]] = []
"""Headers of the requests to servers of `answering`, and the path."""


class answering:  # noqa: N801  it is used as a function
    """A server that gives one answer to all requests; yields the URL of a file on it.

    Args:
        headers: of the answer.
        status: of it.
        content: its body, as it goes over the wire.
        raw: what goes over the wire in place of an answer.
        tls: the server is one of https, with this certificate.
    """

    def __init__(
        self,
        headers: dict[str, str],
        *,
        status: int = 200,
        content: bytes = b"",
        raw: bytes | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_CONNECT(self) -> None:
                asked.append({**self.headers, "path": self.path})
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                self.close_connection = False

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                asked.append({**self.headers, "path": self.path})
                if raw is not None:
                    self.wfile.write(raw)
                    self.close_connection = True
                    return
                self.send_response(status)
                own = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(content))}
                for name, value in {**own, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}/file"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
