"""Files on HTTP servers and on the Hub: requests for ranges, redirects, and what the answers mean.

The client is Python's own, since it reads into memory that is there: httpx, which huggingface_hub uses, makes a new
piece of memory of each 64 KiB, and reached a fifth of the speed (0.55 to 2.7 GB/s, two processes on two cores).
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io.remote_file import TIMEOUT_S, TransientError
from lowmem_load.io.stand_ins import plain_url

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
THROTTLED = frozenset({429, 503})
"""Answers after which a request may be made again; those that mean "slow down"."""

DENIED = frozenset({401, 403})
EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Answers of stores to a signed URL that has expired."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5

USE_ANOTHER = "use a server that serves ranges, or download the checkpoint and name its folder"

MAX_WAIT_S = 60.0
"""Longest `Retry-After` that is obeyed."""

PART_BYTES = 1 << 20
"""Most bytes of a body between two looks whether it is still wanted."""

LEAST_BYTES_PER_S = 64 << 10
"""A body that comes slower, beside `TIMEOUT_S`, is asked for anew: a server may send a byte now and then for ever."""

MAX_LEFT_BYTES = 64 << 10
"""Most bytes of a body that nobody wants which are read, so that the connection can be used again."""

Headers = Mapping[str, str]


def without_secrets(text: str) -> str:
    """Return a text without user names, passwords and queries in its URLs."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", re.sub(r"\?[^\s'\"<>)]*", "?...", text))


class HttpObject:
    """A `RemoteObject` on an HTTP server.

    Args:
        url: of the file. Its redirect is followed once and then used until it is refused: signed URLs expire.
        nbytes: its size.
        version: its ETag or date; for the Hub, its hash.
        headers: of each request to the host of `url`: a token.
        of_hub: whether it is a file of one commit on the Hub, which cannot change: `version` is no condition then.
        sha256: of the file, if it is known.
    """

    def __init__(
        self,
        url: str,
        nbytes: int,
        version: str,
        headers: Callable[[], Headers] = dict,
        *,
        of_hub: bool = False,
        sha256: str | None = None,
    ) -> None:
        self.name, self.nbytes, self.version, self.sha256 = plain_url(url), nbytes, version, sha256
        self._url, self._headers, self._of_hub = url, headers, of_hub
        self._location = url  # where `url` redirects to

    def fetch(self, offset: int, memory: memoryview, check: Callable[[], object]) -> None:
        """See `RemoteObject`."""
        if not memory:
            return
        headers = {"Range": f"bytes={offset}-{offset + memory.nbytes - 1}"}
        if not self._of_hub:
            headers["If-Match" if _is_etag(self.version) else "If-Unmodified-Since"] = self.version
        location = self._location
        with requested("GET", location, headers, self._headers, first=self._url) as (found, answer):
            if answer.status in EXPIRED and location != self._url:
                self._location = self._url  # the signed URL has expired
                raise TransientError(f"the URL to which it redirects has expired (status {answer.status})")
            self._check_answer(answer, offset, memory.nbytes)
            self._location = found
            _fill(self.name, memory, answer, check, time.monotonic() + TIMEOUT_S + memory.nbytes / LEAST_BYTES_PER_S)

    def _check_answer(self, answer: HTTPResponse, offset: int, nbytes: int) -> None:
        refuse_status(self.name, answer)
        sent = answer.headers
        if answer.status in (412, 416) or self._has_changed(answer):
            raise CheckpointError(
                f"{self.name}: was replaced after its header was read; load again once nobody writes to it"
            )
        if sent.get("Content-Encoding", "identity") != "identity":  # a few bytes may unpack to any number
            raise CheckpointError(f"{self.name}: the server sent compressed bytes although identity was asked for")
        if answer.status == 200 and (offset, nbytes) == (0, self.nbytes):
            return
        asked, given = f"bytes {offset}-{offset + nbytes - 1}/", str(sent.get("Content-Range", ""))
        if answer.status == 206 and re.fullmatch(rf"bytes {offset}-\d+/{self.nbytes}", given) and len(given) < 80:
            first, last = map(int, re.findall(r"\d+", given)[:2])
            if last < offset + nbytes - 1:
                raise TransientError(f"the server sent {last - first + 1} bytes, expected {nbytes}")
        if answer.status != 206 or given not in (f"{asked}{self.nbytes}", f"{asked}*"):
            raise CheckpointError(
                f"{self.name}: the server answers a request for {asked}{self.nbytes} with status {answer.status} and "
                f"range {given[:80]!r}; {USE_ANOTHER}"
            )

    def _has_changed(self, answer: HTTPResponse) -> bool:
        header = "ETag" if _is_etag(self.version) else "Last-Modified"
        return not self._of_hub and answer.getheader(header, self.version) != self.version


