"""Files in a folder on an HTTP server, which has no list of them: each name is looked up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from http.client import HTTPResponse
from urllib.parse import quote, urlsplit

from lowmem_load.errors import CheckpointError
from lowmem_load.io.http_object import HttpObject, refuse_status, requested
from lowmem_load.io.remote_file import Check, RemoteObject, in_threads, retried
from lowmem_load.io.stand_ins import plain_url

HEAD_REFUSED = frozenset({403, 405, 501})
"""Answers to HEAD of servers that may answer GET: URLs can be signed for GET alone."""


class _HeadRefusedError(Exception):
    """The server does not answer HEAD."""


def looked_up(url: str, files: Iterable[str], check: Check) -> dict[str, RemoteObject]:
    """Return those of some files that are there, by their path in the folder at `url`."""
    parts = urlsplit(url)
    base = parts._replace(path=parts.path.rstrip("/") + "/").geturl()

    def look_up(file: str, check: Check) -> RemoteObject | None:
        what = f"{plain_url(base)}{file}: cannot be found"
        with contextlib.suppress(_HeadRefusedError):
            return retried(lambda: _ask(base, file, "HEAD"), what, check=check)
        return retried(lambda: _ask(base, file, "GET"), what, check=check)

    files = list(dict.fromkeys(files))
    items = in_threads(look_up, files, check)
    return {file: item for file, item in zip(files, items, strict=True) if item is not None}


def _ask(base: str, file: str, method: str) -> RemoteObject | None:
    """Ask for a file, by HEAD, or by GET for its first byte; return None if it is not there."""
    parts = urlsplit(base)
    url = parts._replace(path=parts.path + quote(file)).geturl()
    headers = {"Range": "bytes=0-0"} if method == "GET" else {}
    with requested(method, url, headers, dict, first=url) as (_, answer):
        if answer.status in HEAD_REFUSED and method == "HEAD":
            raise _HeadRefusedError
        if answer.status in (404, 410) or (answer.status == 403 and file != "config.json"):
            return None  # S3 says 403 for what is not there, to who may not list
        refuse_status(plain_url(url), answer)
        length, tag = _length(answer), str(answer.headers.get("ETag", ""))
        version = tag if tag.startswith('"') else answer.headers.get("Last-Modified")  # a weak tag is no condition
        if not version or not re.fullmatch(r"[0-9]{1,15}", length):
            size = "Content-Length" if method == "HEAD" else "size in Content-Range"
            raise CheckpointError(
                f"{plain_url(url)}: the server sends no {size if version else 'ETag and no Last-Modified'}, without "
                "which a file that is replaced goes unnoticed; use another server, or download the checkpoint"
            )
        return HttpObject(url, int(length), version)


def _length(answer: HTTPResponse) -> str:
    """Return the size of the whole file, as text. A range of an empty file is answered with 416."""
    if answer.status in (206, 416):
        return str(answer.headers.get("Content-Range", "")).rpartition("/")[2]
    return str(answer.headers.get("Content-Length", ""))
