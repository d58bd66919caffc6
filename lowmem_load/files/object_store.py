"""Files in S3, GCS and Azure, on HTTP servers and on the Hub, through obstore (Rust's object_store).

Checked with obstore 0.12, which makes requests again that fail in a way that may pass, also in the middle of a body.
Each file is pinned to the ETag, or the date, that it had when it was found. Only pages that list the files of an HTTP
server are fetched otherwise: obstore needs their length, which servers do not send.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import Request, urlopen

import huggingface_hub
import obstore
from huggingface_hub.utils import build_hf_headers
from obstore import exceptions
from obstore.store import HTTPStore, from_url

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.text import is_http, plain_url, without_secrets

T = TypeVar("T")

TIMEOUT_S = 15.0
"""Seconds without a byte after which a request fails."""

PATIENCE_S = 30.0
"""Seconds for which obstore makes a request again, after delays that double and are drawn at random."""

DELAYS_S = (0.2, 1.0, 4.0)
"""Seconds before each further attempt of the few requests that obstore does not make."""

PART_BYTES = 1 << 20
"""Bytes of a body that arrive before they are copied."""

MAX_LIST_NBYTES = 16 << 20
"""Most bytes of a list of files."""

LIST_S = 60.0
"""Seconds in which a list of files has to come: a server that sends a byte now and then would never end."""

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
"""Environment variables that name another server than the provider's."""

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers after which a request may be made again."""

EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Answers of stores to a signed URL that has expired."""

USE_ANOTHER = "use a server that serves ranges, or download the checkpoint and name its folder"

_used_by: list[int] = []  # the process that has used obstore


