"""Files on HTTP servers and on the Hub: requests for ranges, redirects, and what the answers mean.

The client is urllib3, which huggingface_hub's requests used: it reads a GB in the processor time that Python's own
client takes. httpx, which huggingface_hub uses now, takes more than twice as long (range server, one core each).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from huggingface_hub.utils import build_hf_headers

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io.remote_file import (
    MAX_IN_FLIGHT,
    TIMEOUT_S,
    RemoteObject,
    TransientError,
    replaced_error,
)
from lowmem_load.io.stand_ins import plain_url

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
THROTTLED = frozenset({429, 503})
"""Answers after which a request may be made again; those that mean "slow down"."""

DENIED = frozenset({401, 403})
EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Answers of stores to a signed URL that has expired."""

MAX_LIST_NBYTES = 16 << 20
"""Most bytes of a list of files."""

MAX_REDIRECTS = 5

USE_ANOTHER = "use a server that serves ranges, or download the checkpoint and name its folder"

MAX_WAIT_S = 60.0
"""Longest `Retry-After` that is obeyed."""

PART_BYTES = 1 << 20
"""Most bytes of a body between two looks whether it is still wanted."""

LEAST_BYTES_PER_S = 64 << 10
"""A body that comes slower, beside `TIMEOUT_S`, is requested anew: a server may send a byte now and then for ever."""

MAX_LEFT_BYTES = 64 << 10
"""Most bytes of a body that nobody wants which are read, so that the connection can be used again."""

Headers = Mapping[str, str]


class HttpObject:
    """A `RemoteObject` on an HTTP server.

    Args:
        url: of the file. Its redirect is followed once and then used until it is refused: signed URLs expire.
        nbytes: its size.
        version: its ETag or date; for the Hub, its hash.
        headers: of each request to the host of `url`: a token.
        of_hub: whether it is a file of one commit on the Hub, which cannot change: `version` is no condition then.
    """

    def __init__(
        self,
        url: str,
        nbytes: int,
        version: str,
        headers: Callable[[], Headers] = dict,
        *,
        of_hub: bool = False,
    ) -> None:
        self.name, self.nbytes, self.version = plain_url(url), nbytes, version
        self._url, self._headers, self._of_hub = url, headers, of_hub
        self._location = url  # where `url` redirects to

    @property
    def entry(self) -> dict[str, Any]:
        """See `RemoteObject`."""
        return {"url": self.name, "size": self.nbytes, "etag": self.version, "store": False, "hub": self._of_hub}

    def fetch(self, offset: int, memory: memoryview, check: Callable[[], object]) -> None:
        """See `RemoteObject`."""
        if not memory:
            return
        headers = {"Range": f"bytes={offset}-{offset + memory.nbytes - 1}"}
        if not self._of_hub:
            headers["If-Match" if _is_etag(self.version) else "If-Unmodified-Since"] = self.version
        location = self._location
        with _request("GET", location, headers, self._headers, first=self._url) as (final_url, response):
            if response.status in EXPIRED and location != self._url:
                self._location = self._url  # the signed URL has expired
                raise TransientError(f"the URL to which it redirects has expired (status {response.status})")
            self._check_response(response, offset, memory.nbytes)
            self._location = final_url
            deadline_s = time.monotonic() + TIMEOUT_S + memory.nbytes / LEAST_BYTES_PER_S
            _read_body(self.name, response, memory, check, deadline_s)

    def _check_response(self, response: urllib3.BaseHTTPResponse, offset: int, nbytes: int) -> None:
        refuse_status(self.name, response)
        headers, status = response.headers, response.status
        tag_header = "ETag" if _is_etag(self.version) else "Last-Modified"
        # Some servers ignore conditions, so what they say of the version is compared as well.
        has_changed = not self._of_hub and headers.get(tag_header, self.version) != self.version
        if status in (412, 416) or has_changed:
            raise replaced_error(self.name)
        if headers.get("Content-Encoding", "identity") != "identity":  # a few bytes may unpack to any number
            raise CheckpointError(f"{self.name}: the server sent compressed bytes although identity was asked for")
        if status == 200 and (offset, nbytes) == (0, self.nbytes):
            return
        wanted, sent = f"bytes {offset}-{offset + nbytes - 1}/", str(headers.get("Content-Range", ""))[:80]
        is_multiple = headers.get("Content-Type", "").startswith("multipart/")
        if status == 206 and not sent and not is_multiple and headers.get("Content-Length") == str(nbytes):
            return  # some servers leave the range out; its length is right
        shorter = re.fullmatch(rf"bytes {offset}-(\d+)/{self.nbytes}", sent) if status == 206 else None
        if shorter is not None and (last := int(shorter[1])) < offset + nbytes - 1:
            raise TransientError(f"the server sent {last - offset + 1} bytes, expected {nbytes}")
        if status != 206 or sent not in (f"{wanted}{self.nbytes}", f"{wanted}*"):
            raise CheckpointError(
                f"{self.name}: the server answers a request for {wanted}{self.nbytes} with status {status} and "
                f"range {sent!r}; {USE_ANOTHER}"
            )


