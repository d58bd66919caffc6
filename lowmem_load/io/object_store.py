"""Files in S3, GCS and Azure, through obstore (Rust's object_store). Checked with obstore 0.12."""

from __future__ import annotations

import configparser
import functools
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

    def __init__(self, url: str, key: str, nbytes: int, version: str, *, unsigned: bool = False) -> None:
        self.name, self.nbytes, self.version = f"{plain_url(url).rstrip('/')}/{key}", nbytes, version
        self._url, self._key, self._unsigned = plain_url(url), key, unsigned

    @property
    def entry(self) -> dict[str, Any]:
        """See `RemoteObject`."""
        place = {"store": True, "key": self._key, "unsigned": self._unsigned}
        return {"url": self._url, "size": self.nbytes, "etag": self.version, **place}

    def fetch(self, offset: int, memory: memoryview, check: Callable[[], object]) -> None:
        """See `RemoteObject`."""
        if not memory:
            return
        import obstore

        _check_process(self.name)
        with _translate_errors(self.name):
            options: Any = {"range": (offset, offset + memory.nbytes), "if_match": self.version}
            result = obstore.get(open_store(self._url, unsigned=self._unsigned), self._key, options=options)
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
    """Return the files in a folder of an object store, and in one subfolder of it, by path inside the folder.

    Where S3 needs credentials and the environment names none, it is asked without a signature first: the bucket may be
    public, and to ask the machine for its role takes long where it has none.
    """
    if not (url.startswith("s3") and not has_credentials()):
        return _list(url, subfolder, unsigned=False)
    try:
        return _list(url, subfolder, unsigned=True)
    except CheckpointError:
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise
        return _list(url, subfolder, unsigned=False)


def _list(url: str, subfolder: str, *, unsigned: bool) -> dict[str, RemoteObject]:
    store = open_store(url, unsigned=unsigned)
    import obstore

    with _translate_errors(plain_url(url)):
        files: dict[str, RemoteObject] = {}
        for prefix in dict.fromkeys(("", subfolder.strip("/"))):
            for meta in obstore.list_with_delimiter(store, prefix or None)["objects"]:
                if meta["path"] not in ("", prefix):  # an empty object that marks a folder
                    files[meta["path"]] = _object(url, meta, unsigned=unsigned)
        return files


def find(url: str, file: str, *, unsigned: bool) -> RemoteObject | None:
    """Return a file in the folder at a URL; None if it is not there."""
    store = open_store(url, unsigned=unsigned)
    import obstore

    name = f"{plain_url(url).rstrip('/')}/{file}"
    _check_process(name)
    with _translate_errors(name):
        try:
            return _object(url, obstore.head(store, file), unsigned=unsigned)
        except FileNotFoundError:
            return None


def _object(url: str, meta: Any, *, unsigned: bool) -> StoreObject:
    tag = meta["e_tag"]
    if tag is None:
        name = f"{plain_url(url).rstrip('/')}/{meta['path']}"
        raise CheckpointError(f"{name}: the store gives no ETag, so it may change unseen")
    return StoreObject(url, meta["path"], meta["size"], _quoted_tag(tag), unsigned=unsigned)


def open_store(url: str, *, unsigned: bool = False) -> Any:
    """Return obstore's store of a URL, which has asked nobody yet."""
    settings = aws_settings() if url.startswith("s3") else {}
    if unsigned:
        settings["skip_signature"] = "true"
    environment = (item for item in os.environ.items() if item[0].startswith(("AWS_", "AZURE_", "GOOGLE_", "HOME")))
    return _store(url, tuple(settings.items()), TIMEOUT_S, (*environment, os.getpid()))


@functools.lru_cache(maxsize=8)
def _store(url: str, settings: tuple[tuple[str, str], ...], timeout_s: float, _: object) -> Any:
    """Return the store by settings and the environment. It is kept, with its connections."""
    try:
        from obstore import exceptions
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(
            f"{plain_url(url)}: install obstore to read from it: pip install 'lowmem-load[stores]'"
        ) from error
    options: Any = {"timeout": f"{10 * timeout_s:g}s", "read_timeout": f"{timeout_s:g}s", "connect_timeout": "5s"}
    endpoints = (os.environ.get(name, "") for name in ENDPOINTS)
    if any(endpoint.startswith("http://") for endpoint in (*endpoints, dict(settings).get("endpoint", ""))):
        options["allow_http"] = True  # as the owner of the environment says
    try:
        config: Any = dict(settings)
        store = from_url(url, client_options=options, retry_config={"max_retries": 0}, **config)
    except (exceptions.BaseError, ValueError) as error:
        reason = without_secrets(str(error).partition("\n")[0])[:200]
        raise CheckpointError(f"{plain_url(url)}: is no URL of a store, or one that lacks settings: {reason}") from None
    _check_process(plain_url(url))
    return store


# -- the files of AWS --------------------------------------------------------------------------------------------------

_IN_ENVIRONMENT = (
    *("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables of which each one says who asks, or that nobody does; obstore takes them."""

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_OF_PROFILE = {"region": ("region", "AWS_REGION"), "endpoint_url": ("endpoint", "AWS_ENDPOINT_URL")}


def has_credentials() -> bool:
    """Return whether the environment, or the files of AWS, say who asks."""
    return any(name in os.environ for name in _IN_ENVIRONMENT) or "access_key_id" in aws_settings()


def aws_settings() -> dict[str, str]:
    """Return the settings of obstore by the profile in `~/.aws`, as far as the environment does not have them.

    Raises ConfigError for a profile that is not there, or whose credentials come from elsewhere.
    """
    named = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    profile = named or "default"
    files = configparser.RawConfigParser(), configparser.RawConfigParser()
    for file, variable, name in zip(
        files, ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), ("credentials", "config"), strict=True
    ):
        path = os.path.expanduser(os.environ.get(variable) or f"~/.aws/{name}")
        try:
            file.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as a file of AWS: {type(error).__name__}") from None
    sections = profile, profile if profile == "default" else f"profile {profile}"
    found: dict[str, str] = {}
    for file, section in zip(reversed(files), reversed(sections), strict=True):
        found |= dict(file[section]) if file.has_section(section) else {}
    in_environment = any(name in os.environ for name in _IN_ENVIRONMENT)
    if named and not found and not in_environment:
        raise ConfigError(f"AWS_PROFILE={profile}: no such profile in the files of AWS (~/.aws)")
    elsewhere = sorted({"role_arn", "sso_session", "sso_start_url", "credential_process"} & found.keys())
    settings: dict[str, str] = {}
    if not in_environment:
        if elsewhere and "aws_access_key_id" not in found:
            raise ConfigError(
                f"the profile {profile!r} of AWS has its credentials by {elsewhere[0]}; put them into the environment: "
                f'eval "$(aws configure export-credentials --profile {profile} --format env)"'
            )
        settings = {name: found[key] for key, name in _KEYS.items() if key in found}
    for key, (name, variable) in _OF_PROFILE.items():
        if key in found and not any(
            place in os.environ for place in (variable, f"{variable}_S3", "AWS_DEFAULT_REGION")
        ):
            settings[name] = found[key]
    return settings


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