def _is_etag(version: str) -> bool:
    return version.startswith('"')


def refuse_status(name: str, answer: HTTPResponse) -> None:
    """Raise for an answer that is an error."""
    status = answer.status
    if status in TRANSIENT:
        text = f"the server answers with status {status}"
        raise TransientError(
            text, wait_s=_retry_after(answer.getheader("Retry-After", "")), is_throttled=status in THROTTLED
        )
    if status in DENIED:
        raise CheckpointError(
            f"{name}: the server refuses access (status {status}); check the credentials, and that they may read it"
        )
    if status in (404, 410):
        raise CheckpointError(f"{name}: is not there (status {status})")
    if status >= 400 and status not in (412, 416):
        raise CheckpointError(f"{name}: the server answers with status {status}")


def _retry_after(text: str) -> float:
    return min(MAX_WAIT_S, float(text)) if re.fullmatch(r"\d{1,6}", text) else 0.0


@contextlib.contextmanager
def requested(
    method: str, url: str, headers: Headers, private: Callable[[], Headers], *, first: str
) -> Iterator[tuple[str, HTTPResponse]]:
    """Yield where the redirects end, and the answer from there, whose body has not been read.

    `private` headers go to the host of `first` only. TransientError: there is no answer, or the body breaks off.
    """
    answer: HTTPResponse | None = None
    try:
        for _ in range(MAX_REDIRECTS + 1):
            own = private() if _host(url) == _host(first) else {}
            answer = _CONNECTIONS.ask(method, url, {"Accept-Encoding": "identity", **headers, **own})
            target = answer.headers.get("Location")
            if answer.status not in REDIRECTS or target is None:
                break
            url = _checked_redirect(first, urljoin(url, target))
            _CONNECTIONS.leave(answer)
        else:
            raise CheckpointError(f"{plain_url(first)}: redirects more than {MAX_REDIRECTS} times")
        yield url, answer
    except CheckpointError:
        raise
    except (InvalidURL, ValueError):
        raise CheckpointError(f"{plain_url(url)}: is no URL; write other characters than ASCII as %..") from None
    except (OSError, HTTPException) as error:
        raise TransientError(without_secrets(f"{type(error).__name__}: {error}")) from None
    finally:
        if answer is not None:
            _CONNECTIONS.leave(answer)


def _checked_redirect(first: str, url: str) -> str:
    scheme = urlsplit(url).scheme
    if scheme == "https" or (scheme == "http" and urlsplit(first).scheme == "http" and _is_local(first)):
        return url
    raise CheckpointError(f"{plain_url(first)}: redirects to {plain_url(url)}, which is not https; name an https URL")


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_private
    return host == "localhost" or host.endswith(".localhost")


def _host(url: str) -> tuple[str, str]:
    return urlsplit(url).scheme, urlsplit(url).netloc


def _fill(name: str, memory: memoryview, answer: HTTPResponse, check: Callable[[], object], until_s: float) -> None:
    """Read a body into memory. A body that is longer is an error as well."""
    filled = 0
    while filled < memory.nbytes:
        num_bytes = _received(answer, memory[filled : filled + PART_BYTES])
        if not num_bytes:
            raise TransientError(f"the server sent {filled} bytes, expected {memory.nbytes}")
        filled += num_bytes
        check()
        if time.monotonic() > until_s:
            raise TransientError(f"the server sent only {filled} bytes of {memory.nbytes} in time")
    if answer.read(1):
        raise CheckpointError(f"{name}: the server sent more than {memory.nbytes} bytes; {USE_ANOTHER}")