def hub_object(url: str, nbytes: int, version: str, token: str | bool | None) -> HttpObject:
    """Return a file on the Hub; see `HttpObject`."""
    return HttpObject(url, nbytes, version, lambda: build_hf_headers(token=token), of_hub=True)


def with_secret(url: str, secret: str | None) -> str:
    """Return a URL with the login and the query of another one."""
    if secret is None:
        return url
    of_secret, parts = urlsplit(secret), urlsplit(url)
    login, at, _ = of_secret.netloc.rpartition("@")
    return parts._replace(netloc=f"{login}{at}{parts.netloc}", query=of_secret.query).geturl()


def _at(folder: str, file: str) -> str:
    parts = urlsplit(folder)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{quote(file)}").geturl()


def read_list(folder: str, file: str) -> bytes | None:
    """Return a file that lists others, or the page of the folder for ""; None if there is none."""
    url = _at(folder, file)
    with _request("GET", url, {}, dict, first=url) as (_, response):
        if response.status in (404, 410):
            return None
        refuse_status(plain_url(url), response)
        content = response.read(MAX_LIST_NBYTES + 1)
        if len(content) > MAX_LIST_NBYTES:
            raise CheckpointError(f"{plain_url(url)}: has more than {MAX_LIST_NBYTES} bytes, which is no list of files")
        return bytes(content)


def find(folder: str, file: str) -> RemoteObject | None:
    """Return a file in the folder at a URL; None if it is not there.

    It is found by GET of its first byte: what servers answer to HEAD is often refused, or says another size.
    """
    url = _at(folder, file)
    with _request("GET", url, {"Range": "bytes=0-0"}, dict, first=url) as (_, response):
        if response.status != 206 or re.search(r"/\d+\Z", response.headers.get("Content-Range", "")):
            return _object(url, response)
    with _request("GET", url, {}, dict, first=url) as (_, response):
        return _object(url, response)


def _object(url: str, response: urllib3.BaseHTTPResponse) -> RemoteObject | None:
    if response.status in (404, 410):
        return None
    if response.status != 416:  # the file is empty
        refuse_status(plain_url(url), response)
    if response.status in (206, 416):
        nbytes = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        nbytes = response.headers.get("Content-Length", "")
    tag = response.headers.get("ETag", "")
    version = tag if _is_etag(tag) else response.headers.get("Last-Modified")  # a weak tag is no condition
    if not version or not re.fullmatch(r"[0-9]{1,15}", nbytes):
        raise CheckpointError(
            f"{plain_url(url)}: the server sends no {'size' if version else 'ETag and no Last-Modified'}, without "
            "which a file that is replaced goes unnoticed; use another server, or download the checkpoint"
        )
    return HttpObject(url, int(nbytes), version)


def _is_etag(version: str) -> bool:
    return version.startswith('"')


def refuse_status(name: str, response: urllib3.BaseHTTPResponse) -> None:
    """Raise for an answer that is an error."""
    status = response.status
    if status in TRANSIENT:
        wait = response.headers.get("Retry-After", "")
        wait_s = min(MAX_WAIT_S, float(wait)) if re.fullmatch(r"\d{1,6}", wait) else 0.0
        text = f"the server answers with status {status}"
        raise TransientError(text, wait_s=wait_s, is_throttled=status in THROTTLED)
    if status in DENIED:
        raise CheckpointError(
            f"{name}: the server refuses access (status {status}); check the credentials, and that they may read it"
        )
    if status in (404, 410):
        raise CheckpointError(f"{name}: is not there (status {status})")
    if status >= 400 and status not in (412, 416):
        raise CheckpointError(f"{name}: the server answers with status {status}")


