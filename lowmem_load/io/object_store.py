"""Files in S3, GCS and Azure, through obstore (Rust's object_store). Checked with obstore 0.12."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.io.http_files import DENIED, THROTTLED, TRANSIENT, USE_ANOTHER, without_secrets
from lowmem_load.io.remote_file import (
    TIMEOUT_S,
    RemoteObject,
    TransientError,
    replaced_error,
)
from lowmem_load.io.stand_ins import plain_url

PART_BYTES = 1 << 20
"""Bytes of a body that arrive before they are copied."""

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
"""Environment variables that name another server than the provider's."""

REGION = "incorrectly configured region"
"""In obstore's error where S3 redirects to another region."""

METADATA_HOST = "169.254.169.254"
"""Where machines of the providers have their credentials."""


_used_by: list[int] = []  # the process that has used obstore


class StoreObject:
    """A `RemoteObject` in an object store."""

    def __init__(self, store: Any, key: str, name: str, nbytes: int, version: str) -> None:
        self.name, self.nbytes, self.version = name, nbytes, version
        self._store, self._key = store, key

    def fetch(self, offset: int, memory: memoryview, check: Callable[[], object]) -> None:
        """See `RemoteObject`."""
        if not memory:
            return
        import obstore

        _check_process(self.name)
        with _translate_errors(self.name):
            options: Any = {"range": (offset, offset + memory.nbytes), "if_match": self.version}
            result = obstore.get(self._store, self._key, options=options)
            if result.meta["e_tag"] is not None and _quoted_tag(result.meta["e_tag"]) != self.version:
                raise replaced_error(self.name)
            filled = 0
            for part in result.stream(min_chunk_size=PART_BYTES):
                view = memoryview(part)
                if filled + view.nbytes > memory.nbytes:
                    raise CheckpointError(f"{self.name}: the store sent more than {memory.nbytes} bytes; {USE_ANOTHER}")
                memory[filled : filled + view.nbytes] = view
                filled += view.nbytes
                check()
        if filled < memory.nbytes:
            raise TransientError(f"the store sent {filled} bytes, expected {memory.nbytes}")


def list_files(url: str, subfolder: str) -> dict[str, RemoteObject]:
    """Return the files in a folder of an object store, and in one subfolder of it, by path inside the folder."""
    store = open_store(url)
    import obstore

    with _translate_errors(plain_url(url)):
        files: dict[str, RemoteObject] = {}
        for prefix in dict.fromkeys(("", subfolder.strip("/"))):
            for meta in obstore.list_with_delimiter(store, prefix or None)["objects"]:
                if meta["path"] not in ("", prefix):  # an empty object that marks a folder
                    files[meta["path"]] = _object(store, url, meta)
        return files


def find(store: Any, url: str, file: str) -> RemoteObject | None:
    """Return a file in the folder at a URL, given its store; None if it is not there."""
    import obstore

    name = f"{plain_url(url).rstrip('/')}/{file}"
    _check_process(name)
    with _translate_errors(name):
        try:
            return _object(store, url, obstore.head(store, file))
        except FileNotFoundError:
            return None


def _object(store: Any, url: str, meta: Any) -> StoreObject:
    name, tag = f"{plain_url(url).rstrip('/')}/{meta['path']}", meta["e_tag"]
    if tag is None:
        raise CheckpointError(f"{name}: the store gives no ETag, so it may change unseen")
    return StoreObject(store, meta["path"], name, meta["size"], _quoted_tag(tag))


def open_store(url: str) -> Any:
    """Return obstore's store of a URL, which has asked nobody yet."""
    try:
        from obstore import exceptions
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(
            f"{plain_url(url)}: install obstore to read from it: pip install 'lowmem-load[stores]'"
        ) from error
    options: Any = {"timeout": f"{10 * TIMEOUT_S:g}s", "read_timeout": f"{TIMEOUT_S:g}s", "connect_timeout": "5s"}
    if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS):
        options["allow_http"] = True  # as the owner of the environment says
    try:
        store = from_url(url, client_options=options, retry_config={"max_retries": 0})
    except (exceptions.BaseError, ValueError) as error:
        reason = without_secrets(str(error).partition("\n")[0])[:200]
        raise CheckpointError(f"{plain_url(url)}: is no URL of a store, or one that lacks settings: {reason}") from None
    _check_process(plain_url(url))
    return store


def _check_process(name: str) -> None:
    """Refuse a process that was forked from one that has used obstore: its threads are not there, and it would hang."""
    if _used_by and _used_by[0] != os.getpid():
        raise ConfigError(f"{name}: this process was forked from one that has read from a store; start it by spawn")
    _used_by[:] = [os.getpid()]


def _quoted_tag(tag: str) -> str:
    """Return an ETag as HTTP has it: lists of Azure and GCS leave the quotes out."""
    return f'"{tag.strip(chr(34))}"'


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    from obstore import exceptions

    try:
        yield
    except exceptions.PreconditionError:
        raise replaced_error(name) from None
    except (exceptions.NotFoundError, FileNotFoundError):
        raise CheckpointError(f"{name}: is not there") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _denied(name, _summary(error)) from None
    except exceptions.BaseError as error:
        what = _summary(error)
        status = int(code[0]) if (code := re.search(r"\b[345]\d\d\b", what)) is not None else 0
        if status in DENIED:
            raise _denied(name, what) from None
        if status == 404:  # of a list: there is no such bucket
            raise CheckpointError(f"{name}: is not there") from None
        if "non-partial" in str(error) or isinstance(error, exceptions.NotSupportedError):
            raise CheckpointError(f"{name}: the store does not serve ranges; {USE_ANOTHER}") from None
        if REGION in what or (status < 500 and status and status not in TRANSIENT):
            raise CheckpointError(f"{name}: the store does not answer as it should: {what}") from None
        raise TransientError(what, is_throttled=status in THROTTLED or "SlowDown" in what) from None


def _denied(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: the store refuses access ({what}); check the credentials, and that they may list and read it"
    )


def _summary(error: Exception) -> str:
    """Return what an error of obstore says, without its text: that quotes answers, which may hold session tokens."""
    text = str(error)
    patterns = r"status: (\d{3})", r"\b(\d{3}) [A-Z][a-z]+", r"<Code>(\w{1,64})</Code>", r"kind: (\w{1,32})"
    matches = (re.search(pattern, text) for pattern in patterns)
    causes = ("request or response body error", "error sending request", "builder error", "Requested", REGION)
    details = [match[1] for match in matches if match] + [cause for cause in causes if cause in text][:1]
    if METADATA_HOST in text:
        details.append("asked this machine for credentials, as the environment has none")
    return ", ".join(dict.fromkeys([type(error).__name__, *details]))