def _received(answer: HTTPResponse, memory: memoryview) -> int:
    """Receive once, where the length of the body is known: `readinto` would wait until the memory is full."""
    if answer.chunked or answer.length is None:
        return answer.readinto(memory)
    num_bytes = answer.fp.readinto1(memory[: answer.length])
    answer.length -= num_bytes
    return num_bytes


class _OpenConnections(dict[tuple[str, str], HTTPConnection]):
    """Connections by host, which end with the thread that has them."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __del__(self) -> None:
        for connection in self.values() if self._pid == os.getpid() else ():  # a forked process must not touch them
            connection.close()


class _Connections(threading.local):
    """Open connections of each thread, by host. A thread has one request at a time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, without connections."""
        self._open: dict[tuple[str, str], HTTPConnection] = _OpenConnections()
        self._of_answer: dict[int, tuple[str, str]] = {}

    def ask(self, method: str, url: str, headers: Headers) -> HTTPResponse:
        """Make a request; return the answer, whose body has not been read. `leave` it before the next one."""
        parts, key = urlsplit(url), _host(url)
        if parts.username is not None:
            headers = {**headers, "Authorization": _basic(parts.username, parts.password or "")}
        target = parts._replace(scheme="", netloc="", fragment="", path=parts.path or "/").geturl()
        if parts.scheme == "http" and (proxy := _proxy(url)) is not None:  # asked for the URL, not for a tunnel
            netloc = parts.netloc.rpartition("@")[2]
            target = parts._replace(netloc=netloc, fragment="", path=parts.path or "/").geturl()
            headers = {**headers, **_login(proxy)}
        for may_be_stale in (key in self._open, False):
            connection = self._open.pop(key, None) or _connected(url)
            try:
                connection.request(method, target, headers=dict(headers))
                answer = connection.getresponse()
                break
            except (HTTPException, OSError) as error:
                connection.close()
                # A server closes a connection that was idle for long.
                if not may_be_stale or isinstance(error, TimeoutError):
                    raise
        if not answer.will_close:
            self._open[key] = connection
        self._of_answer[id(answer)] = key
        return answer

    def leave(self, answer: HTTPResponse) -> None:
        """Have the connection ready for another request, or close it."""
        key = self._of_answer.pop(id(answer), None)
        if not answer.isclosed() and 0 < (answer.length or 0) <= MAX_LEFT_BYTES:
            with contextlib.suppress(OSError, HTTPException):
                answer.read()
        if not answer.isclosed() and key in self._open:
            self._open.pop(key).close()
        answer.close()


_CONNECTIONS = _Connections()
os.register_at_fork(after_in_child=_CONNECTIONS.reset)


def _basic(user: str, password: str) -> str:
    import base64

    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()


def _proxy(url: str) -> SplitResult | None:
    """Return the proxy that the environment names for a URL, if any."""
    parts, found = urlsplit(url), getproxies()
    proxy = found.get(parts.scheme) or found.get("all")
    if proxy is None or proxy_bypass(parts.hostname or "") or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if through.scheme != "http":
        raise ConfigError(f"the environment names a proxy by {through.scheme}://; only http:// proxies can be used")
    return through


def _login(proxy: SplitResult) -> Headers:
    return {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy.username, proxy.password or "")}


def _connected(url: str) -> HTTPConnection:
    """Return a new connection, through the proxy if there is one."""
    parts, proxy = urlsplit(url), _proxy(url)
    is_secure = parts.scheme == "https"
    there = parts.hostname or "", parts.port or (443 if is_secure else 80)
    host, port = there if proxy is None else (proxy.hostname or "", proxy.port or 80)
    options: dict[str, Any] = {"timeout": TIMEOUT_S, "blocksize": PART_BYTES}
    if not is_secure:
        return HTTPConnection(host, port, **options)
    connection = HTTPSConnection(host, port, context=_tls(), **options)
    if proxy is not None:
        connection.set_tunnel(*there, headers=_login(proxy))
    return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return a context that trusts what huggingface_hub's client trusts."""
    if file := os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE"):
        return ssl.create_default_context(cafile=file)
    with contextlib.suppress(ImportError):
        import certifi  # type: ignore[import-not-found]  # httpx and requests bring it

        return ssl.create_default_context(cafile=certifi.where())
    return ssl.create_default_context()