# -- requests ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _request(
    method: str, url: str, headers: Headers, private: Callable[[], Headers], *, first: str
) -> Iterator[tuple[str, urllib3.BaseHTTPResponse]]:
    """Yield where the redirects end, and the answer from there, whose body has not been read.

    `private` headers go to the host of `first` only. TransientError: there is no answer, or the body breaks off.
    """
    response: urllib3.BaseHTTPResponse | None = None
    try:
        for _ in range(MAX_REDIRECTS + 1):
            own = private() if _host(url) == _host(first) else {}
            response = _send(method, url, {**headers, **own})
            location = response.get_redirect_location()
            if not location:
                break
            _release(response)
            url = _checked_redirect(first, urljoin(url, location))
        else:
            raise CheckpointError(f"{plain_url(first)}: redirects more than {MAX_REDIRECTS} times")
        yield url, response
    except (CheckpointError, ConfigError):
        raise
    except ValueError:  # of urllib and urllib3
        raise CheckpointError(f"{plain_url(url)}: is no URL; write other characters than ASCII as %..") from None
    except (OSError, HTTPException, urllib3.exceptions.HTTPError) as error:
        is_wrapped = isinstance(error, urllib3.exceptions.ProtocolError) and isinstance(error.args[-1], Exception)
        cause = error.args[-1] if is_wrapped else error
        raise TransientError(without_secrets(f"{type(cause).__name__}: {cause}")) from None
    finally:
        if response is not None:
            _release(response)


def _send(method: str, url: str, headers: Headers) -> urllib3.BaseHTTPResponse:
    parts = urlsplit(url)
    login = {} if parts.username is None else {"Authorization": _basic(parts.username, parts.password)}
    url = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
    return _client(_proxy(url)).request(
        method,
        url,
        headers={"Accept-Encoding": "identity", **headers, **login},
        preload_content=False,
        decode_content=False,
        redirect=False,  # from https to http is refused, and the last location is kept
        retries=False,
        timeout=TIMEOUT_S,  # to connect, and between two arrivals of bytes
    )


def _release(response: urllib3.BaseHTTPResponse) -> None:
    """Have the connection ready for another request; close it where much of the body is left."""
    if response.length_remaining is not None and response.length_remaining <= MAX_LEFT_BYTES:
        response.drain_conn()
    response.close()


def _read_body(
    name: str, response: urllib3.BaseHTTPResponse, memory: memoryview, check: Callable[[], object], deadline_s: float
) -> None:
    """Read a body into memory. A body that is longer is an error as well."""
    filled = 0
    while filled < memory.nbytes:
        part = response.read1(min(PART_BYTES, memory.nbytes - filled))  # what one call of the system returns
        if not part:
            raise TransientError(f"the server sent {filled} bytes, expected {memory.nbytes}")
        memory[filled : filled + len(part)] = part
        filled += len(part)
        check()
        if time.monotonic() > deadline_s:
            raise TransientError(f"the server sent only {filled} bytes of {memory.nbytes} in time")
    if response.read(1):
        raise CheckpointError(f"{name}: the server sent more than {memory.nbytes} bytes; {USE_ANOTHER}")


def _checked_redirect(first: str, url: str) -> str:
    if urlsplit(url).scheme == "https" or urlsplit(url).scheme == urlsplit(first).scheme == "http":
        return url
    raise CheckpointError(f"{plain_url(first)}: redirects to {plain_url(url)}, which is not https; name an https URL")


def _host(url: str) -> tuple[str, str]:
    return urlsplit(url).scheme, urlsplit(url).netloc


# -- the client --------------------------------------------------------------------------------------------------------


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, if any."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


@functools.cache
def _client(proxy: str | None) -> urllib3.PoolManager:
    """Return the open connections of this process, through a proxy if there is one."""
    ca_certs = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE")
    if not ca_certs:
        with contextlib.suppress(ImportError):
            import certifi  # huggingface_hub's client brings and trusts it

            ca_certs = certifi.where()
    if proxy is None:
        return urllib3.PoolManager(maxsize=MAX_IN_FLIGHT, ca_certs=ca_certs)
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"the environment names a proxy by {parts.scheme}://; only http(s):// proxies can be used")
    login = {} if parts.username is None else {"Proxy-Authorization": _basic(parts.username, parts.password)}
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return urllib3.ProxyManager(address, proxy_headers=login, maxsize=MAX_IN_FLIGHT, ca_certs=ca_certs)


os.register_at_fork(after_in_child=_client.cache_clear)  # two processes must not use one connection


def _basic(user: str, password: str | None) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()


def without_secrets(text: str) -> str:
    """Return a text without user names, passwords and queries in its URLs."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "", re.sub(r"\?[^\s'\"<>)]*", "?...", text))


def _hide_secrets(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(without_secrets(value) if isinstance(value, str) else value for value in record.args)
    return True


logging.getLogger("urllib3.connectionpool").addFilter(_hide_secrets)  # at level DEBUG it logs signed queries