class RefusedError(CheckpointError):
    """The store answers with a status that is an error."""

    def __init__(self, text: str, status: int = 0) -> None:  # pickle passes the text alone
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class RemoteObject:
    """One version of one file in an object store, on an HTTP server or on the Hub.

    A commit on the Hub cannot change. The URL to which the Hub redirects is looked up once, and used until it has
    expired, because the Hub limits requests.
    """

    url: str
    """The URL of the folder, or that of the file itself on the Hub, without credentials, also those of HF_ENDPOINT."""
    key: str
    """The path in the folder; "" on the Hub."""
    nbytes: int
    version: str
    """An ETag or a date, as `_version` returns it; a commit on the Hub. Equal on all ranks."""
    written: float = 0.0
    """When it was written, as the store says, in seconds; 0 if that is not known."""
    unsigned: bool = False
    """Whether the store is asked without credentials."""
    on_hub: bool = False
    secret: str | bool | None = field(default=None, repr=False)
    """The URL with the login and the query that requests need; the token of the Hub. It is never written to a file."""
    _location: str = field(default="", init=False, repr=False)

    @property
    def name(self) -> str:
        """The URL of the file without credentials, for messages."""
        return _name(self.url, self.key)

    def fetch(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `offset` on. CheckpointError: the file has changed or cannot be read."""
        if self.on_hub:
            self._fetch_from_hub(offset, memory)
            return
        if self.version.startswith('"'):
            condition: dict[str, Any] = {"if_match": self.version}
        else:
            condition = {"if_unmodified_since": datetime.fromisoformat(self.version)}
        store = open_store(str(self.secret or self.url), unsigned=self.unsigned)
        found = _get(self.name, store, self.key, offset, memory, condition)
        # Some servers ignore conditions, so what they say of the version is compared as well.
        if found not in ("", self.version):
            raise replaced_error(self.name)

    def _fetch_from_hub(self, offset: int, memory: memoryview) -> None:
        if self._location:
            try:
                self._fetch_at(self._location, offset, memory)
                return
            except RefusedError as error:
                if error.status not in EXPIRED:
                    raise
        location = self._look_up()
        self._fetch_at(location, offset, memory)
        self._location = location

    def _fetch_at(self, location: str, offset: int, memory: memoryview) -> None:
        is_redirect = urlsplit(plain_url(location)).netloc != urlsplit(self.name).netloc
        headers = {} if is_redirect else build_hf_headers(token=self.secret)
        location = location if is_redirect else _with_endpoint_login(location)
        folder, _, key = urlsplit(location).path.rpartition("/")
        store = open_store(urlsplit(location)._replace(path=folder).geturl(), headers)
        _get(self.name, store, unquote(key), offset, memory, {})

    def _look_up(self) -> str:
        url = _with_endpoint_login(self.name)
        try:
            location = str(_repeated(lambda: huggingface_hub.get_hf_file_metadata(url, token=self.secret)).location)
        except huggingface_hub.errors.HfHubHTTPError as error:
            raise _status_error(self.name, error.response.status_code) from None
        except Exception as error:  # noqa: BLE001  of the client that huggingface_hub uses
            raise _status_error(self.name, 0, without_secrets(f"{type(error).__name__}: {error}")) from None
        if urlsplit(location).scheme != urlsplit(self.name).scheme == "https":
            raise _redirect_error(self.name)
        return location


def _with_endpoint_login(url: str) -> str:
    """Return a URL of the Hub with the login that HF_ENDPOINT has, if it names the same server with one."""
    endpoint, parts = urlsplit(huggingface_hub.constants.ENDPOINT), urlsplit(url)
    is_same = (parts.scheme, parts.netloc) == (endpoint.scheme, endpoint.netloc.rpartition("@")[2])
    return parts._replace(netloc=endpoint.netloc).geturl() if is_same else url


def _get(name: str, store: Any, key: str, offset: int, memory: memoryview, condition: Mapping[str, Any]) -> str:
    """Fill memory with the bytes of a file from `offset` on; return the version that the answer has."""
    with _translate_errors(name):
        options: Any = {"range": (offset, offset + memory.nbytes), **condition}
        result = obstore.get(store, key, options=options)
        encoding: Any = result.attributes.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise CheckpointError(f"{name}: the server sends compressed bytes ({encoding:.20}); {USE_ANOTHER}")
        filled = 0
        for part in result.stream(min_chunk_size=PART_BYTES):
            view = memoryview(part)
            if filled + view.nbytes > memory.nbytes:
                raise CheckpointError(f"{name}: the store sent more than {memory.nbytes} bytes; {USE_ANOTHER}")
            memory[filled : filled + view.nbytes] = view
            filled += view.nbytes
    if filled < memory.nbytes:
        raise CheckpointError(f"{name}: the store sent {filled} bytes, expected {memory.nbytes}; load again")
    return _version(result.meta)


# -- finding files -----------------------------------------------------------------------------------------------------


def list_files(url: str, *subfolders: str, below: bool = False) -> dict[str, RemoteObject]:
    """Return the files in a folder of an object store, and in some subfolders of it, by path inside the folder.

    `below`: also those in folders inside of the subfolders.

    Where S3 needs credentials and the environment names none, it is asked without a signature first: the bucket may be
    public, and to ask the machine for its role takes long where it has none.
    """
    has_credentials = any(name in os.environ for name in _IN_ENVIRONMENT) or "credential_provider" in aws_settings()
    if not url.startswith("s3") or has_credentials:
        return _list(url, subfolders, unsigned=False, below=below)
    try:
        return _list(url, subfolders, unsigned=True, below=below)
    except CheckpointError:
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise
        return _list(url, subfolders, unsigned=False, below=below)


def _list(url: str, subfolders: Iterable[str], *, unsigned: bool, below: bool) -> dict[str, RemoteObject]:
    store = open_store(url, unsigned=unsigned)
    with _translate_errors(plain_url(url)):
        files: dict[str, RemoteObject] = {}
        for prefix in dict.fromkeys(("", *(folder.strip("/") for folder in subfolders))):
            if below and prefix:
                objects: Iterable[Any] = next(iter(obstore.list(store, prefix, chunk_size=8192)), ())  # more is refused
            else:
                objects = obstore.list_with_delimiter(store, prefix or None)["objects"]
            for meta in objects:
                if meta["path"] not in ("", prefix):  # an empty object that marks a folder
                    files[meta["path"]] = _object(url, meta, unsigned=unsigned)
        return files


def find(url: str, file: str) -> RemoteObject | None:
    """Return a file in the folder of an HTTP server at a URL; None if it is not there.

    It is found by GET of its first byte: HEAD is often refused, or answered with another size.
    """
    store = open_store(url)
    with _translate_errors(_name(url, file)):
        try:
            return _object(url, obstore.get(store, file, options={"range": (0, 1)}).meta)
        except FileNotFoundError:
            return None
        except exceptions.BaseError as error:
            if "416" not in summary(error):  # the file is empty
                raise
            return _object(url, obstore.get(store, file).meta)


def _object(url: str, meta: Any, *, unsigned: bool = False) -> RemoteObject:
    version = _version(meta)
    if not version:
        raise CheckpointError(
            f"{_name(url, meta['path'])}: the server sends no ETag and no Last-Modified, without which a file that is "
            "replaced goes unnoticed; use another server, or download the checkpoint"
        )
    written = meta["last_modified"].timestamp()
    return RemoteObject(plain_url(url), meta["path"], meta["size"], version, written, unsigned, secret=url)


def _version(meta: Any) -> str:
    """Return the ETag as HTTP has it, with quotes that lists of Azure and GCS leave out; else the date; else ""."""
    tag, changed = meta["e_tag"], meta["last_modified"]
    if tag is not None and not tag.startswith("W/"):  # a weak tag cannot be a condition
        return f'"{tag.strip(chr(34))}"'
    return changed.isoformat() if changed.timestamp() > 0 else ""  # obstore's default is 1970


def read_list(folder: str, file: str) -> bytes | None:
    """Return a file of an HTTP server that lists others, or for "" the page of the folder; None if it is not there."""
    parts = urlsplit(folder)
    path = f"{parts.path.rstrip('/')}/{quote(file)}"
    plain, headers = _split_login(parts._replace(path=quote(path, safe="/%")).geturl())
    name, request = plain_url(plain), Request(plain)
    for key, value in headers.items():
        request.add_unredirected_header(key, value)

    def read() -> bytes:
        with urlopen(request, timeout=TIMEOUT_S, context=ssl.create_default_context(cafile=_own_roots())) as response:
            if urlsplit(response.geturl()).scheme != parts.scheme == "https":
                raise _redirect_error(name)
            return _body(response, name)

    try:
        return _repeated(read)
    except HTTPError as error:
        error.close()
        if error.code in (404, 410):
            return None
        raise _status_error(name, error.code) from None
    except (OSError, HTTPException) as error:
        raise _status_error(name, 0, without_secrets(f"{type(error).__name__}: {error}")) from None


def _body(response: HTTPResponse, name: str) -> bytes:
    """Return what a server sends. CheckpointError: it is too much, or comes too slowly."""
    content, missing, give_up_s = bytearray(), response.length, time.monotonic() + LIST_S
    while missing != 0 and (part := response.read1(PART_BYTES if missing is None else min(missing, PART_BYTES))):
        content += part
        missing = None if missing is None else missing - len(part)
        if len(content) > MAX_LIST_NBYTES:
            raise CheckpointError(f"{name}: has more than {MAX_LIST_NBYTES} bytes, so it is not a list of files")
        if time.monotonic() > give_up_s:
            raise CheckpointError(f"{name}: only {len(content)} bytes of this list of files came in {LIST_S:g} s")
    if missing:
        raise IncompleteRead(bytes(content), missing)
    return bytes(content)


def _repeated(request: Callable[[], T]) -> T:
    """Return what a request returns. It is made again after an error that may pass."""
    for delay_s in DELAYS_S:
        try:
            return request()
        except Exception as error:  # of urllib, or of the client that huggingface_hub uses
            status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, CheckpointError) or (status is not None and status not in TRANSIENT):
                raise
        time.sleep(delay_s)
    return request()


def _name(url: str, key: str) -> str:
    return "/".join(filter(None, (plain_url(url).rstrip("/"), key)))


# -- stores ------------------------------------------------------------------------------------------------------------


def open_store(url: str, headers: Mapping[str, str] | None = None, *, unsigned: bool = False, patience: int = 1) -> Any:
    """Return obstore's store of a URL, which has asked nobody yet. `headers` go with each request.

    Answers get `patience` times as long.
    """
    prefixes = ("AWS_", "AZURE_", "GOOGLE_", "HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    environment = (item for item in os.environ.items() if item[0].startswith(prefixes))
    key = (*environment, TIMEOUT_S, PATIENCE_S, os.getpid())
    return _store(url, tuple((headers or {}).items()), unsigned, patience, key)


@functools.lru_cache(maxsize=64)
def _store(url: str, headers: tuple[tuple[str, str], ...], unsigned: bool, patience: int, _: object) -> Any:
    """Return the store by settings, environment and process. It is kept, with its connections.

    Raises ConfigError in a process that was forked from one that has used obstore.
    """
    plain, login = _split_login(url)
    options: Any = {"timeout": f"{10 * TIMEOUT_S:g}s", "connect_timeout": "5s"}
    options["read_timeout"] = f"{patience * TIMEOUT_S:g}s"
    options["default_headers"] = {"Accept-Encoding": "identity", **dict(headers), **login}
    if (roots := _own_roots()) is not None:
        options["root_certificate"] = Path(roots).read_bytes()
    config: dict[str, Any] = aws_settings() if url.startswith("s3") else {}
    if unsigned:
        config["skip_signature"] = "true"
    endpoints = [url, config.get("endpoint", ""), *(os.environ.get(name, "") for name in ENDPOINTS)]
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        options["allow_http"] = True  # as the owner of the environment says; else a redirect from https is refused
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
    patience_s = timedelta(seconds=patience * PATIENCE_S)
    retries: Any = {"max_retries": 1000, "retry_timeout": patience_s, "backoff": backoff}
    try:
        if is_http(url):
            store: Any = HTTPStore.from_url(plain, client_options=options, retry_config=retries)
        else:
            store = from_url(plain_url(url), client_options=options, retry_config=retries, **config)
    except (exceptions.BaseError, ValueError) as error:
        reason = without_secrets(str(error).partition("\n")[0])[:200]
        raise CheckpointError(f"{plain_url(url)}: is not the URL of a store, or lacks settings: {reason}") from None
    if _used_by and _used_by[0] != os.getpid():  # threads of obstore are not in this process, so it would hang
        raise ConfigError(
            f"{plain_url(url)}: this process was forked from one that has read from a store; start it by spawn"
        )
    _used_by[:] = [os.getpid()]
    return store


def _split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its login, and the header that has it."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, {"Authorization": f"Basic {base64.b64encode(login).decode()}"}


def _own_roots() -> str | None:
    return os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or None


_IN_ENVIRONMENT = (
    *("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables of which each one says who asks, or that nobody does; obstore takes them."""


def aws_settings() -> dict[str, Any]:
    """Return the settings of obstore by the profile in `~/.aws`, read by boto3, unless the environment says who asks.

    Raises ConfigError without boto3, and for a profile that is not there.
    """
    files = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    has_files = any(os.path.isfile(os.path.expanduser(os.environ.get(name) or path)) for name, path in files)
    if any(name in os.environ for name in _IN_ENVIRONMENT) or not (has_files or os.environ.get("AWS_PROFILE")):
        return {}
    try:
        import boto3  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ConfigError("the profile of AWS (AWS_PROFILE, ~/.aws) is read by boto3: pip install boto3") from error
    settings: dict[str, Any] = {}
    try:
        client = (session := boto3.Session()).client("s3", region_name=None if session.region_name else "us-east-1")
        if session.get_credentials() is not None:
            settings["credential_provider"] = Boto3CredentialProvider(session)
    except Exception as error:  # of botocore, whose classes have no common base
        raise ConfigError(f"the profile of AWS (AWS_PROFILE, ~/.aws) cannot be used: {error}") from error
    if "AWS_REGION" not in os.environ and session.region_name:
        settings["region"] = session.region_name
    if ".amazonaws.com" not in client.meta.endpoint_url:
        settings["endpoint"] = client.meta.endpoint_url
    return settings


# -- errors ------------------------------------------------------------------------------------------------------------


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    try:
        yield
    except exceptions.PreconditionError:
        raise replaced_error(name) from None
    except (exceptions.NotFoundError, FileNotFoundError):
        raise _status_error(name, 404) from None
    except exceptions.BaseError as error:
        what = summary(error)
        if "non-partial" in str(error) or isinstance(error, exceptions.NotSupportedError):
            raise CheckpointError(f"{name}: the store does not serve ranges; {USE_ANOTHER}") from None
        if "builder error" in what or "error following redirect" in what:
            raise _redirect_error(name) from None
        status = int(code[0]) if (code := re.search(r"\b[345]\d\d\b", what)) is not None else 0
        raise _status_error(name, status, what) from None


def _status_error(name: str, status: int, what: str = "") -> CheckpointError:
    """Return the error for an answer with this status; 0 if there was no answer."""
    if status == 416:
        return replaced_error(name)
    reason = what or f"status {status}"
    text = f"cannot be read: {reason}"
    if status in (401, 403):
        text = f"the store refuses access ({reason}); check the credentials, and that they may list and read it"
    elif status in (404, 410):
        text = "is not there"
    return RefusedError(f"{name}: {text}", status)


def replaced_error(name: str) -> CheckpointError:
    """Return the error for a file that has another version than it had when it was found."""
    return CheckpointError(f"{name}: was replaced after its header was read; load again once nobody writes to it")


def _redirect_error(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: redirects from https to what is not https, or endlessly; name the URL that it leads to"
    )


def summary(error: Exception) -> str:
    """Return what an error of obstore says, without its text, which quotes answers that may have session tokens."""
    text = str(error)
    patterns = r"status: (\d{3})", r"\b(\d{3}) [A-Z][a-z]+", r"<Code>(\w{1,64})</Code>", r"kind: (\w{1,32})"
    matches = (re.search(pattern, text) for pattern in patterns)
    causes = (
        *("request or response body error", "error sending request", "builder error", "error following redirect"),
        *("Requested", "incorrectly configured region"),  # S3 redirects to another region
    )
    details = [match[1] for match in matches if match] + [cause for cause in causes if cause in text][:1]
    if "169.254.169.254" in text:  # where machines of the providers have their credentials
        details.append("asked this machine for credentials, as the environment does not have any")
    return ", ".join(dict.fromkeys([type(error).__name__, *details]))
